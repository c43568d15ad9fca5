"""Products by cuBLASLt: its constants and signatures against its own headers and library, the probe's steps on a simulated one."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.simulated_blas import SimulatedBlas
from tests.fakes.simulated_gpu import Card, SimulatedGpu

from dragoman_agent.device import cuda_blas, cuda_probe_bench
from dragoman_agent.device import cuda_probe_compute as compute
from dragoman_agent.device.cuda_blas import PRODUCT_TYPES, Blas, BlasError, load_library
from dragoman_agent.device.cuda_probe_bench import Bench, StepError
from dragoman_agent.device.partition import PartitionLimits

RATES = {
    cuda_blas.CUDA_R_16BF: 777e12,
    cuda_blas.CUDA_R_16F: 747e12,
    cuda_blas.CUDA_R_8F_E4M3: 1423e12,
    cuda_blas.CUDA_R_8I: 1400e12,
}
CONSTANTS = [name for name in vars(cuda_blas) if name.startswith(("CUDA_R_", "CUBLAS"))]
CUBLASLT_MATRIX_LAYOUT_ROWS = 2
MakeBench = Callable[..., tuple[Bench, SimulatedBlas]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binaries compiled once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch, cache: Path) -> MakeBench:
    """A bench on a simulated card with a simulated library; without one where `problem` says why."""
    bindings = pytest.importorskip("cuda.bindings")
    pytest.importorskip("cuda.bindings.nvrtc")

    def make(
        card: Card | None = None, *, full: bool = True, problem: str = "", **blas: Any
    ) -> tuple[Bench, SimulatedBlas]:
        gpu = SimulatedGpu(card or Card())
        library = SimulatedBlas(gpu, **{"rates": RATES, **blas})

        def load() -> Any:
            if problem:
                raise BlasError(problem)
            return library

        monkeypatch.setattr(bindings, "driver", gpu, raising=False)
        monkeypatch.setattr(cuda_probe_bench, "load_library", load)
        monkeypatch.setattr(compute.time, "sleep", lambda seconds: None)
        return Bench(0, full=full, limits=PartitionLimits(), cache_dir=cache), library

    return make


def headers() -> str:
    """The text of the library's headers, as its wheel brings them."""
    try:
        path = Path(library_path()).parent.parent / "include"
    except BlasError:
        pytest.skip("no cuBLASLt here")
    names = ("library_types.h", "cublas_api.h", "cublasLt.h")
    if not all((path / name).exists() for name in names):
        pytest.skip("cuBLASLt came without its headers")
    return "\n".join((path / name).read_text() for name in names)


def library_path() -> str:
    return str(load_library()._name)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_the_headers(name: str) -> None:
    found = re.search(rf"\b{name}\s*=\s*(\d+)", headers())
    assert found is not None and int(found[1]) == getattr(cuda_blas, name)


def test_structures_have_the_headers_fields() -> None:
    text = headers()
    assert re.search(r"uint64_t data\[8\];\s*} cublasLtMatmulAlgo_t;", text)
    body = re.search(r"typedef struct {((?:(?!typedef)[\s\S])*?)} cublasLtMatmulHeuristicResult_t;", text)
    assert body is not None
    fields = re.findall(r"^\s*(\w+) (\w+)(?:\[(\d)\])?;", re.sub(r"/\*[\s\S]*?\*/", "", body[1]), re.MULTILINE)
    assert [field[0] for field in fields] == ["cublasLtMatmulAlgo_t", "size_t", "cublasStatus_t", "float", "int"]
    assert ctypes.sizeof(cuda_blas.Heuristic) == 64 + 8 + 4 + 4 + 16


def test_the_real_library_takes_our_descriptions() -> None:
    """All but a handle, which needs a GPU."""
    try:
        library = load_library()
    except BlasError:
        pytest.skip("no cuBLASLt here")
    blas = Blas.__new__(Blas)
    blas._library = library
    for kind in PRODUCT_TYPES.values():
        description = blas._description(kind, True, kind.only_transposed)
        first, written = ctypes.c_int32(-1), ctypes.c_size_t()
        arguments = (description, cuda_blas.CUBLASLT_MATMUL_DESC_TRANSA, ctypes.byref(first), ctypes.c_size_t(4))
        assert library.cublasLtMatmulDescGetAttribute(*arguments, ctypes.byref(written)) == 0
        assert first.value == cuda_blas.CUBLAS_OP_T
        assert blas._layout(kind.operand, 64, 32).value
        product = blas.rows_by(kind, 24, 64)
        blas.resize(product, 7)
        for layout, size in ((product.w, (64, 24)), (product.x, (64, 7)), (product.result, (24, 7))):
            found = []
            for attribute in (CUBLASLT_MATRIX_LAYOUT_ROWS, cuda_blas.CUBLASLT_MATRIX_LAYOUT_COLS):
                value = ctypes.c_uint64()
                arguments = (layout, ctypes.c_int(attribute), ctypes.byref(value), ctypes.c_size_t(8))
                assert library.cublasLtMatrixLayoutGetAttribute(*arguments, ctypes.byref(written)) == 0
                found.append(value.value)
            assert tuple(found) == size
    assert blas._status_name(1) == "CUBLAS_STATUS_NOT_INITIALIZED"


def test_each_type_is_multiplied_as_the_engine_does(make_bench: MakeBench) -> None:
    bench, library = make_bench()
    steps = {"bfloat16": compute.matmul_bfloat16, "float16": compute.matmul_float16, "float8": compute.matmul_float8, "int8": compute.matmul_int8}  # fmt: skip
    for name, step in steps.items():
        values = step(bench)
        value = values[f"compute.matmul_{name}"]
        assert value.value == pytest.approx(RATES[PRODUCT_TYPES[name].operand], rel=0.01)
        assert "x @ w.T" in value.note and "cuBLASLt" in value.note and value.provenance == "measured"
    assert "compute.matmul_bfloat16_sustained" in compute.matmul_bfloat16(bench)
    eights = [product for product in library.products if product["operand"]["type"] == cuda_blas.CUDA_R_8F_E4M3]
    assert {product["result"]["type"] for product in eights} == {cuda_blas.CUDA_R_16BF}
    assert {cuda_blas.CUBLASLT_MATMUL_DESC_FAST_ACCUM in product["attributes"] for product in eights} == {True, False}
    whole = [product for product in library.products if product["operand"]["type"] == cuda_blas.CUDA_R_8I]
    assert {(product["compute"], product["scale"], product["alpha"]) for product in whole} == {
        (cuda_blas.CUBLAS_COMPUTE_32I, cuda_blas.CUDA_R_32I, 1)
    }
    assert {product["operand"]["size"] for product in library.products} == {(8192, 8192, 8192)}
    assert set(library.asked) == {(1, cuda_blas.WORKSPACE_BYTES)} and {each["rank"] for each in library.products} == {0}
    assert library.num_open == 0


def test_operands_are_random_and_of_their_own_type(make_bench: MakeBench) -> None:
    bench, library = make_bench()
    compute.matmul_float16(bench)
    gpu = bench.session.driver
    assert gpu.launched.count("random_float16") == 2 and "random_bfloat16" not in gpu.launched
    (addresses,) = {product["addresses"] for product in library.products}
    assert len(set(addresses)) == 3


def test_the_quick_probe_times_the_engines_form_alone_and_imports_no_torch(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, library = make_bench(full=False)
    real = builtins.__import__

    def no_torch(name: str, *rest: Any, **keywords: Any) -> Any:
        assert name.partition(".")[0] not in ("torch", "triton")
        return real(name, *rest, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_torch)
    values = compute.matmul_bfloat16(bench)
    assert set(values) == {"compute.matmul_bfloat16"}
    assert {product["attributes"][cuda_blas.CUBLASLT_MATMUL_DESC_TRANSA] for product in library.products} == {1}


def test_a_type_that_the_card_lacks_is_a_step_without_a_value(make_bench: MakeBench) -> None:
    bench, _ = make_bench(Card(capability=(8, 6)))
    with pytest.raises(StepError, match="no float8 matrix units"):
        compute.matmul_float8(bench)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"problem": "libcublasLt cannot be loaded (no such file)"}, "libcublasLt cannot be loaded"),
        ({"create_status": 1}, "cublasLtCreate answered"),
        ({"rates": {}}, "found no algorithm"),
    ],
    ids=["no library", "no handle", "no algorithm"],
)
def test_torch_is_asked_where_the_library_cannot(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    bench, _ = make_bench(**options)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(StepError, match="PyTorch sees no CUDA device"):
        compute.matmul_bfloat16(bench)

    def ways(*arguments: Any) -> Any:
        stream = bench.session.stream
        return {"x @ w.T": lambda: setattr(stream, "clock", stream.clock + 2 * 8192**3 / 700e12)}

    class Cuda:
        is_available = staticmethod(lambda: True)
        set_device = staticmethod(lambda index: None)
        ExternalStream = staticmethod(lambda number, device: number)
        stream = staticmethod(lambda stream: contextlib.nullcontext())

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda, device=lambda *parts: parts))
    monkeypatch.setattr(compute, "_torch_products", ways)
    value = compute.matmul_bfloat16(bench)["compute.matmul_bfloat16"]
    assert value.value == pytest.approx(700e12, rel=0.01)
    assert "through torch, since" in value.note and reason in value.note


def test_neither_library_nor_torch_says_so(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = make_bench(problem="libcublasLt cannot be loaded (none)")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(StepError, match="torch cannot be imported"):
        compute.matmul_bfloat16(bench)


def test_the_probe_program_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys, dragoman_agent.device.cuda_probe\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
