"""Contracts of the micro-benchmark kernels: what each moves and does as functions of its shapes. Needs no CUDA.

A kernel `read_8` of csrc/probe/stream.cu is `probe.read_8`; loading it gives (source, kernel name) for `Session.launch`.
"""

from __future__ import annotations

from collections.abc import Callable

from dragoman_kernels.contract import Bound, KernelContract, ResourceBudget, Shape
from dragoman_kernels.registry import Factory, Registry


def _none(shape: Shape) -> int:
    return 0


def _one(shape: Shape) -> int:
    return 1


def _contract(
    bound: Bound,
    dimensions: str,
    bytes_moved: Callable[[Shape], int],
    *,
    phases: Callable[[Shape], int] = _one,
    registers: int = 32,
    shared_bytes: int = 0,
) -> KernelContract:
    budget = ResourceBudget(registers, max_shared_bytes=shared_bytes)
    return KernelContract(bound, tuple(dimensions.split()), bytes_moved, _none, phases, resources=budget)


def _read_bytes(shape: Shape) -> int:
    return shape["num_bytes"]


def _exchange(width: int) -> KernelContract:
    """Each exchange reads and writes its word, in L2."""
    return _contract("latency", "num_exchanges", lambda s: 2 * width // 8 * s["num_exchanges"], registers=64)


def _rounds(shape: Shape) -> int:
    return shape["num_rounds"]


# Kernel -> (source, contract). The deepest streams may take 64 registers: 1,024 threads of them still fit.
PROBE_CONTRACTS: dict[str, tuple[str, KernelContract]] = {
    "fill": ("stream", _contract("bandwidth", "num_bytes", _read_bytes)),
    **{
        f"read_{depth}": ("stream", _contract("bandwidth", "num_bytes", _read_bytes, registers=64, shared_bytes=128))
        for depth in (1, 2, 4, 8)
    },
    **{
        f"copy_{depth}": ("stream", _contract("bandwidth", "num_bytes", lambda s: 2 * s["num_bytes"], registers=64))
        for depth in (1, 2, 4, 8)
    },
    "reread": (
        "stream",
        _contract(
            "bandwidth",
            "num_bytes num_passes",
            lambda s: s["num_bytes"] * s["num_passes"],
            registers=64,
            shared_bytes=128,
        ),
    ),
    "make_ring": ("chase", _contract("bandwidth", "num_nodes", lambda s: 8 * s["num_nodes"])),
    "chase": (
        "chase",
        _contract("latency", "num_steps", lambda s: 8 * s["num_steps"], phases=lambda s: s["num_steps"]),
    ),
    "empty": ("launch", _contract("latency", "num_blocks", _none)),
    "empty_dependent": ("launch", _contract("latency", "num_blocks", _none)),
    "hold": ("launch", _contract("latency", "num_blocks", _none)),
    "spin": ("launch", _contract("latency", "num_blocks", _none)),
    **{
        name: (
            "launch",
            _contract(
                "latency", "num_blocks num_rounds", lambda s: 8 * s["num_blocks"] * s["num_rounds"], phases=_rounds
            ),
        )
        for name in ("barrier_counter", "barrier_flag")
    },
    **{f"exchange_{width}": ("atomics", _exchange(width)) for width in (32, 64, 128)},
    **{
        f"random_{name}": ("random", _contract("bandwidth", "num_bytes", _read_bytes))
        for name in ("bfloat16", "float16", "float8", "int8")
    },
}


def register_probe(registry: Registry) -> None:
    """Register every micro-benchmark kernel."""
    for name, (source, contract) in PROBE_CONTRACTS.items():
        registry.register(f"probe.{name}", contract=contract)(_where(source, name))


def _where(source: str, name: str) -> Factory:
    return lambda: (source, name)
