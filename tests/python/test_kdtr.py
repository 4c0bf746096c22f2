import struct

import numpy as np
import pytest
import xxhash

from kdtree_engine import kdtr

HEADER_BYTES = 32


def entry(name=b"a", dtype=8, shape=(2,), offset=128, num_bytes=8, zero=0, data=None, xxh64=None):
    """One table entry written by hand, independent of the writer."""
    if xxh64 is None:
        xxh64 = xxhash.xxh64_intdigest(bytes(num_bytes % 2**20) if data is None else data)
    row = struct.pack("<HBBIQQQ", len(name), dtype, len(shape), zero, offset, num_bytes, xxh64)
    row += b"".join(struct.pack("<Q", d) for d in shape) + name
    return row + bytes(-len(row) % 8)


def assemble(entries, data=b"", *, magic=b"KDTR", version=1, num_arrays=None, table_xxh64=None,
             table_bytes=None, file_bytes=None):  # fmt: skip
    """A file of the given table entries, followed by `data` at the next multiple of 64."""
    table = b"".join(entries)
    body = table + (bytes(-(HEADER_BYTES + len(table)) % 64) + data if data else b"")
    if table_xxh64 is None:
        table_xxh64 = xxhash.xxh64_intdigest(table)
    return struct.pack(
        "<4sIQIIQ", magic, version,
        HEADER_BYTES + len(body) if file_bytes is None else file_bytes,
        len(entries) if num_arrays is None else num_arrays,
        len(table) if table_bytes is None else table_bytes, table_xxh64,
    ) + body  # fmt: skip


def every_dtype():
    rng = np.random.default_rng(1)
    arrays = {
        "bool": np.array([True, False, True]),
        "u8": rng.integers(0, 256, (3, 5), dtype=np.uint8),
        "i8": rng.integers(-128, 128, 7, dtype=np.int8),
        "i32": np.array([-(2**31), 2**31 - 1], np.int32),
        "i64": np.array([[-(2**63)], [2**63 - 1]], np.int64),
        "u64": np.array([2**64 - 1], np.uint64),
        "f16": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "f32": rng.standard_normal((1, 2, 1, 3)).astype(np.float32),
        "f64": rng.standard_normal(129),
        "scalar": np.array(1.5, np.float32),
        "no elements": np.zeros((0, 4), np.float32),
        "nan and inf": np.array([np.nan, np.inf, -np.inf], np.float32),
        "ü€": np.zeros(1, np.int8),
    }
    return arrays


def test_every_dtype_comes_back_with_its_bytes(tmp_path):
    arrays = every_dtype()
    bf16 = kdtr.to_bf16(np.linspace(-3, 3, 10, dtype=np.float32).reshape(2, 5))
    kdtr.write(tmp_path / "x.kdtr", {**arrays, "bf16": bf16})
    back = kdtr.read(tmp_path / "x.kdtr")
    assert list(back) == [*arrays, "bf16"]
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()
    assert np.array_equal(back["bf16"].bits, bf16.bits)
    assert back["bf16"].shape == (2, 5)


def test_the_bytes_are_those_of_the_specification(tmp_path):
    kdtr.write(tmp_path / "x.kdtr", {"a": np.array([1, 2], np.float32), "b": np.array(True)})
    data = np.array([1, 2], "<f4").tobytes()
    table = entry(offset=128, data=data)
    table += entry(name=b"b", dtype=0, shape=(), offset=192, num_bytes=1, data=b"\1")
    want = struct.pack("<4sIQIIQ", b"KDTR", 1, 193, 2, 88, xxhash.xxh64_intdigest(table)) + table
    want += bytes(128 - len(want)) + data
    want += bytes(192 - len(want)) + b"\1"
    assert (tmp_path / "x.kdtr").read_bytes() == want


def test_a_file_without_arrays_is_its_header(tmp_path):
    kdtr.write(tmp_path / "x.kdtr", {})
    assert len((tmp_path / "x.kdtr").read_bytes()) == HEADER_BYTES
    assert kdtr.read(tmp_path / "x.kdtr") == {}


def test_arrays_without_elements_end_the_file_at_their_offset(tmp_path):
    kdtr.write(tmp_path / "x.kdtr", {"a": np.zeros(3, np.int8), "b": np.zeros((2, 0), np.int64)})
    (_, b) = kdtr.read_table(tmp_path / "x.kdtr")
    assert (b.offset, b.bytes) == (256, 0)
    assert (tmp_path / "x.kdtr").stat().st_size == 256
    assert kdtr.read(tmp_path / "x.kdtr")["b"].shape == (2, 0)


def test_strided_and_big_endian_arrays_are_stored_plain(tmp_path):
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    kdtr.write(tmp_path / "x.kdtr", {"t": array.T, "big": array.astype(">i4")})
    back = kdtr.read(tmp_path / "x.kdtr")
    assert np.array_equal(back["t"], array.T)
    assert np.array_equal(back["big"], array)


def test_the_table_tells_what_a_file_holds(tmp_path):
    kdtr.write(tmp_path / "x.kdtr", {"w": kdtr.to_bf16(np.ones((2, 3)))})
    (e,) = kdtr.read_table(tmp_path / "x.kdtr")
    assert (e.name, e.dtype, e.shape, e.offset, e.bytes) == ("w", "bf16", (2, 3), 128, 12)


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    one, ulp = 0x3F80, 2.0**-7
    cases = [
        (1.0, one),
        (1 + ulp / 2, one),  # a tie, to even
        (1 + 3 * ulp / 2, one + 2),  # a tie, to even
        (1 + ulp * 0.501, one + 1),
        (-0.0, 0x8000),
        (np.inf, 0x7F80),
        (3.4e38, 0x7F80),  # rounds up to infinity
    ]
    values, bits = zip(*cases, strict=True)
    assert kdtr.to_bf16(values).bits.tolist() == list(bits)
    assert np.isnan(kdtr.to_bf16([np.nan, -np.nan]).to_float32()).all()
    lowest_nan = np.array([0x7F800001], np.uint32).view(np.float32)  # must not become infinity
    assert np.isnan(kdtr.to_bf16(lowest_nan).to_float32()).all()
    every = np.arange(65536, dtype=np.uint16)
    finite = every[(every & 0x7F80) != 0x7F80]
    assert np.array_equal(kdtr.to_bf16(kdtr.BF16Array(finite).to_float32()).bits, finite)


@pytest.mark.parametrize(
    "name, array, fault",
    [
        ("", np.zeros(1), "0 bytes"),
        ("n" * 65536, np.zeros(1), "65536 bytes"),
        ("\ud800", np.zeros(1), "not valid Unicode"),
        ("c", np.zeros(1, np.complex64), "dtype complex64"),
        ("s", np.array(["x"]), "dtype <U1"),
        ("u16", np.zeros(1, np.uint16), "dtype uint16"),
        ("o", np.array([None]), "dtype object"),
        ("l", [1, 2], "got list"),
        ("d", np.zeros((1,) * 9), "9 dimensions"),
        ("b", kdtr.BF16Array(np.zeros(1, np.int32)), "holds int32"),
    ],
)
def test_the_writer_refuses(tmp_path, name, array, fault):
    with pytest.raises(kdtr.KdtrError, match=fault):
        kdtr.write(tmp_path / "x.kdtr", {name: array})
    assert not (tmp_path / "x.kdtr").exists()


GOOD = assemble([entry()], bytes(8))
TWO = [entry(), entry(b"b", offset=192)]  # the table ends at 112
TWO_DATA = bytes(64 + 8)


@pytest.mark.parametrize(
    "file, fault",
    [
        (b"", "truncated: 0 bytes"),
        (GOOD[:31], "truncated: 31 bytes"),
        (GOOD[:-1], "truncated: 135 bytes, the header says 136"),
        (GOOD + b"\0", "trailing bytes"),
        (assemble([entry()], bytes(8) + bytes(4)), "trailing bytes: the arrays end at 136 of 140"),
        (assemble([entry()], bytes(8), magic=b"KDTX"), "not a KDTR file"),
        (assemble([entry()], bytes(8), version=2), "version 2"),
        (assemble([entry()], bytes(8), version=0), "version 0"),
        (assemble([entry()], bytes(8), table_bytes=2**32 - 1), "truncated: the table ends"),
        (assemble([entry()], bytes(8), table_xxh64=1), "bad checksum of the table"),
        (assemble([entry()], bytes(8), num_arrays=2), "array 1: truncated"),
        (assemble([entry()], bytes(8), num_arrays=2**32 - 1), "array 1: truncated"),
        (assemble([entry(), bytes(8)], bytes(8), num_arrays=1), "8 unused bytes"),
        (assemble([entry()[:-16]], bytes(8)), "array 0: truncated"),
        (assemble(TWO, TWO_DATA), None),
        (assemble([entry(), entry(offset=192)], TWO_DATA), "'a': duplicate name"),
        (assemble([entry(), entry(b"b")], bytes(8)), "'b': overlapping"),
        (assemble([entry(offset=192), entry(b"b")], TWO_DATA), "'b': overlapping"),
        (assemble([entry(offset=64)], bytes(8)), "'a': overlapping"),
        (assemble([entry(offset=0)], bytes(8)), "'a': overlapping"),
        (assemble([entry(offset=132)], bytes(12)), "'a': misaligned: offset 132"),
        (assemble([entry(offset=192)], bytes(8)), "'a': truncated: it ends at 200 of 136"),
        (assemble([entry(offset=2**64 - 64)], bytes(8)), "'a': truncated"),
        (assemble([entry(shape=(4,), num_bytes=16)], bytes(8)), "'a': truncated: it ends at 144"),
        (assemble([entry(dtype=10)], bytes(8)), "'a': unknown dtype 10"),
        (assemble([entry(shape=(3,))], bytes(8)), "'a': 8 bytes, shape .* has 12"),
        (assemble([entry(dtype=9)], bytes(8)), "'a': 8 bytes, shape .* of f64 has 16"),
        (assemble([entry(shape=(2**62, 8))], bytes(8)), "'a': oversized"),
        (assemble([entry(shape=(2**32, 2**32))], bytes(8)), "'a': oversized"),
        (assemble([entry(shape=(2**63, 2, 2))], bytes(8)), "'a': oversized"),
        (assemble([entry(shape=(2**62, 8, 0), num_bytes=0)]), "'a': oversized"),
        (assemble([entry(shape=(1,) * 9, num_bytes=4)], bytes(4)), "'a': 9 dimensions"),
        (assemble([entry(zero=1)], bytes(8)), "'a': reserved field is 1"),
        (assemble([entry(name=b"")], bytes(8)), "array 0: empty name"),
        (assemble([entry(name=b"\xff\xfe")], bytes(8)), "array 0: the name is not valid UTF-8"),
        (assemble([entry(xxh64=0)], bytes(8)), "'a': bad checksum of its data"),
        (assemble([entry(dtype=0, shape=(8,), data=b"\2" * 8)], b"\2" * 8), "'a': a bool that"),
    ],
)
def test_the_reader_refuses(tmp_path, file, fault):
    path = tmp_path / "x.kdtr"
    path.write_bytes(file)
    if fault is None:
        assert sorted(kdtr.read(path)) == ["a", "b"]
        return
    with pytest.raises(kdtr.KdtrError, match=fault) as error:
        kdtr.read(path)
    assert str(path) in str(error.value)


def test_no_prefix_and_no_flipped_byte_is_read_as_another_file(tmp_path):
    kdtr.write(tmp_path / "x.kdtr", every_dtype())
    file = (tmp_path / "x.kdtr").read_bytes()
    want = {name: a.tobytes() for name, a in kdtr.parse(file).items()}
    for length in range(len(file)):
        with pytest.raises(kdtr.KdtrError):
            kdtr.parse(file[:length])
    for at in range(len(file)):
        flipped = bytearray(file)
        flipped[at] ^= 0x11
        try:
            arrays = kdtr.parse(bytes(flipped))
        except kdtr.KdtrError:
            continue
        # Only the padding between arrays is outside every check.
        assert {name: a.tobytes() for name, a in arrays.items()} == want
