"""The C++ reader accepts and refuses what the safetensors package accepts and refuses."""

import random
import struct
from pathlib import Path

import pytest

import io_tool

safetensors = pytest.importorskip("safetensors")


def file(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def one(
    dtype: str = "F32", shape: str = "[1]", offsets: str = "[0,4]", data: bytes = bytes(4)
) -> bytes:
    return file(f'{{"a":{tensor(dtype, shape, offsets)}}}', data)


def two(first: str, second: str, data: bytes = bytes(8)) -> bytes:
    return file(f'{{"a":{tensor(offsets=first)},"b":{tensor(offsets=second)}}}', data)


T = tensor()
FOUR = bytes(4)
BIG = 2**62

# name: the file. Whether it is accepted is for the package to say, and the C++ reader must agree.
CASES = {
    "plain": one(),
    "two tensors": two("[0,4]", "[4,8]"),
    "tensors out of order": two("[4,8]", "[0,4]"),
    "no tensors": file("{}"),
    "zero-size tensor": one(shape="[0,4]", offsets="[0,0]", data=b""),
    "zero-size tensor between": file(
        f'{{"a":{T},"z":{tensor(shape="[0]", offsets="[4,4]")},"b":{tensor(offsets="[4,8]")}}}',
        bytes(8),
    ),
    "scalar": one(shape="[]"),
    "trailing spaces": file(f'{{"a":{T}}}   ', FOUR),
    "leading space": file(f' {{"a":{T}}}', FOUR),
    "other white space": file(f'\t{{"a":{T}}}\r\n\t', FOUR),
    "string metadata": file(f'{{"__metadata__":{{"format":"pt"}},"a":{T}}}', FOUR),
    "null metadata": file(f'{{"__metadata__":null,"a":{T}}}', FOUR),
    "metadata alone": file('{"__metadata__":{"a":"b"}}'),
    "empty name": file(f'{{"":{T}}}', FOUR),
    "escaped name": file(f'{{"\\ud83d\\ude00\\u0000":{T}}}', FOUR),
    "unknown field": file(f'{{"a":{T[:-1]},"x":[1,{{"y":null}}]}}}}', FOUR),
    "one trailing byte": one() + b"\0",
    "one missing byte": one()[:-1],
    "4-byte hole": two("[0,4]", "[8,12]", bytes(12)),
    "hole at the start": one(offsets="[4,8]", data=bytes(8)),
    "overlap": two("[0,4]", "[2,6]", bytes(6)),
    "same bytes twice": two("[0,4]", "[0,4]", FOUR),
    "reversed offsets": one(offsets="[4,0]"),
    "reversed empty offsets": one(shape="[0]", offsets="[4,0]", data=b""),
    "shape larger than bytes": one(shape="[2]"),
    "shape smaller than bytes": one(shape="[2]", offsets="[0,12]", data=bytes(12)),
    "offsets after the file": one(shape="[2]", offsets="[0,8]"),
    "shape product overflow": one(shape=f"[{BIG},8]"),
    "shape bits overflow": one(dtype="F64", shape=f"[{BIG}]"),
    "overflow before a zero": one(shape=f"[{BIG},8,0]", offsets="[0,0]", data=b""),
    "zero before an overflow": one(shape=f"[0,{BIG},8]", offsets="[0,0]", data=b""),
    "offset overflow": one(dtype="U8", shape=f"[{2**64 - 1}]", offsets=f"[0,{2**64 - 1}]"),
    "offset over 64 bits": one(offsets=f"[0,{2**64 + 4}]"),
    "duplicate key": file(f'{{"a":{T},"a":{tensor(offsets="[4,8]")}}}', bytes(8)),
    "duplicate dtype": file(f'{{"a":{{"dtype":"F32",{T[1:]}}}', FOUR),
    "duplicate metadata": file('{"__metadata__":{},"__metadata__":{}}'),
    "header length 0": file("", length=0),
    "header length 0 and data": file("{}", length=0),
    "header over 100 MB": file("{}" + " " * 100, length=100_000_001),
    "header length 2^63": file("{}", length=2**63),
    "header length 2^64 - 1": file("{}", length=2**64 - 1),
    "header longer than the file": file(f'{{"a":{T}}}', length=1000),
    "header shorter than its text": file(f'{{"a":{T}}}', FOUR, length=10),
    "2-byte file": b"ab",
    "7-byte file": bytes(7),
    "8-byte file": bytes(8),
    "number metadata": file(f'{{"__metadata__":{{"a":1}},"a":{T}}}', FOUR),
    "null in metadata": file('{"__metadata__":{"a":null}}'),
    "list metadata": file('{"__metadata__":[]}'),
    "metadata as a tensor": file(f'{{"__metadata__":{T}}}', FOUR),
    "NUL padding": file(f'{{"a":{T}}}\0\0', FOUR),
    "form feed padding": file(f'{{"a":{T}}}\f', FOUR),
    "byte order mark": file(f'\ufeff{{"a":{T}}}', FOUR),
    "unknown dtype": one(dtype="F31"),
    "lower-case dtype": one(dtype="f32"),
    "number dtype": file(f'{{"a":{T.replace(chr(34) + "F32" + chr(34), "7")}}}', FOUR),
    "invalid UTF-8 name": file(b'{"\xff":' + T.encode() + b"}", FOUR),
    "surrogate in UTF-8": file(b'{"\xed\xa0\x80":' + T.encode() + b"}", FOUR),
    "lone surrogate": file(f'{{"\\ud800":{T}}}', FOUR),
    "control character": file(f'{{"a\x01":{T}}}', FOUR),
    "negative dimension": one(shape="[-1]"),
    "negative zero": one(offsets="[-0,4]"),
    "fractional dimension": one(shape="[1.0]"),
    "exponent dimension": one(shape="[1e0]"),
    "string dimension": one(shape='["1"]'),
    "shape not a list": one(shape="1"),
    "null shape": one(shape="null"),
    "one offset": one(offsets="[0]"),
    "three offsets": one(offsets="[0,4,4]"),
    "no shape": file('{"a":{"dtype":"F32","data_offsets":[0,4]}}', FOUR),
    "no dtype": file('{"a":{"shape":[1],"data_offsets":[0,4]}}', FOUR),
    "no offsets": file('{"a":{"dtype":"F32","shape":[1]}}', FOUR),
    "tensor null": file('{"a":null}'),
    "list header": file("[]"),
    "null header": file("null"),
    "two values": file("{}{}"),
    "trailing comma": file(f'{{"a":{T},}}', FOUR),
    "comment": file(f'{{"a":{T}/**/}}', FOUR),
    "half a byte": one(dtype="F4", shape="[3]", offsets="[0,2]", data=bytes(2)),
    "number out of range": file(f'{{"a":{T[:-1]},"x":1e400}}}}', FOUR),
    "127 levels": file(f'{{"a":{T[:-1]},"x":{"[" * 125}{"]" * 125}}}}}', FOUR),
    "128 levels": file(f'{{"a":{T[:-1]},"x":{"[" * 126}{"]" * 126}}}}}', FOUR),
}  # fmt: skip
KNOWN_DTYPES = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
    "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip
for dtype in (*KNOWN_DTYPES, "I4", "U4", "C128", "F128", "F8_E4M3FN", "F8", "BF8", "BIT"):
    for size in (4, 6, 8, 16, 32, 64):
        CASES[f"{dtype} in {size} bits"] = one(dtype, "[8]", f"[0,{size}]", bytes(size))

# Ambiguous or oddly written files that the package lets pass. The C++ reader is stricter, as
# cpp/io/safetensors.h says.
STRICTER = {
    "equal duplicate": file(f'{{"a":{T},"a":{T}}}', FOUR),
    "duplicate whose last is right": file(f'{{"a":{tensor(offsets="[0,8]")},"a":{T}}}', FOUR),
    "duplicate unknown field": file(f'{{"a":{T[:-1]},"x":1,"x":2}}}}', FOUR),
    "duplicate metadata entry": file('{"__metadata__":{"a":"b","a":"c"}}'),
    "tensor as a list": file('{"a":["F32",[1],[0,4]]}', FOUR),
    "dtype as an object": file(
        '{"a":{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}}', FOUR
    ),
    "dimension of 64 bits": one(shape=f"[0,{2**64 - 1}]", offsets="[0,0]", data=b""),
}


def package_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def verdicts(folder: Path, contents: list[bytes]) -> list[str]:
    paths = [folder / f"{i}.safetensors" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return io_tool.verdicts("safetensors", paths)


def test_every_row_is_judged_as_by_the_package(tmp_path: Path) -> None:
    got = dict(zip(CASES, verdicts(tmp_path, list(CASES.values())), strict=True))
    accepted = [name for name, content in CASES.items() if package_accepts(content)]
    assert [name for name, line in got.items() if line == "ok"] == accepted
    assert 30 < len(accepted) < len(CASES) - 60  # both kinds are there


def test_a_refusal_names_the_file_and_the_tensor(tmp_path: Path) -> None:
    (line,) = verdicts(tmp_path, [CASES["overlap"]])
    assert line.startswith(f"refused {tmp_path}/0.safetensors: tensor 'b': data_offsets [2, 6]")


def test_stricter_where_the_package_lets_pass(tmp_path: Path) -> None:
    assert all(package_accepts(content) for content in STRICTER.values())
    assert all(line.startswith("refused") for line in verdicts(tmp_path, list(STRICTER.values())))


def test_random_changes_are_judged_as_by_the_package(tmp_path: Path) -> None:
    """Bytes of good files changed at random."""
    rng = random.Random(0)
    seeds = [
        CASES[name]
        for name in (
            "two tensors",
            "string metadata",
            "scalar",
            "unknown field",
            "zero-size tensor between",
        )
    ]
    contents = []
    for _ in range(3000):
        content = bytearray(rng.choice(seeds))
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(8, len(content))
            how = rng.random()
            if how < 0.4:
                content[at] = rng.choice(b'{}[],:"0123456789ab \\n\x00\xff-.eE')
            elif how < 0.6:
                del content[at]
            elif how < 0.8:
                content.insert(at, rng.choice(b'{}[],:"0123456789 '))
            else:
                content[at] ^= 1 << rng.randrange(8)
        if rng.random() < 0.8:  # the length of the header, as a writer would state it
            content[:8] = struct.pack("<Q", max(0, content.rfind(b"}") + 1 - 8))
        contents.append(bytes(content))
    lines = verdicts(tmp_path, contents)
    wrong = [
        (content, line)
        for content, line in zip(contents, lines, strict=True)
        if (line == "ok") != package_accepts(content) and "duplicate key" not in line
    ]
    assert wrong == []
    assert lines.count("ok") > 150


def test_a_file_that_the_package_wrote_is_read(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    save_file(
        {"w": np.ones((2, 3), np.float16), "s": np.array(1.0)},
        tmp_path / "x.safetensors",
        metadata={"k": "ü"},
    )
    assert io_tool.verdicts("safetensors", [tmp_path / "x.safetensors"]) == ["ok"]
