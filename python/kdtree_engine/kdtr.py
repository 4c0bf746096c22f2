"""KDTR: named arrays in one file, readable from C++ without numpy. Byte layout in docs/kdtr.md."""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kdtree_engine.checks import path as checked_path
from kdtree_engine.checks import shown

VERSION = 1
MAX_NDIM = 8
_MAGIC = b"KDTR"
# magic, version, file_bytes, num_arrays, table_bytes, table_xxh64
_HEADER = struct.Struct("<4sIQIIQ")
# name_bytes, dtype, ndim, zero, offset, bytes, xxh64
_ENTRY = struct.Struct("<HBBIQQQ")
_ALIGNMENT = 64
_DTYPES = ("bool", "u8", "i8", "i32", "i64", "u64", "f16", "bf16", "f32", "f64")
_NUMPY = ("?", "u1", "<i1", "<i4", "<i8", "<u8", "<f2", "<u2", "<f4", "<f8")  # bf16 as its bits
_BF16 = _DTYPES.index("bf16")


class KdtrError(ValueError):
    """A file or an array that KDTR refuses; the message names the array and the fault."""


@dataclass(frozen=True, eq=False)
class BF16Array:
    """bfloat16 values by their bits, since numpy has no such type."""

    bits: npt.NDArray[np.uint16]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def to_float32(self) -> npt.NDArray[np.float32]:
        """The same values in float32 (exact)."""
        wide = self.bits.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)


def to_bf16(x: npt.ArrayLike) -> BF16Array:
    """Rounds float32 values to bfloat16, to nearest and ties to even. NaN stays NaN."""
    values = np.array(x, dtype=np.float32, order="C")
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return BF16Array(np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16))


Array = npt.NDArray[Any] | BF16Array


@dataclass(frozen=True)
class Entry:
    """One row of a file's table: where an array lies and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    bytes: int
    xxh64: int


def _align(position: int, to: int) -> int:
    return (position + to - 1) // to * to


def _encode(name: str, array: Array) -> tuple[bytes, int, tuple[int, ...], bytes]:
    """Checks one array to be written; gives its name, dtype code, shape and data."""
    where = f"array {shown(name)}"
    if not isinstance(name, str):
        raise KdtrError(f"{where}: the name is no str")
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KdtrError(f"{where}: the name is not valid Unicode") from error
    if not 1 <= len(encoded) <= 65535:
        raise KdtrError(f"{where}: the name has {len(encoded)} bytes, want 1 to 65535")
    if isinstance(array, BF16Array):
        values, code = array.bits, _BF16
        if not isinstance(values, np.ndarray) or values.dtype != np.uint16:
            found = getattr(values, "dtype", type(values).__name__)
            raise KdtrError(f"{where}: BF16Array holds {found}, want a numpy array of uint16")
    elif isinstance(array, np.ndarray):
        values = array
        dtype = array.dtype.newbyteorder("<")
        codes = [i for i, d in enumerate(_NUMPY) if np.dtype(d) == dtype and i != _BF16]
        if not codes:
            raise KdtrError(f"{where}: dtype {array.dtype} cannot be stored, want one of {_DTYPES}")
        code = codes[0]
    else:
        raise KdtrError(f"{where}: want a numpy array or a BF16Array, got {type(array).__name__}")
    if values.ndim > MAX_NDIM:
        raise KdtrError(f"{where}: {values.ndim} dimensions, want at most {MAX_NDIM}")
    return encoded, code, values.shape, values.astype(_NUMPY[code], copy=False).tobytes()


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array]) -> None:
    """Writes `arrays` in their order.

    Raises KdtrError naming the array that cannot be stored, OSError when the file cannot be
    written.
    """
    if not isinstance(arrays, Mapping):
        raise KdtrError(f"arrays is {shown(arrays)}, want a dict of arrays")
    encoded = [_encode(name, array) for name, array in arrays.items()]
    table_bytes = sum(
        _align(_ENTRY.size + 8 * len(shape) + len(name), 8) for name, _, shape, _ in encoded
    )
    table, data = bytearray(), bytearray()
    start = _HEADER.size + table_bytes
    for name, code, shape, raw in encoded:
        offset = _align(start + len(data), _ALIGNMENT)
        data += bytes(offset - start - len(data)) + raw
        xxh64 = xxhash.xxh64_intdigest(raw)
        row = _ENTRY.pack(len(name), code, len(shape), 0, offset, len(raw), xxh64)
        row += struct.pack(f"<{len(shape)}Q", *shape) + name
        table += row + bytes(_align(len(row), 8) - len(row))
    header = _HEADER.pack(
        _MAGIC, VERSION, start + len(data), len(encoded), table_bytes, xxhash.xxh64_intdigest(table)
    )
    checked_path("path", path).write_bytes(header + table + data)


def _parse_table(file: bytes, source: str) -> list[Entry]:
    """Checks everything but the data; every entry returned lies inside `file`."""
    if len(file) < _HEADER.size:
        raise KdtrError(f"{source}: truncated: {len(file)} bytes, a header has {_HEADER.size}")
    magic, version, file_bytes, num_arrays, table_bytes, table_xxh64 = _HEADER.unpack_from(file)
    if magic != _MAGIC:
        raise KdtrError(f"{source}: not a KDTR file: it starts with {magic!r}")
    if version != VERSION:
        raise KdtrError(f"{source}: version {version}, this reader knows version {VERSION}")
    if file_bytes != len(file):
        fault = "truncated" if file_bytes > len(file) else "trailing bytes"
        raise KdtrError(f"{source}: {fault}: {len(file)} bytes, the header says {file_bytes}")
    table_end = _HEADER.size + table_bytes
    if table_end > file_bytes:
        raise KdtrError(f"{source}: truncated: the table ends at {table_end} of {file_bytes} bytes")
    if xxhash.xxh64_intdigest(file[_HEADER.size : table_end]) != table_xxh64:
        raise KdtrError(f"{source}: bad checksum of the table")

    entries: list[Entry] = []
    names: set[str] = set()
    row, data_end = _HEADER.size, table_end
    for index in range(num_arrays):
        entry, row = _parse_entry(file, row, table_end, f"{source}: array {index}")
        where = f"{source}: array {entry.name!r}"
        if entry.name in names:
            raise KdtrError(f"{where}: duplicate name")
        names.add(entry.name)
        if entry.offset % _ALIGNMENT != 0:
            raise KdtrError(f"{where}: misaligned: offset {entry.offset}, want a multiple of 64")
        if entry.offset < data_end:
            raise KdtrError(f"{where}: overlapping: offset {entry.offset} is before {data_end}")
        data_end = entry.offset + entry.bytes
        if data_end > file_bytes:
            raise KdtrError(f"{where}: truncated: it ends at {data_end} of {file_bytes} bytes")
        entries.append(entry)
    if row != table_end:
        raise KdtrError(f"{source}: {table_end - row} unused bytes after the table's last entry")
    if data_end != file_bytes:
        raise KdtrError(f"{source}: trailing bytes: the arrays end at {data_end} of {file_bytes}")
    return entries


def _parse_entry(file: bytes, row: int, table_end: int, where: str) -> tuple[Entry, int]:
    """The entry at `row` and where the next one starts."""
    if row + _ENTRY.size > table_end:
        raise KdtrError(f"{where}: truncated: its entry ends after the table")
    name_bytes, code, ndim, zero, offset, num_bytes, xxh64 = _ENTRY.unpack_from(file, row)
    shape_at = row + _ENTRY.size
    name_at = shape_at + 8 * ndim
    next_row = _align(name_at + name_bytes, 8)
    if next_row > table_end:
        raise KdtrError(f"{where}: truncated: its entry ends after the table")
    try:
        name = file[name_at : name_at + name_bytes].decode("utf-8")
    except UnicodeDecodeError as error:
        raise KdtrError(f"{where}: the name is not valid UTF-8") from error
    if not name:
        raise KdtrError(f"{where}: empty name")
    where += f" {name!r}"
    if ndim > MAX_NDIM:
        raise KdtrError(f"{where}: {ndim} dimensions, want at most {MAX_NDIM}")
    if zero != 0:
        raise KdtrError(f"{where}: reserved field is {zero}, want 0")
    if code >= len(_DTYPES):
        raise KdtrError(f"{where}: unknown dtype {code}")
    shape = struct.unpack_from(f"<{ndim}Q", file, shape_at)
    # Dimensions of 0 are left out, as numpy does, so that no order of multiplying can overflow.
    itemsize = np.dtype(_NUMPY[code]).itemsize
    if math.prod(d for d in shape if d) * itemsize >= 2**63:
        raise KdtrError(f"{where}: oversized: shape {shape} of {_DTYPES[code]} overflows")
    if math.prod(shape) * itemsize != num_bytes:
        want = math.prod(shape) * itemsize
        raise KdtrError(f"{where}: {num_bytes} bytes, shape {shape} of {_DTYPES[code]} has {want}")
    return Entry(name, _DTYPES[code], shape, offset, num_bytes, xxh64), next_row


def read_table(path: str | os.PathLike[str]) -> list[Entry]:
    """The table of a file, checked; the data is not read as arrays nor its checksums compared."""
    file = checked_path("path", path)
    return _parse_table(file.read_bytes(), str(file))


def parse(file: bytes, source: str = "KDTR data") -> dict[str, Array]:
    """The arrays of a file's bytes, as read-only views of them; `source` is the name in messages.

    Raises KdtrError naming the array and the fault.
    """
    if not isinstance(file, bytes):
        raise KdtrError(f"{source}: file is {type(file).__name__}, want bytes")
    arrays: dict[str, Array] = {}
    for entry in _parse_table(file, source):
        raw = memoryview(file)[entry.offset : entry.offset + entry.bytes]
        if xxhash.xxh64_intdigest(raw) != entry.xxh64:
            raise KdtrError(f"{source}: array {entry.name!r}: bad checksum of its data")
        code = _DTYPES.index(entry.dtype)
        if entry.dtype == "bool" and np.any(np.frombuffer(raw, np.uint8) > 1):
            raise KdtrError(f"{source}: array {entry.name!r}: a bool that is neither 0 nor 1")
        values = np.frombuffer(raw, _NUMPY[code]).reshape(entry.shape)
        arrays[entry.name] = BF16Array(values) if code == _BF16 else values
    return arrays


def read(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of the file at `path`, read-only. Raises KdtrError (a ValueError) or OSError."""
    file = checked_path("path", path)
    return parse(file.read_bytes(), str(file))
