"""A weight tensor in its stored (possibly block-quantised) form. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Rows of a weight matrix as they lie in the file.

    `dtype` is the GGUF type name ("F32", "F16", "Q8_0", "Q4_1", ...); each row is a whole number of its blocks.
    A vector has one row: shape (1, n).
    """

    dtype: str
    shape: tuple[int, int]  # (rows, cols): y = x @ W.T
    data: npt.NDArray[np.uint8]  # [rows, row_bytes]

    @classmethod
    def from_float32(cls, values: npt.NDArray[np.float32]) -> QuantTensor:
        """An F32 matrix from a float array [rows, cols]."""
        data = np.ascontiguousarray(values, dtype=np.float32)
        rows, cols = data.shape
        return cls("F32", (rows, cols), data.view(np.uint8).reshape(rows, 4 * cols))
