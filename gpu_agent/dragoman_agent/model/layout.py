"""What a stored tensor is, without its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Dtype (GGUF type name), shape (rows, cols; a vector is one row) and size of a stored tensor."""

    dtype: str
    shape: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """Where a tensor's bytes lie in a file, exactly as `tensor` gives them."""

    path: Path
    offset: int
    num_bytes: int
