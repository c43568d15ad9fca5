"""Makes the library's files from the table: `python -m dragoman_agent.pal.library.build`. Rules and sources are here.

A value is `spec` where a sheet or a publication says it, and `derived` where a rule below makes it from such a value.
The rules carry the shares that one measured H200 showed (read 4,614 of 4,800 GB/s; copy 4,314; products 777 of 989 and
1,423 of 1,979 TFLOP/s; 0.55 us an empty kernel in a graph, 0.475 dependent; transfers 55.4 of 63.0 GB/s).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dragoman_agent.pal.library.cards import ARCHITECTURES, CARDS, Architecture, Card
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value

SHEET_DATE = "2026-11-29T00:00:00+00:00"

READ_SHARE = 0.93  # of the sheet's bandwidth: H100 0.93, H200 0.94 to 0.96, RTX 5090 0.93 by published measurements
COPY_SHARE = 0.935  # copy over read: 4,314 / 4,614 GB/s
PHASE_RATE_SHARE = 0.91  # rate of a chain of short streaming kernels over the read rate: 4.19 / 4.61 TB/s
MATMUL_SHARE = 0.79  # bfloat16, of the dense sheet rate: H100 0.80, H200 0.79, B200 0.78
POWER_BOUND_SHARE = 0.65  # the same where the power limit comes first: L40S 235 / 362 TFLOP/s
FLOAT8_SHARE = 0.72  # float8: H100 0.71, H200 0.72
EMPTY_KERNEL_SHARE = 0.42  # empty kernel in a graph over the published small kernel: 0.55 / 1.31 us
DEPENDENT_SHARE = 0.864  # with dependent launch: 0.475 / 0.55 us
PHASE_SHARE = 1.83  # a phase's latency over the published small kernel: the fitted 2.4 us of H100 and H200 / 1.31 us
LINK_SHARE = 0.88  # of the lanes' rate: 55.4 / 63.0 GB/s
FREE_SHARE = 0.98  # of the memory, on an idle card
LANE_RATE = {4: 1.969e9, 5: 3.938e9}  # bytes/s of a lane each way, by link generation
DEPENDENT_LAUNCH_SINCE = (9, 0)

_GUIDE = "CUDA programming guide, compute capabilities"
_SHEET = "vendor data sheet"


def profile_of(card: Card) -> Profile:
    """The profile of a card that was never seen. Its fingerprint is empty: it stands for a model, not for one card."""
    architecture = ARCHITECTURES[card.architecture]
    values = {
        **_compute(card, architecture),
        **_memory(card, architecture),
        **_scheduling(card, architecture),
        **_link(card),
    }
    total = int(values["memory.total"].value)  # type: ignore[arg-type]
    facts = DeviceFacts("cuda", 0, card.title, card.architecture, total, "")
    return Profile(card.name, facts, "", SHEET_DATE, values)


def _compute(card: Card, architecture: Architecture) -> dict[str, Value]:
    dependent = tuple(map(int, architecture.capability.split("."))) >= DEPENDENT_LAUNCH_SINCE
    share = POWER_BOUND_SHARE if card.power_bound else MATMUL_SHARE
    bfloat16 = _published(card, "bfloat16", "flop/s") or _derived(
        share * card.bfloat16, "flop/s", f"{share} x {card.rate_source} {card.bfloat16 / 1e12:g} TFLOP/s"
    )
    values = {
        "compute.capability": _spec(architecture.capability, "", _GUIDE),
        "compute.dtypes": _spec(architecture.dtypes, "", _GUIDE),
        "compute.multiprocessors": _spec(card.num_multiprocessors, "", _SHEET),
        "compute.warp_size": _spec(32, "", _GUIDE),
        "compute.max_threads_per_block": _spec(1024, "", _GUIDE),
        "compute.max_threads_per_multiprocessor": _spec(32 * architecture.max_warps, "", _GUIDE),
        "compute.max_blocks_per_multiprocessor": _spec(architecture.max_blocks, "", _GUIDE),
        "compute.registers_per_multiprocessor": _spec(65536, "", _GUIDE),
        "compute.registers_per_block": _spec(65536, "", _GUIDE),
        "compute.cooperative_launch": _spec(True, "", _GUIDE),
        "compute.cluster_launch": _spec(dependent, "", _GUIDE),
        "compute.dependent_launch": _spec(dependent, "", _GUIDE),
        "compute.matmul_bfloat16": bfloat16,
        "compute.matmul_float16": _derived(float(bfloat16.value), "flop/s", "as bfloat16"),  # type: ignore[arg-type]
    }
    if card.float8 is not None:
        share = POWER_BOUND_SHARE if card.power_bound else FLOAT8_SHARE
        values["compute.matmul_float8"] = _published(card, "float8", "flop/s") or _derived(
            share * card.float8, "flop/s", f"{share} x {card.rate_source} {card.float8 / 1e12:g} TFLOP/s"
        )
    return values


def _memory(card: Card, architecture: Architecture) -> dict[str, Value]:
    total = (card.memory_gib << 30) * 15 // 16 if card.inline_ecc else card.memory_gib << 30
    ecc = ", less the sixteenth that its error correction takes" if card.inline_ecc else ""
    read = _published(card, "read_bandwidth", "bytes/s") or _derived(
        READ_SHARE * card.bandwidth, "bytes/s", f"{READ_SHARE} x the sheet's {card.bandwidth / 1e9:g} GB/s"
    )
    rate = float(read.value)  # type: ignore[arg-type]
    l2_source = _SHEET if card.l2_source == "vendor" else card.l2_source
    return {
        "memory.total": _spec(total, "bytes", f"{_SHEET}: {card.memory_gib} GB{ecc}"),
        "memory.free": _derived(int(total * FREE_SHARE), "bytes", f"{FREE_SHARE} x the total: an idle card"),
        "memory.l2_size": _spec(card.l2_bytes, "bytes", l2_source),
        "memory.shared_per_multiprocessor": _spec(architecture.shared_bytes, "bytes", _GUIDE),
        "memory.shared_per_block": _spec(architecture.shared_bytes - 1024, "bytes", _GUIDE + ": opt-in limit"),
        "memory.shared_reserved_per_block": _spec(1024, "bytes", _GUIDE),
        "memory.read_bandwidth": read,
        "memory.copy_bandwidth": _derived(COPY_SHARE * rate, "bytes/s", f"{COPY_SHARE} x the read rate"),
    }


def _scheduling(card: Card, architecture: Architecture) -> dict[str, Value]:
    published = card.published.get("graph_kernel")
    kernel = published.value if published else architecture.graph_kernel
    relative = "this card" if published else architecture.relative
    told = f"the {kernel * 1e6:.2f} us that a small kernel in a graph takes on {relative} by publications"
    barrier = _published(card, "grid_barrier", "s") or _derived(
        architecture.grid_barrier, "s", f"as published for {architecture.relative}, gpu-benches or MegaQwen"
    )
    read = card.published["read_bandwidth"].value if "read_bandwidth" in card.published else READ_SHARE * card.bandwidth
    values = {
        "scheduling.graph_node": _derived(EMPTY_KERNEL_SHARE * kernel, "s", f"{EMPTY_KERNEL_SHARE} x {told}"),
        "scheduling.phase": _derived(PHASE_SHARE * kernel, "s", f"{PHASE_SHARE} x {told}"),
        "scheduling.phase_rate": _derived(PHASE_RATE_SHARE * read, "bytes/s", f"{PHASE_RATE_SHARE} x the read rate"),
        "scheduling.grid_barrier": barrier,
    }
    if tuple(map(int, architecture.capability.split("."))) >= DEPENDENT_LAUNCH_SINCE:
        values["scheduling.graph_node_dependent"] = _derived(
            DEPENDENT_SHARE * EMPTY_KERNEL_SHARE * kernel, "s", f"{DEPENDENT_SHARE} x the node without"
        )
    launch = _published(card, "stream_launch", "s")
    return {**values, "scheduling.stream_launch": launch} if launch else values


def _link(card: Card) -> dict[str, Value]:
    rate = LINK_SHARE * card.link_width * LANE_RATE[card.link_generation]
    told = f"{LINK_SHARE} x {card.link_width} lanes of generation {card.link_generation}"
    return {
        "link.max_generation": _spec(card.link_generation, "", _SHEET),
        "link.max_width": _spec(card.link_width, "", _SHEET),
        "link.h2d_pinned": _derived(rate, "bytes/s", told),
        "link.d2h_pinned": _derived(rate, "bytes/s", told),
    }


def _published(card: Card, name: str, unit: str) -> Value | None:
    figure = card.published.get(name)
    return _spec(figure.value, unit, figure.source) if figure else None


def _spec(value: float | int | str | bool, unit: str, note: str) -> Value:
    return Value(value, unit, "spec", note=note)


def _derived(value: float, unit: str, note: str) -> Value:
    rounded = float(f"{value:.4g}") if isinstance(value, float) else value
    return Value(rounded, unit, "derived", note=note)


def write(folder: Path, say: Callable[[str], object] = print) -> None:
    """Write every card's file into `folder`. Files of measured cards are left alone."""
    for card in CARDS:
        (folder / f"{card.name}.json").write_text(profile_of(card).to_json(), encoding="utf-8")
        say(f"wrote {card.name}.json")


if __name__ == "__main__":
    write(Path(__file__).parent)
