"""A reader of GGUF files (versions 2 and 3) that checks every length before it is used.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.mapped import map_file

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
SMALLEST_BYTES: Final = 24  # magic, version and two counts
MAX_KEY_BYTES: Final = 65535
MAX_TENSOR_NAME_BYTES: Final = 64
MAX_NUM_DIMS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32

# Name, values a block, bytes a block, by ggml type number.
TENSOR_TYPES: Final[MappingProxyType[int, tuple[str, int, int]]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
    }
)

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is rows first: the file's dimensions reversed; a vector has one entry."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return self.num_rows * self.row_bytes


class GgufArray:
    """An array in the metadata, decoded when it is read."""

    __slots__ = ("_file", "_offset", "_type", "count")

    def __init__(self, file: GgufFile, element_type: int, count: int, offset: int) -> None:
        self._file, self._type, self._offset = file, element_type, offset
        self.count = count

    @property
    def holds_strings(self) -> bool:
        """Whether the elements are strings; else they are numbers or booleans."""
        return self._type == _STRING

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Scalar]:
        if self._type == _STRING:
            yield from self._strings()
            return
        cursor = _Cursor(self._file, self._offset)
        for _ in range(self.count):
            yield cursor.scalar(self._type)

    def _strings(self) -> Iterator[str]:
        """The lengths were walked when the file was opened, so they are in bounds."""
        offset, data, unpack = self._offset, self._file.mapped, _U64.unpack_from
        for _ in range(self.count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            try:
                yield data[start:offset].decode()
            except UnicodeDecodeError:
                raise self._file.fail(f"a string in a metadata array at byte {start} is not valid UTF-8") from None


class GgufFile:
    """An open GGUF file: metadata and tensor index read, tensor data mapped.

    Raises ModelFileError for every file that is not exactly what the format says. Memory used while opening is in
    proportion to the file's header, never to a number the header claims.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = map_file(path, "GGUF", SMALLEST_BYTES, MAGIC)
        self.num_bytes = len(self.mapped)
        cursor = _Cursor(self, 0)
        self.version = self._read_version(cursor)
        num_tensors, num_values = cursor.count(24, "tensor"), cursor.count(13, "metadata")
        self.metadata: dict[str, Scalar | GgufArray] = {}
        for _ in range(num_values):
            self._read_value(cursor)
        self.alignment = self._read_alignment()
        entries = [self._read_tensor_entry(cursor) for _ in range(num_tensors)]
        self.header_bytes = cursor.offset
        self.tensors = self._place(entries)

    def fail(self, what: str, do: str = "fetch or convert the file again") -> ModelFileError:
        """A ModelFileError about this file."""
        return ModelFileError(self.path, what, do)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's stored bytes, read-only, [num_rows, row_bytes]. Raises KeyError for an unknown name."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self.mapped, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(tensor.num_rows, tensor.row_bytes)

    def _read_version(self, cursor: _Cursor) -> int:
        cursor.skip(4, "magic")
        version = cursor.number(_U32, "version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self.fail("a big-endian GGUF file, only little-endian is read", "convert it to little-endian")
            raise self.fail(
                f"GGUF version {version} is not known (2 and 3 are)", "convert the model with current tools"
            )
        return version

    def _read_value(self, cursor: _Cursor) -> None:
        key = cursor.string(MAX_KEY_BYTES, "metadata key")
        if key in self.metadata:
            raise self.fail(f"metadata key {key!r} appears twice")
        value_type = cursor.number(_U32, f"type of {key!r}")
        if value_type != _ARRAY:
            self.metadata[key] = cursor.scalar(value_type, key)
            return
        element_type = cursor.number(_U32, f"element type of {key!r}")
        if element_type not in _SCALARS and element_type != _STRING:
            raise self.fail(f"metadata array {key!r} has element type {element_type}, which is not known")
        smallest = 8 if element_type == _STRING else _SCALARS[element_type].size
        count = cursor.count(smallest, f"{key!r} element")
        self.metadata[key] = GgufArray(self, element_type, count, cursor.offset)
        if element_type == _STRING:
            cursor.skip_strings(count, key)
        else:
            cursor.skip(count * smallest, key)

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}, a power of two up to {MAX_ALIGNMENT} was expected")
        return alignment

    def _read_tensor_entry(self, cursor: _Cursor) -> GgufTensor:
        name = cursor.string(MAX_TENSOR_NAME_BYTES, "tensor name")
        num_dims = cursor.number(_U32, f"number of dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_NUM_DIMS:
            raise self.fail(f"tensor {name!r} has {num_dims} dimensions, 1 to {MAX_NUM_DIMS} are possible")
        dims = [cursor.number(_U64, f"dimensions of {name!r}") for _ in range(num_dims)]
        type_number = cursor.number(_U32, f"type of {name!r}")
        offset = cursor.number(_U64, f"offset of {name!r}")
        if type_number not in TENSOR_TYPES:
            raise self.fail(
                f"tensor {name!r} has type {type_number}, which is not known", "use a model quantised to a common type"
            )
        dtype, block_values, block_bytes = TENSOR_TYPES[type_number]
        if min(dims) == 0:
            raise self.fail(f"tensor {name!r} has a dimension of zero")
        if dims[0] % block_values:
            raise self.fail(f"tensor {name!r} has rows of {dims[0]} values, {dtype} needs multiples of {block_values}")
        num_rows = 1
        for dim in dims[1:]:
            num_rows *= dim
        row_bytes = dims[0] // block_values * block_bytes
        if num_rows * row_bytes > self.num_bytes:
            raise self.fail(
                f"tensor {name!r} claims {num_rows * row_bytes} bytes, the file has {self.num_bytes}",
                "the download is incomplete or damaged, fetch it again",
            )
        if offset % self.alignment:
            raise self.fail(f"tensor {name!r} is at offset {offset}, not a multiple of the alignment {self.alignment}")
        return GgufTensor(name, dtype, tuple(reversed(dims)), offset, num_rows, row_bytes)

    def _place(self, entries: list[GgufTensor]) -> dict[str, GgufTensor]:
        """Tensors by name with offsets from the file's start, inside the file and apart from each other."""
        start = -(-self.header_bytes // self.alignment) * self.alignment
        placed: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in placed:
                raise self.fail(f"tensor {entry.name!r} appears twice")
            end = start + entry.offset + entry.num_bytes
            if end > self.num_bytes:
                raise self.fail(
                    f"tensor {entry.name!r} ends at byte {end}, the file has {self.num_bytes}",
                    "the download is incomplete, fetch it again",
                )
            placed[entry.name] = GgufTensor(
                entry.name, entry.dtype, entry.shape, start + entry.offset, entry.num_rows, entry.row_bytes
            )
        ordered = sorted(placed.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(ordered):
            if before.offset + before.num_bytes > after.offset:
                raise self.fail(f"tensors {before.name!r} and {after.name!r} overlap")
        return placed


class _Cursor:
    """Reads forward through a file; every read is checked against its end."""

    __slots__ = ("_bytes", "_end", "_file", "offset")

    def __init__(self, file: GgufFile, offset: int) -> None:
        self._file = file
        self._bytes = file.mapped
        self._end = file.num_bytes
        self.offset = offset

    def skip(self, num_bytes: int, what: str) -> None:
        self._advance(num_bytes, what)

    def number(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack_from(self._bytes, self._advance(form.size, what))[0]
        return value

    def count(self, smallest_bytes: int, what: str) -> int:
        """A count of things of at least `smallest_bytes` each, which must fit into what is left."""
        count = self.number(_U64, f"{what} count")
        if count * smallest_bytes > self._end - self.offset:
            raise self._file.fail(
                f"{what} count {count} cannot fit into the {self._end - self.offset} bytes that follow",
                "the file is damaged or incomplete, fetch it again",
            )
        return count

    def string(self, max_bytes: int | None, what: str) -> str:
        num_bytes = self.number(_U64, f"length of a {what}")
        if max_bytes is not None and num_bytes > max_bytes:
            raise self._file.fail(f"a {what} of {num_bytes} bytes, at most {max_bytes} are possible")
        start = self._advance(num_bytes, what)
        try:
            return self._bytes[start : start + num_bytes].decode()
        except UnicodeDecodeError:
            raise self._file.fail(f"a {what} at byte {start} is not valid UTF-8") from None

    def skip_strings(self, count: int, what: str) -> None:
        offset, end, unpack, data = self.offset, self._end, _U64.unpack_from, self._bytes
        for _ in range(count):
            if offset + 8 > end:
                break
            offset += 8 + unpack(data, offset)[0]
        if offset > end:
            raise self._truncated(what)
        self.offset = offset

    def scalar(self, value_type: int, what: str = "array element") -> Scalar:
        if value_type == _STRING:
            return self.string(None, f"text of {what!r}")
        form = _SCALARS.get(value_type)
        if form is None:
            raise self._file.fail(f"metadata {what!r} has value type {value_type}, which is not known")
        value = self.number(form, what)
        if value_type != _BOOL:
            return value
        if value > 1:
            raise self._file.fail(f"metadata {what!r} is a boolean with value {value}, 0 or 1 was expected")
        return value == 1

    def _advance(self, num_bytes: int, what: str) -> int:
        start = self.offset
        if num_bytes > self._end - start:
            raise self._truncated(what)
        self.offset = start + num_bytes
        return start

    def _truncated(self, what: str) -> ModelFileError:
        return self._file.fail(
            f"the file ends inside {what} ({self._end} bytes)", "the download is incomplete, fetch it again"
        )
