"""Matrix products by NVIDIA's own library (cuBLASLt) without torch, whose import takes longer than a whole probe.

Constants are those of the library's headers, `library_types.h`, `cublas_api.h` and `cublasLt.h` of CUDA 13.0; a test holds
them against the headers that the wheel of the library brings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CUDA_R_32F, CUDA_R_16F, CUDA_R_8I, CUDA_R_32I, CUDA_R_16BF, CUDA_R_8F_E4M3 = 0, 2, 3, 10, 14, 28  # cudaDataType
CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32I = 68, 72
CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_FAST_ACCUM = 3, 25
CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1
CUBLASLT_MATRIX_LAYOUT_COLS = 3
CUBLAS_STATUS_NOT_SUPPORTED = 15
WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper (cuBLAS documentation, cublasSetWorkspace)


class BlasError(RuntimeError):
    """The library is missing, or refused a call. The message says which."""


@dataclass(frozen=True, slots=True)
class ProductType:
    """Types of a product: of both operands, of the result, of the sum; `fill` is the kernel that makes operands."""

    name: str
    operand: int
    operand_bytes: int
    result: int
    result_bytes: int
    compute: int
    scale: int
    fill: str
    only_transposed: bool = False  # cuBLASLt, "8-bit: A transposed, B not" (FP8; for int8 the quickest form)


PRODUCT_TYPES = {
    "bfloat16": ProductType(
        "bfloat16", CUDA_R_16BF, 2, CUDA_R_16BF, 2, CUBLAS_COMPUTE_32F, CUDA_R_32F, "random_bfloat16"
    ),
    "float16": ProductType("float16", CUDA_R_16F, 2, CUDA_R_16F, 2, CUBLAS_COMPUTE_32F, CUDA_R_32F, "random_float16"),
    "float8": ProductType(
        "float8", CUDA_R_8F_E4M3, 1, CUDA_R_16BF, 2, CUBLAS_COMPUTE_32F, CUDA_R_32F, "random_float8", True
    ),
    "int8": ProductType("int8", CUDA_R_8I, 1, CUDA_R_32I, 4, CUBLAS_COMPUTE_32I, CUDA_R_32I, "random_int8"),
}


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and what the library says of it."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class Product:
    """What a product is described by: handles of the library's for its operation and the matrices."""

    kind: ProductType
    description: ctypes.c_void_p
    w: ctypes.c_void_p
    x: ctypes.c_void_p
    result: ctypes.c_void_p


def load_library() -> Any:
    """libcublasLt, found where the wheels, conda, the toolkit or the system have it. Raises BlasError."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BlasError(f"libcublasLt cannot be loaded ({reason})") from error


class Blas:
    """A handle of the library in the current context. `close` gives it back."""

    def __init__(self, library: Any, workspace: int) -> None:
        """`workspace`: device memory of WORKSPACE_BYTES, 0 where no product needs any. Raises BlasError."""
        self._library, self._workspace = library, workspace
        self._workspace_bytes = WORKSPACE_BYTES if workspace else 0
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))

    def close(self) -> None:
        """Release the handle."""
        self._library.cublasLtDestroy(self._handle)

    def product(
        self,
        kind: ProductType,
        size: int,
        operands: tuple[int, int],
        result: int,
        stream: int,
        *,
        transposed: bool,
        fast: bool = False,
    ) -> Callable[[], None]:
        """A call that queues result = x @ w.T (`transposed`) or x @ w of row-major matrices [size, size] on `stream`.

        `operands` are the addresses of x and w. `fast` lets float8 be summed in fewer bits. Raises BlasError where the library has
        no such product on this card.
        """
        description = self._description(kind, transposed, fast)
        operand, target = self._layout(kind.operand, size, size), self._layout(kind.result, size, size)
        product = Product(kind, description, operand, operand, target)
        answer = self.algorithms(product, 1)
        if not answer:
            raise BlasError("cublasLtMatmulAlgoGetHeuristic found no algorithm for this product on this card")
        (best,) = answer
        x, w = operands
        return self._queued(product, best, (x, w, result), stream)

    def rows_by(self, kind: ProductType, n: int, k: int) -> Product:
        """x @ w.T of row-major x [m, k] and w [n, k], for m = 1 until `resize` says another. Raises BlasError."""
        description = self._description(kind, True, False)
        w, x = self._layout(kind.operand, k, n), self._layout(kind.operand, k, 1)
        return Product(kind, description, w, x, self._layout(kind.result, n, 1))

    def resize(self, product: Product, num_rows: int) -> None:
        """From now on `product` is of so many rows. Raises BlasError."""
        for layout in (product.x, product.result):
            columns = ctypes.c_uint64(num_rows)
            self._call(
                "cublasLtMatrixLayoutSetAttribute", layout, ctypes.c_int(CUBLASLT_MATRIX_LAYOUT_COLS),
                ctypes.byref(columns), ctypes.c_size_t(ctypes.sizeof(columns)),
            )  # fmt: skip

    def queue(self, product: Product, algorithm: Heuristic, addresses: tuple[int, int, int], stream: int) -> None:
        """Queue the product of x and w into the result, at `addresses`. Raises BlasError."""
        self._queued(product, algorithm, addresses, stream)()

    def _queued(
        self, product: Product, best: Heuristic, addresses: tuple[int, int, int], stream: int
    ) -> Callable[[], None]:
        # Row-major [m, n] is column-major [n, m]: result.T = w (transposed, or not) times x.T.
        one, zero = (_scalar(product.kind.scale, value) for value in (1, 0))
        x, w, result = addresses
        matmul = self._function("cublasLtMatmul")
        arguments = (
            self._handle, product.description, ctypes.byref(one), ctypes.c_void_p(w), product.w, ctypes.c_void_p(x),
            product.x, ctypes.byref(zero), ctypes.c_void_p(result), product.result, ctypes.c_void_p(result),
            product.result, ctypes.byref(best.algorithm), ctypes.c_void_p(self._workspace),
            ctypes.c_size_t(self._workspace_bytes), ctypes.c_void_p(stream),
        )  # fmt: skip

        def queue(keep: Sequence[Any] = (one, zero, best)) -> None:
            self._check("cublasLtMatmul", matmul(*arguments))

        return queue

    def _description(self, kind: ProductType, transposed: bool, fast: bool) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(made), ctypes.c_int(kind.compute), ctypes.c_int(kind.scale))
        first = ctypes.c_int32(CUBLAS_OP_T if transposed else CUBLAS_OP_N)
        self._attribute(made, CUBLASLT_MATMUL_DESC_TRANSA, first)
        if fast:
            self._attribute(made, CUBLASLT_MATMUL_DESC_FAST_ACCUM, ctypes.c_int8(1))
        return made

    def _attribute(self, description: ctypes.c_void_p, name: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", description, ctypes.c_int(name), ctypes.byref(value), size)

    def _layout(self, data_type: int, rows: int, columns: int) -> ctypes.c_void_p:
        """Column after column."""
        made = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate", ctypes.byref(made), ctypes.c_int(data_type), ctypes.c_uint64(rows),
            ctypes.c_uint64(columns), ctypes.c_int64(rows),
        )  # fmt: skip
        return made

    def algorithms(self, product: Product, most: int) -> list[Heuristic]:
        """At most so many, which make do with the workspace; the first is what the library expects to be quickest, and what every
        caller of it gets. Empty where it has none. Raises BlasError.
        """
        preference, found, count = ctypes.c_void_p(), (Heuristic * most)(), ctypes.c_int()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(self._workspace_bytes)
        self._call(
            "cublasLtMatmulPreferenceSetAttribute", preference, ctypes.c_int(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES),
            ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size)),
        )  # fmt: skip
        try:
            status = self._function("cublasLtMatmulAlgoGetHeuristic")(
                self._handle, product.description, product.w, product.x,
                product.result, product.result, preference, ctypes.c_int(most), found, ctypes.byref(count),
            )  # fmt: skip
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)
        if status == CUBLAS_STATUS_NOT_SUPPORTED:
            return []
        self._check("cublasLtMatmulAlgoGetHeuristic", status)
        return [one for one in found[: count.value] if not one.state]

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError as error:
            raise BlasError(f"libcublasLt has no {name}: it is too old") from error

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, self._function(name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise BlasError(f"{name} answered {self._status_name(status)}")

    def _status_name(self, status: int) -> str:
        try:
            name = self._library.cublasLtGetStatusName
            name.restype = ctypes.c_char_p
            return (name(status) or b"").decode() or f"status {status}"
        except (AttributeError, TypeError):
            return f"status {status}"


def _scalar(scale: int, value: int) -> Any:
    return ctypes.c_int32(value) if scale == CUDA_R_32I else ctypes.c_float(value)
