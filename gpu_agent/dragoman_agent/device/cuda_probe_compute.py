"""Steps of the GPU probe: matrix products by the library that the engine's go to, cuBLASLt; through torch where it is not found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dragoman_agent.device.cuda_blas import PRODUCT_TYPES, WORKSPACE_BYTES, Blas, BlasError
from dragoman_agent.device.cuda_probe_bench import Bench, StepError
from dragoman_agent.device.error_text import first_line
from dragoman_agent.pal.analysis import measured_rate
from dragoman_agent.pal.profile import Value
from dragoman_kernels.probe.driver import Session, pointer, u32, u64

_PRODUCTS_A_SAMPLE = 3
_REST_SECONDS = 0.06  # before a sample: a card that has just worked hard may be held back by its power limit
_QUICK_REST_SECONDS = 0.03
_QUICK_REPEATS = 5
_SUSTAINED_SECONDS = 0.5
_TRANSPOSED, _PLAIN = "x @ w.T", "x @ w"
_FLOAT8_CAPABILITY = 89

Ways = dict[str, Callable[[], object]]


def matmul_bfloat16(bench: Bench) -> dict[str, Value]:
    """bfloat16 product of random matrices; the full probe adds a card that has worked at its power limit for a while."""
    with _ways(bench, "bfloat16") as (ways, library):
        values = _quickest(bench, "bfloat16", ways, library)
        if bench.full:
            values |= _sustained(bench, ways[_TRANSPOSED], library)
    return values


def matmul_float16(bench: Bench) -> dict[str, Value]:
    """float16 product of random matrices."""
    return _measured(bench, "float16")


def matmul_float8(bench: Bench) -> dict[str, Value]:
    """float8 (e4m3) product to bfloat16 of random matrices. Raises StepError below compute capability 8.9."""
    if bench.session.capability < _FLOAT8_CAPABILITY:
        raise StepError("no float8 matrix units below compute capability 8.9")
    return _measured(bench, "float8")


def matmul_int8(bench: Bench) -> dict[str, Value]:
    """int8 product to int32 of random matrices."""
    return _measured(bench, "int8")


def _measured(bench: Bench, name: str) -> dict[str, Value]:
    with _ways(bench, name) as (ways, library):
        return _quickest(bench, name, ways, library)


@contextmanager
def _ways(bench: Bench, name: str) -> Iterator[tuple[Ways, str]]:
    """The forms of a product and what computes them. Raises StepError where neither cuBLASLt nor torch has one."""
    with ExitStack() as stack:
        try:
            ways, library = stack.enter_context(_library_ways(bench, name)), "cuBLASLt"
        except BlasError as error:
            ways, library = stack.enter_context(_torch_ways(bench, name)), f"through torch, since {error}"
        yield ways, library


@contextmanager
def _library_ways(bench: Bench, name: str) -> Iterator[Ways]:
    """Raises BlasError before anything is yielded."""
    library = bench.blas_library()
    session, size, kind = bench.session, _size(bench), PRODUCT_TYPES[name]
    operand_bytes, result_bytes = kind.operand_bytes * size * size, kind.result_bytes * size * size
    with (
        session.memory(operand_bytes) as x,
        session.memory(operand_bytes) as w,
        session.memory(result_bytes) as result,
        session.memory(WORKSPACE_BYTES) as workspace,
    ):
        for seed, address in enumerate((x, w)):
            arguments = [pointer(address), u64(operand_bytes // 4), u32(seed + 1)]
            session.launch("random", kind.fill, session.num_multiprocessors * 8, 256, arguments)()
        session.synchronize()
        blas = Blas(library, workspace)
        try:
            yield _products(bench, blas, name, (x, w), result)
        finally:
            session.synchronize()
            blas.close()


def _products(bench: Bench, blas: Blas, name: str, operands: tuple[int, int], result: int) -> Ways:
    """Every form that the library has on this card; the quick probe takes the engine's own alone. Raises BlasError for none."""
    kind, size, stream = PRODUCT_TYPES[name], _size(bench), int(bench.session.stream)
    forms = {_TRANSPOSED: (True, False)}
    if bench.full:
        forms |= (
            {f"{_TRANSPOSED}, fast accumulation": (True, True)} if kind.only_transposed else {_PLAIN: (False, False)}
        )
    ways: Ways = {}
    problem: BlasError | None = None
    for words, (transposed, fast) in forms.items():
        try:
            ways[words] = blas.product(kind, size, operands, result, stream, transposed=transposed, fast=fast)
        except BlasError as error:
            problem = error
    if not ways and problem is not None:
        raise problem
    return ways


@contextmanager
def _torch_ways(bench: Bench, name: str) -> Iterator[Ways]:
    torch, size = bench.torch(), _size(bench)
    if not torch.cuda.is_available():
        raise StepError("PyTorch sees no CUDA device: is it a build without CUDA, or one for a newer driver?")
    torch.cuda.set_device(bench.index)
    device = torch.device("cuda", bench.index)
    with torch.cuda.stream(torch.cuda.ExternalStream(int(bench.session.stream), device=device)):
        yield _torch_products(torch, name, (size, size), device)


def _torch_products(torch: Any, name: str, shape: tuple[int, int], device: Any) -> Ways:
    if name == "int8":
        left, right = (torch.randint(-128, 128, shape, device=device, dtype=torch.int8) for _ in range(2))
        return {_TRANSPOSED: lambda: torch._int_mm(left, right.t()), _PLAIN: lambda: torch._int_mm(left, right)}
    if name == "float8":
        left, right = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)

        def product(fast: bool) -> Callable[[], object]:
            return lambda: torch._scaled_mm(
                left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return {_TRANSPOSED: product(False), f"{_TRANSPOSED}, fast accumulation": product(True)}
    left, right = (torch.randn(shape, device=device, dtype=getattr(torch, name)) for _ in range(2))
    return {_TRANSPOSED: lambda: left @ right.t(), _PLAIN: lambda: left @ right}


def _quickest(bench: Bench, name: str, ways: Ways, library: str) -> dict[str, Value]:
    """The quickest of the ways that work. Raises StepError when none does."""
    session, size = bench.session, _size(bench)
    repeats = bench.repeats if bench.full else _QUICK_REPEATS
    rest = _REST_SECONDS if bench.full else _QUICK_REST_SECONDS
    times: dict[str, list[float]] = {}
    problem = ""
    for way, product in ways.items():
        try:
            # The first run loads or allocates, which waits for the device, so it cannot run behind a held stream.
            _several(product)()
            session.synchronize()
            times[way] = [_rested(session, _several(product), rest) for _ in range(repeats)]
        except RuntimeError as error:  # a product that this library or card does not have
            problem = first_line(error)[:200]
    if not times:
        raise StepError(f"no {name} product worked: {problem}")
    best = min(times, key=lambda way: statistics.median(times[way]))
    note = f"{size}^3, random data, {best}, {_PRODUCTS_A_SAMPLE} in a row, {library}"
    return {f"compute.matmul_{name}": measured_rate(_flops(size), times[best], "flop/s", note)}


def _sustained(bench: Bench, product: Callable[[], object], library: str) -> dict[str, Value]:
    session, size, several = bench.session, _size(bench), _several(product)
    until = time.perf_counter() + _SUSTAINED_SECONDS
    while time.perf_counter() < until:
        session.samples(several, 1)
    times = session.samples(several, 3 * bench.repeats)
    note = f"{size}^3, random data, after {_SUSTAINED_SECONDS:g} s of the same, {library}"
    return {"compute.matmul_bfloat16_sustained": measured_rate(_flops(size), times, "flop/s", note)}


def _rested(session: Session, work: Callable[[], None], rest_seconds: float) -> float:
    time.sleep(rest_seconds)
    (seconds,) = session.samples(work, 1)
    return seconds


def _several(product: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_PRODUCTS_A_SAMPLE):
            product()

    return run


def _flops(size: int) -> int:
    return 2 * size**3 * _PRODUCTS_A_SAMPLE


def _size(bench: Bench) -> int:
    return 8192 if bench.memory_budget() > 4 << 30 else 4096
