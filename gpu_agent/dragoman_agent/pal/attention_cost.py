"""Predicted seconds of the attention kernels for one launch choice, from a device's rates. Pure.

Both models count, for the programs that run at once: the bytes they have under way against the latency of memory
(Little's law), what a multiprocessor can take in, and the cycles of one tile. Waves of programs follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.pal.rates import Rates
from dragoman_kernels.triton.launches import (
    MAX_NUM_REGISTERS,
    MAX_PLAIN_WARPS,
    DecodeLaunch,
    PrefillLaunch,
    Resources,
    decode_resources,
    prefill_resources,
)

# Cycles, as measured on Hopper (arXiv 2402.13499, 2501.12084); Ampere and Ada are within a few of them.
_MMA_CYCLES = 33  # of one m16n8k16 product that waits for the one before
_SHUFFLE_CYCLES = 25
_SHARED_CYCLES = 30  # of one access to shared memory, or a barrier of the block
_SHARED_PER_CYCLE = 128  # bytes that a multiprocessor reads from shared memory
_EXP_PER_CYCLE = 16  # of one multiprocessor
_FLOAT_PER_CYCLE = 128  # float32 operations of one multiprocessor
_SOFTMAX_OPERATIONS = 16  # a score costs beside its exponential: scale, mask, maximum, sums, conversions
# Of a loop's loads in latencies of memory: each waits for its table entry and is asked for only when a tile has been used up.
_LOOP_LATENCIES = 1.8  # fitted to 300 launches of 1 to 8 sequences on an H200, where few programs read long contexts
_ROWS = 16  # of a tensor core product: the heads of a group are padded to it


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model and the page of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class _Programs:
    """Equal programs of one kernel and what each does."""

    count: int
    num_tiles: int
    tile_bytes: int
    tile_cycles: float  # from the first product of a tile to its last, the loads aside
    issue_cycles: float  # of a multiprocessor's pipes, which its programs share
    resources: Resources
    num_threads: int


def decode_seconds(
    rates: Rates, shape: AttentionShape, launch: DecodeLaunch, num_splits: int, batch: int, context: float
) -> float:
    """Decode attention of `batch` sequences of `context` tokens, its merge included. Infinite where it cannot run."""
    num_tiles = max(-(-int(context) // launch.block_n), 1)
    tiles_each = -(-num_tiles // num_splits)
    used_splits = -(-num_tiles // tiles_each)
    programs = _decode_programs(shape, launch, batch * shape.num_kv_heads * used_splits, tiles_each)
    waves = _waves_seconds(rates, programs)
    # A program with nothing to do still starts, with all its shared memory, reads its length and ends.
    idle = batch * shape.num_kv_heads * (num_splits - used_splits)
    num_resident = max(_num_resident(rates, programs.resources, programs.num_threads)[0], 1)
    starts = idle * rates.latency_seconds / (rates.num_multiprocessors * num_resident)
    return rates.phase_seconds + waves + starts + merge_seconds(rates, shape, num_splits, batch)


def long_decode_seconds(
    rates: Rates,
    shape: AttentionShape,
    launch: DecodeLaunch,
    num_splits: int,
    batch: int,
    context: float,
    longest: float,
) -> float:
    """The same where one of the sequences has `longest` tokens: its own programs may end last."""
    num_tiles = max(-(-int(longest) // launch.block_n), 1)
    tiles_each = -(-num_tiles // num_splits)
    programs = _decode_programs(shape, launch, shape.num_kv_heads * -(-num_tiles // tiles_each), tiles_each)
    alone = rates.phase_seconds + _waves_seconds(rates, programs) + merge_seconds(rates, shape, num_splits, batch)
    mean = (context * (batch - 1) + longest) / batch
    return max(decode_seconds(rates, shape, launch, num_splits, batch, mean), alone)


def merge_seconds(rates: Rates, shape: AttentionShape, num_splits: int, batch: int) -> float:
    """Of the kernel that merges the parts; 0 where there is one."""
    if num_splits == 1:
        return 0.0
    rows = batch * shape.num_heads
    num_bytes = rows * (num_splits * 4 * (shape.head_dim + 1) + 2 * shape.head_dim)
    return rates.phase_seconds + rates.stream_seconds(num_bytes)


def prefill_seconds(
    rates: Rates, shape: AttentionShape, launch: PrefillLaunch, tokens: int, context: int, num_prompts: int = 1
) -> float:
    """Causal attention of the last `tokens` of each of `num_prompts` sequences of `context` tokens. Infinite where it cannot run."""
    resources = prefill_resources(launch, shape.head_dim, shape.page_size, rates.capability)
    num_resident, spilling = _num_resident(rates, resources, 32 * launch.num_warps)
    if num_resident == 0:
        return float("inf")
    m, n, dim = launch.block_m, launch.block_n, shape.head_dim
    items = -(-tokens // m)
    before = context - tokens
    # Every item reads what came before and, of its own chunk, half on average.
    num_tiles = sum(-(-(before + min((i + 1) * m, tokens)) // n) for i in range(items)) * shape.num_heads * num_prompts
    per_cycle = rates.matmul_rate / (rates.num_multiprocessors * rates.clock_hertz)
    product = max(4 * m * n * dim / per_cycle, _operand_cycles(rates, launch, dim))
    softmax = m * n * (1 / _EXP_PER_CYCLE + _SOFTMAX_OPERATIONS / _FLOAT_PER_CYCLE) + m * dim / _FLOAT_PER_CYCLE
    # One block's weights are made while another's products run, and a group's with roles for warps while another group's do.
    num_apart = num_resident * (m // 64 if launch.num_warps > MAX_PLAIN_WARPS else 1)
    issue = spilling * (product + softmax - min(product, softmax) * (1 - 1 / num_apart))
    chain = _MMA_CYCLES * (dim / 16 + n / 16) + _softmax_cycles(launch.num_warps)
    longest = -(-context // n)
    seconds = max(
        num_tiles * issue / (rates.num_multiprocessors * rates.clock_hertz),
        longest * max(issue, chain) / rates.clock_hertz,
        num_tiles * 4 * n * dim / max(rates.l2_bandwidth, rates.read_bandwidth),
    )
    moved = num_prompts * (2 * tokens * shape.num_heads * dim * 2 + 4 * context * shape.num_kv_heads * dim)
    return rates.phase_seconds + 2 * rates.latency_seconds + max(seconds, moved / rates.read_bandwidth)


def _operand_cycles(rates: Rates, launch: PrefillLaunch, dim: int) -> float:
    """Reading a tile's operands from shared memory: on compute capability 9 and 10 q, K and V once a tile, elsewhere K and V
    once for every 16 rows.
    """
    m, n = launch.block_m, launch.block_n
    if rates.capability[0] in (9, 10) and m >= 64:
        return 2 * dim * (m + 2 * n) / _SHARED_PER_CYCLE
    return 4 * dim * n * (m / _ROWS) / _SHARED_PER_CYCLE


def _decode_programs(shape: AttentionShape, launch: DecodeLaunch, count: int, num_tiles: int) -> _Programs:
    n, dim = launch.block_n, shape.head_dim
    return _Programs(
        count=count,
        num_tiles=num_tiles,
        tile_bytes=4 * n * dim,
        tile_cycles=_MMA_CYCLES * (dim / 16 + n / 16) + _softmax_cycles(launch.num_warps),
        issue_cycles=_ROWS * n * (1 / _EXP_PER_CYCLE + _SOFTMAX_OPERATIONS / _FLOAT_PER_CYCLE),
        resources=decode_resources(launch, shape.group, dim, shape.page_size),
        num_threads=32 * launch.num_warps,
    )


def _softmax_cycles(num_warps: int) -> float:
    """Two reductions over a row (in a warp, then across warps where there are several), and the weights to shared memory."""
    across = 3 * _SHARED_CYCLES if num_warps > 1 else 0
    return 2 * (2 * _SHUFFLE_CYCLES + across) + 4 * _SHARED_CYCLES


def _num_resident(rates: Rates, used: Resources, num_threads: int) -> tuple[int, float]:
    """Blocks on a multiprocessor, and by how much one gets longer whose values do not fit in its registers."""
    registers = min(used.num_registers, MAX_NUM_REGISTERS)
    return rates.num_resident(used.shared_bytes, num_threads, registers), used.num_registers / registers


def _waves_seconds(rates: Rates, programs: _Programs) -> float:
    used = programs.resources
    num_resident, spilling = _num_resident(rates, used, programs.num_threads)
    if num_resident == 0:
        return float("inf")
    slots = num_resident * rates.num_multiprocessors
    full, rest = divmod(programs.count, slots)
    loops = full * _loop_seconds(rates, programs, slots) + (_loop_seconds(rates, programs, rest) if rest else 0.0)
    # Length, table and first tile before the loop, the last tile's products after it: later waves hide theirs.
    return spilling * (2 * rates.latency_seconds + loops + _tile_seconds(rates, programs, min(programs.count, slots)))


def _loop_seconds(rates: Rates, programs: _Programs, count: int) -> float:
    """The tiles of `count` programs that run at once."""
    under_way = count * programs.resources.num_tiles * programs.tile_bytes
    bandwidth = min(
        rates.read_bandwidth,
        under_way / (_LOOP_LATENCIES * rates.latency_seconds),
        min(count, rates.num_multiprocessors) * rates.multiprocessor_bandwidth,
    )
    load = count * programs.tile_bytes / bandwidth
    compute = _tile_seconds(rates, programs, count)
    # With one tile under way a program waits for its loads; others on the multiprocessor fill the gap.
    hidden = programs.resources.num_tiles > 1 or count > rates.num_multiprocessors
    return programs.num_tiles * (max(load, compute) if hidden else load + compute)


def _tile_seconds(rates: Rates, programs: _Programs, count: int) -> float:
    """Products and weights of one tile, with the pipes shared among the programs of the fullest multiprocessor."""
    share = -(-count // rates.num_multiprocessors)
    return max(programs.tile_cycles, share * programs.issue_cycles) / rates.clock_hertz
