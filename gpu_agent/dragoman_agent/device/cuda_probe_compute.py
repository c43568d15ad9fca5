"""Steps of the GPU probe: matrix products through torch, which is what the engine calls for them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from dragoman_agent.device.cuda_probe_bench import Bench, StepError
from dragoman_agent.pal.analysis import measured_rate
from dragoman_agent.pal.profile import Value
from dragoman_kernels.probe.driver import Session

_PRODUCTS_A_SAMPLE = 3
_REST_SECONDS = 0.06  # before a sample: a card that has just worked hard may be held back by its power limit
_SUSTAINED_SECONDS = 0.5


def matmul_bfloat16(bench: Bench) -> dict[str, Value]:
    """bfloat16 product of random matrices, of a rested card and of one that has worked at its power limit for a while."""
    values = _floating(bench, "bfloat16")
    if bench.full:
        values |= _sustained(bench)
    return values


def _sustained(bench: Bench) -> dict[str, Value]:
    torch, size = bench.torch(), _size(bench)
    with _on_stream(bench):
        left, right = (torch.randn((size, size), device=_device(bench), dtype=torch.bfloat16) for _ in range(2))

        def several() -> None:
            for _ in range(_PRODUCTS_A_SAMPLE):
                left @ right

        several()
        until = time.perf_counter() + _SUSTAINED_SECONDS
        while time.perf_counter() < until:
            bench.session.samples(several, 1)
        times = bench.session.samples(several, 3 * bench.repeats)
    note = f"{size}^3, random data, after {_SUSTAINED_SECONDS:g} s of the same"
    amount = 2 * size**3 * _PRODUCTS_A_SAMPLE
    return {"compute.matmul_bfloat16_sustained": measured_rate(amount, times, "flop/s", note)}


def _rested(session: Session, work: Callable[[], None]) -> float:
    time.sleep(_REST_SECONDS)
    (seconds,) = session.samples(work, 1)
    return seconds


def matmul_float16(bench: Bench) -> dict[str, Value]:
    """float16 product of random matrices."""
    return _floating(bench, "float16")


def matmul_float8(bench: Bench) -> dict[str, Value]:
    """float8 (e4m3) product with one scale a matrix, to bfloat16, of random matrices. Raises StepError below 8.9."""
    if bench.session.capability < 89:
        raise StepError("no float8 matrix units below compute capability 8.9")
    torch, size = bench.torch(), _size(bench)
    with _on_stream(bench):
        left = torch.randn((size, size), device=_device(bench)).to(torch.float8_e4m3fn)
        right = torch.randn((size, size), device=_device(bench)).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=_device(bench))

        def product(fast: bool) -> Callable[[], object]:
            return lambda: torch._scaled_mm(
                left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return _quickest(bench, "float8", {"fast accumulation": product(True), "full accumulation": product(False)})


def matmul_int8(bench: Bench) -> dict[str, Value]:
    """int8 product to int32 of random matrices."""
    torch, size = bench.torch(), _size(bench)
    with _on_stream(bench):
        shape, device = (size, size), _device(bench)
        left = torch.randint(-128, 128, shape, device=device, dtype=torch.int8)
        right = torch.randint(-128, 128, shape, device=device, dtype=torch.int8)
        ways = {"x @ w.T": lambda: torch._int_mm(left, right.t()), "x @ w": lambda: torch._int_mm(left, right)}
        return _quickest(bench, "int8", ways)


def _floating(bench: Bench, name: str) -> dict[str, Value]:
    torch, size = bench.torch(), _size(bench)
    with _on_stream(bench):
        dtype = getattr(torch, name)
        left = torch.randn((size, size), device=_device(bench), dtype=dtype)
        right = torch.randn((size, size), device=_device(bench), dtype=dtype)
        return _quickest(bench, name, {"x @ w.T": lambda: left @ right.t(), "x @ w": lambda: left @ right})


def _quickest(bench: Bench, name: str, ways: dict[str, Callable[[], object]]) -> dict[str, Value]:
    """The quickest of the ways that work. Raises StepError when none does."""
    session, size = bench.session, _size(bench)
    times: dict[str, list[float]] = {}
    problem = ""
    for way, product in ways.items():

        def several(product: Callable[[], object] = product) -> None:
            for _ in range(_PRODUCTS_A_SAMPLE):
                product()

        try:
            # The first run allocates, which waits for the device, so it cannot run behind a held stream.
            several()
            times[way] = [_rested(session, several) for _ in range(bench.repeats)]
        except RuntimeError as error:  # a product that this library or card does not have
            problem = str(error).strip().splitlines()[0][:200]
    if not times:
        raise StepError(f"no {name} product worked: {problem}")
    best = min(times, key=lambda way: statistics.median(times[way]))
    note = f"{size}^3, random data, {best}, {_PRODUCTS_A_SAMPLE} in a row"
    return {f"compute.matmul_{name}": measured_rate(2 * size**3 * _PRODUCTS_A_SAMPLE, times[best], "flop/s", note)}


def _size(bench: Bench) -> int:
    return 8192 if bench.memory_budget() > 4 << 30 else 4096


def _device(bench: Bench) -> Any:
    return bench.torch().device("cuda", bench.index)


def _on_stream(bench: Bench) -> Any:
    """A context in which torch works on the session's stream, and so on its multiprocessors."""
    torch = bench.torch()
    if not torch.cuda.is_available():
        raise StepError("PyTorch sees no CUDA device: is it a build without CUDA, or one for a newer driver?")
    torch.cuda.set_device(bench.index)
    return torch.cuda.stream(torch.cuda.ExternalStream(int(bench.session.stream), device=_device(bench)))
