"""A reader of safetensors files that checks every length before it is used and maps the data.

Layout: https://github.com/huggingface/safetensors#format (8 bytes header length, a JSON header, the data). The
library's own reader gives no view of BF16 data as it is stored, so the header is read here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.mapped import map_file

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
MAX_NUM_DIMS: Final = 8
_LENGTH_BYTES: Final = 8
_INCOMPLETE: Final = "download incomplete? Fetch the file again"

# Bytes a value; 4-bit and 6-bit types are left out, as no tensor of theirs can be served.
DTYPE_BYTES: Final = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2}
    | {"U8": 1, "BOOL": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "C64": 8}
)


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """Where a tensor lies. `shape` is as stored, rows first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file: header read and checked, data mapped.

    Raises ModelFileError for every file that is not exactly what the format says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mapped = map_file(path, "safetensors", _LENGTH_BYTES + 2)
        self.num_bytes = len(self.mapped)
        length = int.from_bytes(self.mapped[:_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise self.fail(
                f"the header claims {length} bytes, {MAX_HEADER_BYTES} are possible: not a safetensors file"
            )
        self.header_bytes = _LENGTH_BYTES + length
        if self.header_bytes > self.num_bytes:
            raise self.fail(f"the header ends at byte {self.header_bytes}, the file has {self.num_bytes}", _INCOMPLETE)
        entries = [self._entry(name, value) for name, value in self._header().items() if name != "__metadata__"]
        self.tensors = self._contiguous(entries)

    def fail(self, what: str, do: str = "fetch or convert the file again") -> ModelFileError:
        """A ModelFileError about this file."""
        return ModelFileError(self.path, what, do)

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's stored bytes, a read-only view, [num_bytes]. Raises KeyError for an unknown name."""
        tensor = self.tensors[name]
        return np.frombuffer(self.mapped, np.uint8, tensor.num_bytes, tensor.offset)

    def _header(self) -> dict[str, Any]:
        try:
            value = json.loads(self.mapped[_LENGTH_BYTES : self.header_bytes].decode(), object_pairs_hook=self._once)
        except (ValueError, RecursionError) as error:
            raise self.fail(f"the header is not valid JSON ({str(error)[:100]})") from None
        if not isinstance(value, dict):
            raise self.fail(f"the header is a JSON {type(value).__name__}, an object was expected")
        return value

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise self.fail(f"{twice!r} appears twice in the header")
        return value

    def _entry(self, name: str, value: Any) -> SafeTensor:
        if not isinstance(value, dict):
            raise self.fail(f"tensor {name!r} is described by a {type(value).__name__}, an object was expected")
        dtype, shape, offsets = value.get("dtype"), _counts(value.get("shape")), _counts(value.get("data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise self.fail(
                f"tensor {name!r} has dtype {dtype!r}, which is not known", "use a model in F32, F16 or BF16"
            )
        if shape is None or len(shape) > MAX_NUM_DIMS:
            raise self.fail(f"tensor {name!r} has shape {str(value.get('shape'))[:60]}, a list of sizes was expected")
        if offsets is None or len(offsets) != 2:
            shown = str(value.get("data_offsets"))[:60]
            raise self.fail(f"tensor {name!r} has data_offsets {shown}, two positions were expected")
        start, end = offsets
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
        if end - start != expected:
            raise self.fail(
                f"tensor {name!r} ({dtype}, shape {shape}) needs {expected} bytes, its data_offsets span {end - start}"
            )
        if self.header_bytes + end > self.num_bytes:
            raise self.fail(
                f"tensor {name!r} ends at byte {self.header_bytes + end}, the file has {self.num_bytes}", _INCOMPLETE
            )
        return SafeTensor(name, dtype, tuple(shape), self.header_bytes + start, expected)

    def _contiguous(self, entries: list[SafeTensor]) -> dict[str, SafeTensor]:
        """Tensors by name in the order of their data, which must fill the file without gap or overlap."""
        ordered = sorted(entries, key=lambda tensor: (tensor.offset, tensor.num_bytes))
        end = self.header_bytes
        for tensor in ordered:
            if tensor.offset != end:
                kind = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
                raise self.fail(f"tensor {tensor.name!r} {kind} (byte {tensor.offset}, {end} was expected)")
            end += tensor.num_bytes
        if end != self.num_bytes:
            raise self.fail(f"{self.num_bytes - end} bytes follow the last tensor")
        return {tensor.name: tensor for tensor in ordered}


def _counts(value: Any) -> list[int] | None:
    """`value` when it is a list of sizes or positions."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        return value
    return None
