"""The table that the library is made from: vendor sheets, and published measurements where there are any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_MAMF = "published: the fastest matrix product found by the MAMF finder of ml-engineering"
_OPERATORS = "published: the fastest of the public operator timings of aiconfigurator, systems/data"
_SMALL_KERNELS = "published: gpu-benches, gpu-small-kernels"
_MEGAQWEN = "published: MegaQwen's measurements"
_HAZY = "published: Hazy Research, 2025-05-27"
_QWEN_MEGAKERNEL = "published: qwen_megakernel's measurements"


@dataclass(frozen=True, slots=True)
class Published:
    """A figure that someone measured and published."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Card:
    """One card as its vendor describes it; dense rates with float32 accumulation, decimal bandwidth.

    `published` holds measured figures under the names that `build.py` reads: read_bandwidth (bytes/s), bfloat16 and
    float8 (flop/s), graph_kernel, stream_launch and grid_barrier (s).
    """

    name: str
    title: str
    architecture: str
    num_multiprocessors: int
    l2_bytes: int
    memory_gib: int  # the vendor's "GB" of memory is 2^30: an H200 of "141 GB" reports 140.4 GiB
    bandwidth: float  # bytes/s
    bfloat16: float  # flop/s
    float8: float | None  # flop/s
    link_generation: int
    link_width: int = 16
    inline_ecc: bool = False  # on by default: a sixteenth of a GDDR memory
    power_bound: bool = False  # matrix products reach the power limit before the sheet's rate
    l2_source: str = "vendor"
    rate_source: str = "the sheet's"
    published: Mapping[str, Published] = field(default_factory=dict)


CARDS = (
    Card(
        "a100-sxm-80gb", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 40 << 20, 80, 2039e9, 312e12, None, 4,
        published={
            "read_bandwidth": Published(1620e9, _OPERATORS),
            "bfloat16": Published(278e12, _OPERATORS),
            "graph_kernel": Published(1.42e-6, _SMALL_KERNELS),
            "grid_barrier": Published(1.34e-6, _SMALL_KERNELS),
        },
    ),
    Card(
        "rtx3090", "NVIDIA GeForce RTX 3090", "sm_86", 82, 6 << 20, 24, 936e9, 71e12, None, 4,
        published={
            "graph_kernel": Published(0.83e-6, _MEGAQWEN),
            "stream_launch": Published(1.54e-6, _MEGAQWEN),
            "grid_barrier": Published(0.73e-6, _MEGAQWEN),
        },
    ),
    Card(
        "rtx4060-laptop", "NVIDIA GeForce RTX 4060 Laptop GPU", "sm_89", 24, 32 << 20, 8, 256e9, 27.5e12, 53.5e12, 4, 8,
        l2_source="a third-party GPU database; the vendor publishes none",
        rate_source="the middle of what its power limit allows,",
    ),
    Card("rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", 128, 72 << 20, 24, 1008e9, 165.2e12, 330.3e12, 4),
    Card("l4", "NVIDIA L4", "sm_89", 58, 48 << 20, 24, 300e9, 121e12, 242.5e12, 4, inline_ecc=True, power_bound=True),
    Card(
        "l40s", "NVIDIA L40S", "sm_89", 142, 96 << 20, 48, 864e9, 362e12, 733e12, 4, inline_ecc=True, power_bound=True,
        published={
            "read_bandwidth": Published(725e9, _OPERATORS),
            "bfloat16": Published(235e12, _OPERATORS),
            "graph_kernel": Published(0.97e-6, _SMALL_KERNELS + ", on an L40"),
            "grid_barrier": Published(0.66e-6, _SMALL_KERNELS + ", on an L40"),
        },
    ),
    Card(
        "h100-sxm", "NVIDIA H100 80GB HBM3", "sm_90", 132, 50 << 20, 80, 3350e9, 989e12, 1979e12, 5,
        published={
            "read_bandwidth": Published(3121e9, _OPERATORS),
            "bfloat16": Published(794.5e12, _MAMF),
            "float8": Published(1403e12, _MAMF),
            "graph_kernel": Published(1.3e-6, _HAZY),
            "stream_launch": Published(2.1e-6, _HAZY),
        },
    ),
    Card(
        "b200", "NVIDIA B200", "sm_100", 148, 132_644_864, 180, 8000e9, 2250e12, 4500e12, 5,
        l2_source="as the driver reports it",
        published={
            "read_bandwidth": Published(6980e9, _OPERATORS),
            "bfloat16": Published(1745e12, _MAMF),
            "float8": Published(3433e12, _MAMF),
        },
    ),
    Card(
        "rtx5090", "NVIDIA GeForce RTX 5090", "sm_120", 170, 96 << 20, 32, 1792e9, 209.5e12, 419e12, 5,
        published={"read_bandwidth": Published(1674e9, _QWEN_MEGAKERNEL)},
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the CUDA programming guide fixes for an architecture. Sizes in bytes a multiprocessor."""

    capability: str
    max_warps: int
    max_blocks: int
    shared_bytes: int
    dtypes: str
    graph_kernel: float  # s, published for the nearest relative that someone measured
    relative: str
    grid_barrier: float  # s, of the same relative


_ADA_DTYPES = "bfloat16 float16 float8 int8"
ARCHITECTURES = {
    "sm_80": Architecture("8.0", 64, 32, 164 << 10, "bfloat16 float16 int8", 1.42e-6, "A100", 1.34e-6),
    "sm_86": Architecture("8.6", 48, 16, 100 << 10, "bfloat16 float16 int8", 0.83e-6, "RTX 3090", 0.73e-6),
    "sm_89": Architecture("8.9", 48, 24, 100 << 10, _ADA_DTYPES, 0.97e-6, "L40", 0.66e-6),
    "sm_90": Architecture("9.0", 64, 32, 228 << 10, _ADA_DTYPES, 1.31e-6, "H200", 1.13e-6),
    "sm_100": Architecture("10.0", 64, 32, 228 << 10, _ADA_DTYPES, 1.31e-6, "H200", 1.13e-6),
    "sm_120": Architecture("12.0", 48, 24, 100 << 10, _ADA_DTYPES, 0.97e-6, "L40", 0.66e-6),
}
