"""What a backend provides on a device, as data: memory, synchronisation, atomics, launches. Pure, from a profile's values.

Where a figure was not measured it is absent and `missing` says which probe would take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dragoman_agent.device.base import DeviceError
from dragoman_agent.pal.found import UNTESTED_KINDS
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.profile import Value

GPU_KINDS = ("cuda", "hip", "xpu")
Scope = Literal["block", "device", "host"]

_MAX_NUM_BLOCKS = 2**31 - 1  # of a launch's first dimension (CUDA C++ Programming Guide, technical specifications)
_USUAL_BLOCK = 128  # threads: the size `--pal off` uses, taken where nothing was measured
_NEARLY_BEST = 0.98  # of the best measured throughput: the smallest block that reaches it is taken
_EXAMPLES = (1, 1_000, 1_000_000)  # threads, of the launches shown in the matrix
# First compute capability with 128-bit exchanges (CUDA C++ Programming Guide, atomicExch).
_ATOMIC_128 = (9, 0)


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """One level of memory. Size in bytes, latency of a dependent read in s, bandwidth in bytes/s; None: not known."""

    name: str
    size: Value | None = None
    latency: Value | None = None
    bandwidth: Value | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class SyncPrimitive:
    """One way to order work; `cost` in s, None where it was not measured or costs nothing of its own."""

    name: str
    scope: Scope
    cost: Value | None = None


@dataclass(frozen=True, slots=True)
class Atomic:
    """Atomic operations on words of `width_bits`, which must lie on a multiple of `alignment_bytes`."""

    width_bits: int
    alignment_bytes: int
    rate: float | None = None  # operations/s, measured


@dataclass(frozen=True, slots=True)
class LaunchConfiguration:
    """How a number of threads is started: `num_blocks` of `block_threads`, each thread with up to `items_a_thread`."""

    num_blocks: int
    block_threads: int
    items_a_thread: int

    @property
    def num_threads(self) -> int:
        """Threads that are started; those past the request have nothing to do."""
        return self.num_blocks * self.block_threads


@dataclass(frozen=True, slots=True)
class LaunchLimits:
    """What a launch may ask for, and the block that is taken."""

    group_threads: int  # that run in step: a warp, a wave, 1 on a CPU
    block_threads: int
    max_block_threads: int
    max_num_blocks: int
    max_resident_threads: int | None  # on the device at once; None where the driver does not say
    reason: str  # for block_threads
    shares_items: bool = False  # threads are few and take several items each

    def configure(self, num_threads: int) -> LaunchConfiguration:
        """The launch for `num_threads` items. Raises DeviceError where there is none."""
        if num_threads < 1:
            raise DeviceError(f"a launch of {num_threads} threads was asked for; at least 1 is needed")
        if self.shares_items:
            threads = min(num_threads, self.max_num_blocks)
            return LaunchConfiguration(threads, 1, -(-num_threads // threads))
        groups = -(-num_threads // self.group_threads)
        block = min(self.block_threads, groups * self.group_threads)
        blocks = -(-num_threads // block)
        if blocks > self.max_num_blocks:
            most = self.max_num_blocks * block
            raise DeviceError(f"a launch of {num_threads} threads was asked for; {most} are possible, split it")
        return LaunchConfiguration(blocks, block, 1)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Everything a backend provides on one device."""

    kind: str
    is_tested: bool  # whether this backend has ever run on such a device
    memory: tuple[MemoryRegion, ...]
    sync: tuple[SyncPrimitive, ...]
    atomics: tuple[Atomic, ...]
    launch: LaunchLimits
    has_dependent_launch: bool = False
    missing: tuple[str, ...] = ()  # values that nobody measured, each with what would

    def region(self, name: str) -> MemoryRegion | None:
        """A level of memory by name."""
        return next((region for region in self.memory if region.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values for the capability matrix."""
        launch = self.launch
        return {
            "tested": self.is_tested,
            "memory": [
                {"name": r.name, "size": _plain(r.size), "latency": _plain(r.latency), "bandwidth": _plain(r.bandwidth), "note": r.note}
                for r in self.memory
            ],
            "sync": [{"name": each.name, "scope": each.scope, "cost": _plain(each.cost)} for each in self.sync],
            "atomics": [
                {"width_bits": a.width_bits, "alignment_bytes": a.alignment_bytes, "rate": a.rate} for a in self.atomics
            ],
            "launch": {
                "group_threads": launch.group_threads,
                "block_threads": launch.block_threads,
                "max_block_threads": launch.max_block_threads,
                "max_resident_threads": launch.max_resident_threads,
                "reason": launch.reason,
                "dependent": self.has_dependent_launch,
                "examples": [_example(launch, count) for count in _EXAMPLES],
            },
            "missing": list(self.missing),
        }  # fmt: skip


def capabilities_of(kind: str, values: Mapping[str, Value]) -> Capabilities:
    """What the backend `kind` provides on the device that `values` describe.

    Raises DeviceError where the kind has no backend, or naming a value without which nothing can be launched.
    """
    if kind in GPU_KINDS:
        return _gpu(kind, values)
    if kind == "cpu":
        return _cpu(values)
    if kind == "null":
        return _null()
    raise DeviceError(f"there is no {kind} backend; there are cpu, {', '.join(GPU_KINDS)} and null")


def check_plan_fits(plan: Plan, capabilities: Capabilities) -> None:
    """Whether the device can do what the plan asks of it, before anything is loaded. Raises DeviceError naming the first."""
    problems = list(_plan_problems(plan, capabilities))
    if problems:
        raise DeviceError(f"the plan cannot run on this {capabilities.kind} device: {problems[0]}; plan again for it")


def _plan_problems(plan: Plan, capabilities: Capabilities) -> Iterable[str]:
    launch = capabilities.launch
    if plan.device_kind != capabilities.kind:
        yield f"it is one for a {plan.device_kind} device"
    if capabilities.kind not in GPU_KINDS:
        return
    warps = [choice.num_warps for choice in plan.decode_attention] + [choice.num_warps for choice in plan.gemm_decode]
    warps += [choice.num_warps for choice in plan.prefill_forms.all] if plan.prefill_forms else []
    threads = max(warps, default=0) * launch.group_threads
    if threads > launch.max_block_threads:
        yield f"it starts blocks of {threads} threads, {launch.max_block_threads} are possible"
    shared = capabilities.region("shared")
    if shared is not None and shared.size is not None and plan.shared_memory_bytes > _number(shared.size):
        yield f"its blocks use {plan.shared_memory_bytes} bytes of shared memory, {_number(shared.size):.0f} are possible"
    if plan.dependent_launch and not capabilities.has_dependent_launch:
        yield "it starts kernels before the one before them has ended, which this device cannot"


def _gpu(kind: str, values: Mapping[str, Value]) -> Capabilities:
    warp, most = (_need(kind, values, f"compute.{name}") for name in ("warp_size", "max_threads_per_block"))
    flag = values.get("compute.dependent_launch")
    dependent = kind == "cuda" and flag is not None and flag.value is True
    by_region = values.get("memory.latency_by_region")
    memory = (
        MemoryRegion(
            "device", values.get("memory.total"), values.get("memory.latency"), values.get("memory.read_bandwidth"),
            "" if by_region is None else f"by region: {by_region.note}",
        ),
        MemoryRegion("l2", values.get("memory.l2_size"), values.get("memory.l2_latency"), values.get("memory.l2_bandwidth")),
        MemoryRegion("shared", values.get("memory.shared_per_block"), note="of one block"),
        MemoryRegion("host", bandwidth=values.get("link.h2d_pinned"), note="pinned, over the link"),
    )  # fmt: skip
    sync = [
        SyncPrimitive("block barrier", "block"),
        SyncPrimitive("kernel order", "device", values.get("scheduling.graph_node_dependent") or values.get("scheduling.graph_node")),
        SyncPrimitive("event record", "device", values.get("scheduling.event_record")),
        SyncPrimitive("event wait", "device", values.get("scheduling.event_wait")),
        SyncPrimitive("host launch", "host", values.get("scheduling.host_launch")),
    ]  # fmt: skip
    cooperative = values.get("compute.cooperative_launch")
    if "scheduling.grid_barrier" in values or (cooperative is not None and cooperative.value is True):
        sync.append(SyncPrimitive("grid barrier", "device", values.get("scheduling.grid_barrier")))
    resident = None
    if {"compute.multiprocessors", "compute.max_threads_per_multiprocessor"} <= values.keys():
        resident = int(
            _number(values["compute.multiprocessors"]) * _number(values["compute.max_threads_per_multiprocessor"])
        )
    block, reason = _block(values, warp, most)
    return Capabilities(
        kind, kind not in UNTESTED_KINDS, memory, tuple(sync), _gpu_atomics(kind, values),
        LaunchLimits(warp, block, most, _MAX_NUM_BLOCKS, resident, reason), dependent,
        _missing(values, _GPU_MEASURED),
    )  # fmt: skip


def _block(values: Mapping[str, Value], warp: int, most: int) -> tuple[int, str]:
    """Threads of a block and why: the smallest measured one that streams nearly as quickly as the best."""
    rates = values.get("scheduling.throughput_by_block_size")
    if rates is None or not isinstance(rates.value, tuple) or not rates.labels:
        block = max(min(_USUAL_BLOCK, most) // warp, 1) * warp
        return block, "the usual size; `dragoman probe --full` measures which is best here"
    best = max(rates.value)
    good = [int(label) for label, rate in zip(rates.labels, rates.value, strict=True) if rate >= _NEARLY_BEST * best]
    return min(good), f"the smallest that reaches {_NEARLY_BEST:.0%} of the best measured throughput"


def _gpu_atomics(kind: str, values: Mapping[str, Value]) -> tuple[Atomic, ...]:
    rates = values.get("scheduling.atomics")
    if rates is not None and isinstance(rates.value, tuple) and rates.labels:
        measured = zip(rates.labels, rates.value, strict=True)
        return tuple(Atomic(int(label), int(label) // 8, rate) for label, rate in measured)
    widths = [32, 64]
    capability = str(values["compute.capability"].value) if "compute.capability" in values else "0.0"
    major, _, minor = capability.partition(".")
    if kind == "cuda" and major.isdigit() and minor.isdigit() and (int(major), int(minor)) >= _ATOMIC_128:
        widths.append(128)
    return tuple(Atomic(width, width // 8) for width in widths)


def _cpu(values: Mapping[str, Value]) -> Capabilities:
    cores = _need("cpu", values, "compute.cores")
    caches = [
        MemoryRegion(f"l{level}", values[f"memory.l{level}_size"])
        for level in range(1, 5)
        if f"memory.l{level}_size" in values
    ]
    main = MemoryRegion(
        "main", values.get("memory.total"), values.get("memory.latency"), values.get("memory.read_bandwidth")
    )
    handover = values.get("scheduling.thread_handover")
    sync = (SyncPrimitive("thread barrier", "host", handover), SyncPrimitive("step order", "host"))
    launch = LaunchLimits(
        1, 1, 1, cores, cores, "a thread a core: more would take turns, each takes several items", shares_items=True
    )
    atomics = (Atomic(32, 4), Atomic(64, 8))
    return Capabilities("cpu", True, (main, *caches), sync, atomics, launch, missing=_missing(values, _CPU_MEASURED))


def _null() -> Capabilities:
    region = MemoryRegion("host", note="an arena of hashes: 12 bytes a token, no weights")
    launch = LaunchLimits(
        1, 1, 1, 1, 1, "one thread writes everything, as a step is handed over", shares_items=True
    )  # fmt: skip
    return Capabilities("null", True, (region,), (SyncPrimitive("step order", "host"),), (), launch)


# What should have been measured, and how to get it.
_GPU_MEASURED = {
    "memory.read_bandwidth": "dragoman probe", "memory.latency": "dragoman probe --full",
    "memory.l2_latency": "dragoman probe --full", "scheduling.event_wait": "dragoman probe --full",
    "scheduling.atomics": "dragoman probe --full", "scheduling.throughput_by_block_size": "dragoman probe --full",
}  # fmt: skip
_CPU_MEASURED = {
    "memory.read_bandwidth": "dragoman probe", "scheduling.thread_handover": "dragoman probe", "memory.latency": "",
}  # fmt: skip


def _missing(values: Mapping[str, Value], wanted: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name}: not measured yet by `{how}`" if how else f"{name}: no probe measures it on this kind of device"
        for name, how in wanted.items()
        if name not in values
    )


def _need(kind: str, values: Mapping[str, Value], name: str) -> int:
    value = values.get(name)
    if value is None or isinstance(value.value, bool) or not isinstance(value.value, int | float) or value.value < 1:
        said = "nothing" if value is None else repr(value.value)
        raise DeviceError(
            f"nothing can be launched on this {kind} device: its driver says {said} for {name}; probe it again with "
            "`dragoman probe --fresh`, or use --device cpu"
        )
    return int(value.value)


def _number(value: Value) -> float:
    return float(value.value) if isinstance(value.value, int | float) else 0.0


def _plain(value: Value | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {"value": value.value, "unit": value.unit, "provenance": value.provenance}


def _example(launch: LaunchLimits, num_threads: int) -> dict[str, int]:
    made = launch.configure(num_threads)
    return {
        "threads": num_threads,
        "num_blocks": made.num_blocks,
        "block_threads": made.block_threads,
        "items_a_thread": made.items_a_thread,
    }
