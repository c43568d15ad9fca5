"""Products of many rows by the algorithms of NVIDIA's library that a plan names, where torch would take the library's own choice."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman_agent.device.cuda_blas import PRODUCT_TYPES, Blas, BlasError, Heuristic, Product, load_library
from dragoman_agent.device.torch_runtime import is_no_memory
from dragoman_agent.pal.plan import MAX_LIBRARY_ALGORITHMS, LibraryGemm

logger = logging.getLogger(__name__)

_ALIGNED = 256  # bytes that the library takes operands to be aligned to when it names algorithms


@dataclass(frozen=True, slots=True)
class _Chosen:
    product: Product
    algorithm: Heuristic
    rows: range


class LibraryProducts:
    """Of bfloat16 matrices in the current context. Owns a handle of the library, without a workspace, which goes with it."""

    def __init__(self, choices: Sequence[LibraryGemm]) -> None:
        """`missing` are the choices that the library does not name any more. Raises BlasError without the library."""
        self._blas = Blas(load_library(), 0)
        weakref.finalize(self, self._blas.close)
        self._chosen: dict[tuple[int, ...], list[_Chosen]] = {}
        self.missing: list[LibraryGemm] = []
        for one in choices:
            product = self._blas.rows_by(PRODUCT_TYPES["bfloat16"], one.n, one.k)
            self._blas.resize(product, one.timed_rows)
            algorithms = self._blas.algorithms(product, MAX_LIBRARY_ALGORITHMS)
            if one.rank < len(algorithms):
                rows = range(one.min_rows, (one.max_rows or sys.maxsize - 1) + 1)
                self._chosen.setdefault((one.n, one.k), []).append(_Chosen(product, algorithms[one.rank], rows))
            else:
                self.missing.append(one)

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x @ weight.T of x [num_rows, k] and weight [n, k] in the current stream; None where the plan names no algorithm for it, or
        the operands lie otherwise than an algorithm may need: torch's own call is right for all of them.

        An algorithm that the library refuses for these rows is not tried again, and said once.
        """
        others = self._chosen.get(weight.shape, [])
        chosen = next((one for one in others if x.shape[0] in one.rows), None)
        if chosen is None:
            return None
        out = x.new_empty((x.shape[0], weight.shape[0]))
        addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
        if any(address % _ALIGNED for address in addresses) or not (x.is_contiguous() and weight.is_contiguous()):
            return None
        try:
            self._blas.resize(chosen.product, x.shape[0])
            self._blas.queue(
                chosen.product, chosen.algorithm, addresses, torch.cuda.current_stream(x.device).cuda_stream
            )
        except BlasError as error:
            if is_no_memory(str(error)):
                raise
            others.remove(chosen)
            logger.warning(
                "%s for %d rows of %s: the library's own choice is taken from now on",
                error,
                x.shape[0],
                tuple(weight.shape),
            )
            return None
        return out
