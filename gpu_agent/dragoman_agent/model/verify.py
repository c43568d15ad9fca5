"""Reading a whole model once: are all values finite, and are the files the published ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from dragoman_agent.model.embedded import EMBEDDED_NAME, EMBEDDED_SHA256
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.quant import dequantise
from dragoman_agent.model.source import ModelSource
from dragoman_kernels.tensor import QuantTensor

KNOWN_SHA256: Final = MappingProxyType({EMBEDDED_NAME: EMBEDDED_SHA256})  # by the model's name

_PIECE_BYTES: Final = 8 << 20

# (phase "hash" | "values", bytes done, bytes in all)
VerifyProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """One weight file; `matches` is None where no published digest is known."""

    path: Path
    num_bytes: int
    sha256: str
    matches: bool | None


@dataclass(frozen=True, slots=True)
class Verification:
    """What a full read found."""

    files: tuple[VerifiedFile, ...]
    num_tensors: int
    num_values: int
    num_bytes: int
    dtypes: dict[str, int]  # tensors of each dtype


def verify(source: ModelSource, progress: VerifyProgress = lambda phase, done, total: None) -> Verification:
    """Read every file and every tensor of `source` fully.

    Raises ModelFileError: a file whose SHA-256 is not the published one, a tensor that is missing, of the wrong shape,
    or holds NaN or an infinity (named with its position).
    """
    source.check()
    known = KNOWN_SHA256.get(source.name) if len(source.files) == 1 else None
    files = _hash_files(source.files, known, progress)
    for file in files:
        if file.matches is False:
            raise ModelFileError(
                file.path, f"has SHA-256 {file.sha256}, the published file has {known}", "fetch the file again"
            )
    num_values = done = 0
    dtypes: Counter[str] = Counter()
    for name in source.file_order():
        tensor = source.tensor(name)
        _check_finite(source, name, tensor)
        dtypes[tensor.dtype] += 1
        num_values += tensor.shape[0] * tensor.shape[1]
        done += tensor.data.nbytes
        progress("values", done, source.total_bytes)
    return Verification(files, dtypes.total(), num_values, done, dict(dtypes))


def _hash_files(paths: list[Path], known: str | None, progress: VerifyProgress) -> tuple[VerifiedFile, ...]:
    found, done = [], 0
    try:
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            state = hashlib.sha256()
            with path.open("rb") as stream:
                while piece := stream.read(_PIECE_BYTES):
                    state.update(piece)
                    done += len(piece)
                    progress("hash", done, total)
            digest = state.hexdigest()
            found.append(VerifiedFile(path, path.stat().st_size, digest, None if known is None else known == digest))
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})", "check the disk") from None
    return tuple(found)


def _check_finite(source: ModelSource, name: str, tensor: QuantTensor) -> None:
    """In pieces of rows, so that memory stays bounded whatever the tensor's size."""
    rows, cols = tensor.shape
    step = max(1, _PIECE_BYTES // (4 * max(cols, 1)))
    for start in range(0, rows, step):
        part = tensor.data[start : start + step]
        values = dequantise(QuantTensor(tensor.dtype, (len(part), cols), part))
        finite = np.isfinite(values)
        if not finite.all():
            row, col = np.argwhere(~finite)[0]
            raise ModelFileError(
                source.path,
                f"tensor {source.stored_name(name)!r} ({name}) holds {values[row, col]} at row {start + row}, column {col} "
                f"({int((~finite).sum())} such values in the same {len(part)} rows)",
                "the file is damaged or the model was saved while it diverged; fetch it again",
            )
