"""How the attention kernels may be launched, and what a launch uses of a multiprocessor. Needs no Triton.

A planner chooses among these; `make aot` compiles every one that fits an architecture and holds it to the figures here.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_NUM_REGISTERS = 255  # a thread may have; beyond it values spill to memory
DECODE_SPLITS = (1, 2, 4, 8, 16, 32, 64)
_MIN_ROWS = 16  # of a matrix product: a group of fewer heads is padded to it


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Keys in a tile, warps of a block, stages of its loop."""

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """Queries of a work item, keys in a tile, warps of a block, stages of its loop, and who fetches K and V."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False  # the copy engine, by tensor descriptors; else the block's threads


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """Of the product of few rows: outputs of a block, inputs of a tile, stages of its loop, warps of a block."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class FixedGemmLaunch:
    """Of the product in one order for any number of rows: rows, outputs and inputs of a tile, stages of its loop, warps."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int

    @property
    def shared_bytes(self) -> int:
        """Of one block, values of two bytes: an upper bound."""
        return 2 * self.num_stages * (self.block_m + self.block_n) * self.block_k + 16


@dataclass(frozen=True, slots=True)
class Resources:
    """What one block uses. Registers are an estimate fitted to compiled kernels, shared memory an upper bound."""

    shared_bytes: int
    num_registers: int  # a thread
    num_tiles: int  # pairs of key and value tiles under way


# Warps and stages that differ in what they hide: few warps with many tiles under way, or many blocks a multiprocessor.
# In the order in which the first of equally quick ones is taken: what was measured best on an H200 comes first.
DECODE_LAUNCHES = tuple(
    DecodeLaunch(*launch) for launch in ((64, 4, 5), (64, 4, 3), (64, 2, 3), (64, 2, 5), (32, 4, 5), (128, 4, 3))
)
PREFILL_LAUNCHES = tuple(
    PrefillLaunch(*launch)
    for launch in ((64, 64, 4, 3), (64, 64, 4, 5), (64, 64, 8, 3), (64, 32, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3))
)

# By tensor descriptors. On an H200 64 queries were quicker than 128 in two blocks a multiprocessor at every length.
TMA_PREFILL_LAUNCHES = tuple(PrefillLaunch(*launch, tma=True) for launch in ((64, 64, 4, 3), (64, 64, 4, 5)))
# By tensor descriptors with roles for warps: groups of four attend to 64 queries each, four more fetch. One block a
# multiprocessor, for which the registers of a thread that attends are set by the number of groups.
MAX_PLAIN_WARPS = 8  # of a block whose warps are all alike
WS_REGISTERS = {2: 240, 3: 160}
WS_PREFILL_LAUNCHES = tuple(
    PrefillLaunch(*launch, tma=True)
    for launch in ((128, 64, 12, 4), (128, 128, 12, 2), (128, 128, 12, 4), (192, 64, 16, 4))
)
_WS_CAPABILITY = 9
_TMA_CAPABILITIES = (9, 10)  # whose products read K and V from where the copy engine puts them

# Of cards that are not NVIDIA's, by the threads that run in step: (decode, prefill), the largest tiles that AMD's compiler
# keeps in registers and 64 KiB of shared memory at head size 128 (gfx942 runs 64 in step, gfx1100 32). Never timed.
OTHER_LAUNCHES = {
    64: (DecodeLaunch(64, 4, 3), PrefillLaunch(64, 64, 4, 3)),
    32: (DecodeLaunch(16, 4, 3), PrefillLaunch(64, 16, 8, 3)),
}

# Bytes under way against blocks a multiprocessor: what is quickest depends on the matrix's height.
GEMM_LAUNCHES = tuple(
    GemmLaunch(*launch)
    for launch in ((16, 256, 5, 1), (16, 256, 5, 2), (16, 512, 4, 4), (32, 256, 4, 4), (64, 128, 4, 4))
)
GEMM_MAX_ROWS = 64  # of the product of few rows

# Of the product in one order. Few outputs a tile make many programs for one row, many save reads for a chunk. On an H200 all
# of them give equal bits: each tensor core product adds 16 inputs to the sum before, whatever the tile. Ties go to the first.
FIXED_GEMM_LAUNCHES = tuple(
    FixedGemmLaunch(*launch)
    for launch in (
        (64, 64, 64, 4, 4), (64, 64, 128, 4, 4), (64, 32, 128, 4, 4), (64, 32, 256, 3, 4), (64, 128, 128, 3, 8),
        (128, 64, 64, 4, 4), (128, 128, 64, 4, 8), (128, 256, 64, 3, 8),
    )
)  # fmt: skip
FIXED_ROWS = 64  # of a tile of attention in one order: the smallest that Hopper's product of four warps takes
FIXED_PART_TOKENS = 256  # of a context: what a program of such attention sums before it is folded

# Contracts of the kernels that wait for the one before them themselves, and so may start while it ends.
DEPENDENT_KERNELS = (
    "triton.rms_norm", "triton.silu_mul", "triton.rope_cache", "triton.decode_split", "triton.decode_merge",
    "triton.decode_list", "triton.decode_items", "triton.gemm_decode", "triton.block_max", "triton.block_sum", "triton.pick",
)  # fmt: skip


def decode_resources(launch: DecodeLaunch, group: int, head_dim: int, page_size: int) -> Resources:
    """Of one program of decode attention, `group` query heads a KV head, values of two bytes."""
    rows, dim = max(_MIN_ROWS, _padded(group)), _padded(head_dim)
    num_tiles = _num_buffers(launch.num_stages)
    shared = num_tiles * _tile_bytes(launch.block_n, dim, page_size) + 2 * rows * (dim + launch.block_n)
    # Accumulators and operands are spread over the threads of the block.
    registers = 40 + rows * launch.block_n * dim * 0.034 / (_MIN_ROWS * launch.num_warps)
    return Resources(shared, round(registers), num_tiles)


def prefill_resources(launch: PrefillLaunch, head_dim: int, page_size: int, capability: tuple[int, int]) -> Resources:
    """Of one program of prefill attention, values of two bytes.

    On compute capability 9 and 10 a product of 64 rows reads its operands from shared memory; elsewhere, and below 64
    rows, they go through registers.
    """
    dim = _padded(head_dim)
    threads = 32 * launch.num_warps
    outputs, scores = launch.block_m * dim / threads, launch.block_m * launch.block_n / threads
    if launch.tma and launch.num_warps > MAX_PLAIN_WARPS:
        return _ws_prefill_resources(launch, dim)
    if launch.tma:  # threads hold outputs, scores and weights, and no addresses
        num_tiles = max((launch.num_stages + 1) // 2, 2)
        shared = num_tiles * (2 * launch.block_n * dim * 2 + 8) + 2 * launch.block_m * dim + 64
        return Resources(shared, round(24 + outputs + 1.6 * scores), num_tiles)
    num_tiles = _num_buffers(launch.num_stages)
    from_shared = capability[0] in (9, 10) and launch.block_m >= 64
    if from_shared:
        num_tiles += 1
        registers, scratch = 22 + 1.5 * outputs + 2.2 * scores, 0
    else:
        registers, scratch = 2 + 2.6 * outputs + 3.1 * scores, 2 * launch.block_m * launch.block_n
        # A part of a page is kept by its place in it: where scores are many a thread, that is what spills.
        registers *= 1.4 if launch.block_n < page_size and scores >= 32 else 1.0
    shared = num_tiles * _tile_bytes(launch.block_n, dim, page_size) + 2 * launch.block_m * dim + scratch
    return Resources(shared, round(registers), num_tiles)


def _ws_prefill_resources(launch: PrefillLaunch, dim: int) -> Resources:
    """Of roles for warps: outputs, queries, scores and weights of 64 rows in a group's threads, or they do not fit."""
    attending = 40 + 0.75 * dim + 0.75 * launch.block_n
    fits = attending <= WS_REGISTERS[launch.block_m // 64]
    registers = 65536 // (32 * launch.num_warps) // 8 * 8 if fits else MAX_NUM_REGISTERS + 1
    shared = 2 * dim * (launch.block_m + 2 * launch.num_stages * launch.block_n)
    scratch = 8192 * (launch.block_m // 64) + 512  # outputs change threads through it
    return Resources(shared + scratch, registers, launch.num_stages)


def decode_launches(group: int, head_dim: int, page_size: int, shared_per_block: int) -> tuple[DecodeLaunch, ...]:
    """Those that fit an architecture whose blocks may use `shared_per_block` bytes, in the table's order."""
    return tuple(
        launch
        for launch in DECODE_LAUNCHES
        if _fits(decode_resources(launch, group, head_dim, page_size), shared_per_block)
    )


def prefill_launches(
    head_dim: int, page_size: int, capability: tuple[int, int], shared_per_block: int
) -> tuple[PrefillLaunch, ...]:
    """Those that fit an architecture whose blocks may use `shared_per_block` bytes, in the table's order."""
    return tuple(
        launch
        for launch in PREFILL_LAUNCHES
        if _fits(prefill_resources(launch, head_dim, page_size, capability), shared_per_block)
    )


def tma_prefill_launches(
    head_dim: int, page_size: int, capability: tuple[int, int], shared_per_block: int
) -> tuple[PrefillLaunch, ...]:
    """Those by tensor descriptors that can run, K and V in 16 bits: none where pages are smaller than a tile, where the head
    size is no power of two, or where products take their operands from registers.
    """
    if capability[0] not in _TMA_CAPABILITIES or head_dim != _padded(head_dim):
        return ()
    return tuple(
        launch
        for launch in TMA_PREFILL_LAUNCHES
        if page_size % launch.block_n == 0
        and _fits(prefill_resources(launch, head_dim, page_size, capability), shared_per_block)
    )


def ws_prefill_launches(
    head_dim: int, page_size: int, capability: tuple[int, int], shared_per_block: int
) -> tuple[PrefillLaunch, ...]:
    """Those with roles for warps that can run, as `tma_prefill_launches`: on Hopper alone, whose products they name."""
    if capability[0] != _WS_CAPABILITY or head_dim not in (64, 128) or page_size % 64:
        return ()
    fitting = {
        (launch.block_m, launch.block_n): launch  # the last, of most stages
        for launch in WS_PREFILL_LAUNCHES
        if _fits(prefill_resources(launch, head_dim, page_size, capability), shared_per_block)
    }
    return tuple(fitting.values())


def fixed_attention_launches(
    head_dim: int, page_size: int, capability: tuple[int, int], shared_per_block: int
) -> tuple[PrefillLaunch, ...]:
    """Those of attention in one order that fit, what has most under way first: decode runs them too."""
    fitting = (
        launch
        for launch in PREFILL_LAUNCHES
        if launch.block_m == FIXED_ROWS
        and launch.num_warps == 4
        and prefill_resources(launch, head_dim, page_size, capability).shared_bytes <= shared_per_block
    )
    return tuple(sorted(fitting, key=lambda one: (-one.block_n, -one.num_stages)))


def fixed_gemm_launches(shared_per_block: int) -> tuple[FixedGemmLaunch, ...]:
    """Those of the product in one order whose blocks may use `shared_per_block` bytes, in the table's order."""
    return tuple(launch for launch in FIXED_GEMM_LAUNCHES if launch.shared_bytes <= shared_per_block)


def _fits(resources: Resources, shared_per_block: int) -> bool:
    return resources.shared_bytes <= shared_per_block and resources.num_registers <= MAX_NUM_REGISTERS


def _num_buffers(num_stages: int) -> int:
    """Tiles that Triton keeps under way: the table entry that says where a tile lies takes a stage of its own."""
    return max((num_stages - 1) // 2, 1)


def _tile_bytes(block_n: int, dim: int, page_size: int) -> int:
    """K and V of a tile, and its table entries where it spans pages."""
    entries = block_n if block_n > page_size else 1
    return 2 * block_n * dim * 2 + 4 * entries


def _padded(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()
