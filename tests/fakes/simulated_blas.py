"""cuBLASLt on a simulated card: keeps what it is told, refuses what the real one refuses, and takes a rate's time a product."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.simulated_gpu import SimulatedGpu

from dragoman_agent.device import cuda_blas

FIRST_ALGORITHM = 77


@dataclass
class SimulatedBlas:
    """Stands in for the loaded library. `rates` by operand type, of an x @ w.T; `plain_rate` is that of an x @ w of any."""

    gpu: SimulatedGpu
    rates: dict[int, float]
    plain_rate: float = 500e12
    create_status: int = 0
    products: list[dict[str, Any]] = field(default_factory=list)
    num_algorithms: int = 3
    refusal: int = 0  # what a product is answered with
    asked: list[tuple[int, int]] = field(default_factory=list)  # (algorithms, workspace) of each question

    def __post_init__(self) -> None:
        self._objects: dict[int, dict[str, Any]] = {}
        self.num_open = 0

    def _make(self, target: Any, **body: Any) -> int:
        number = 1000 + len(self._objects)
        self._objects[number] = body
        target._obj.value = number
        return 0

    def cublasLtCreate(self, handle: Any) -> int:
        if self.create_status == 0:
            self.num_open += 1
            self._make(handle)
        return self.create_status

    def cublasLtDestroy(self, handle: Any) -> int:
        self.num_open -= 1
        return 0

    def cublasLtMatmulDescCreate(self, made: Any, compute: Any, scale: Any) -> int:
        return self._make(made, compute=compute.value, scale=scale.value, attributes={})

    def cublasLtMatmulDescSetAttribute(self, made: Any, name: Any, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        self._objects[made.value]["attributes"][name.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, made: Any, data_type: Any, rows: Any, columns: Any, step: Any) -> int:
        return self._make(made, type=data_type.value, size=(rows.value, columns.value, step.value))

    def cublasLtMatrixLayoutSetAttribute(self, layout: Any, name: Any, value: Any, size: Any) -> int:
        assert name.value == cuda_blas.CUBLASLT_MATRIX_LAYOUT_COLS and size.value == ctypes.sizeof(value._obj) == 8
        rows, _, step = self._objects[layout.value]["size"]
        self._objects[layout.value]["size"] = (rows, value._obj.value, step)
        return 0

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._make(made, workspace=0)

    def cublasLtMatmulPreferenceSetAttribute(self, made: Any, name: Any, value: Any, size: Any) -> int:
        assert name.value == cuda_blas.CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES and size.value == 8
        self._objects[made.value]["workspace"] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, made: Any) -> int:
        del self._objects[made.value]["workspace"]
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle: Any, description: Any, *rest: Any) -> int:
        layouts, preference, (wanted, found, count) = rest[:4], rest[4], rest[5:]
        assert len(found) == wanted.value
        self.asked.append((wanted.value, self._objects[preference.value]["workspace"]))
        operand = self._objects[layouts[0].value]["type"]
        transposed = self._objects[description.value]["attributes"][cuda_blas.CUBLASLT_MATMUL_DESC_TRANSA]
        # As the real library: no float8 product of two matrices that lie the same way.
        possible = operand in self.rates and (transposed or operand != cuda_blas.CUDA_R_8F_E4M3)
        if not possible:
            return cuda_blas.CUBLAS_STATUS_NOT_SUPPORTED
        count._obj.value = min(wanted.value, self.num_algorithms)
        for rank in range(count._obj.value):
            found[rank].algorithm.data[0] = FIRST_ALGORITHM + rank
        return 0

    def cublasLtMatmul(self, handle: Any, description: Any, *rest: Any) -> int:
        alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, size, stream = rest
        assert size.value == (cuda_blas.WORKSPACE_BYTES if workspace.value else 0)
        if self.refusal:
            return self.refusal
        rank = algorithm._obj.data[0] - FIRST_ALGORITHM
        assert 0 <= rank < self.num_algorithms
        assert c.value == d.value and c_layout.value == d_layout.value
        body = self._objects[description.value]
        self.products.append(
            {**body, "operand": self._objects[a_layout.value], "result": self._objects[d_layout.value],
             "rank": rank, "sizes": [self._objects[layout.value]["size"] for layout in (a_layout, b_layout, d_layout)],
             "alpha": alpha._obj.value, "beta": beta._obj.value, "addresses": (a.value, b.value, d.value)}
        )  # fmt: skip
        operand, side = self._objects[a_layout.value]["type"], self._objects[a_layout.value]["size"][0]
        transposed = body["attributes"][cuda_blas.CUBLASLT_MATMUL_DESC_TRANSA] == cuda_blas.CUBLAS_OP_T
        rate = self.rates[operand] if transposed else self.plain_rate
        self.gpu.streams[stream.value].clock += 2 * side**3 / rate
        return 0
