"""What a deterministic plan runs a GPU's products and attention with: one tile each, whatever the step. Pure.

How many programs share a context is free, since each part of a context is summed apart and parts are folded in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import DECODE_BATCHES, FIXED_GEMM_ROWS
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import PlanError, profile_inputs
from dragoman_agent.pal.plan import DecodeAttention, GemmFixed, PrefillAttention
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import Rates, rates_of
from dragoman_agent.pal.step_cost import fixed_gemm_call
from dragoman_kernels.triton.launches import (
    DECODE_SPLITS,
    FIXED_PART_TOKENS,
    FIXED_ROWS,
    PrefillLaunch,
    fixed_attention_launches,
    fixed_gemm_launches,
)

# (up to how many rows, judged at): streams and small batches, large batches, chunks.
_ROWS = ((64, (1, 32)), (512, (256,)), (0, (2048,)))
_PROGRAMS = 2  # of attention, a multiprocessor, that hide one another's waits
_MAX_SHARED_BYTES = 256 << 20  # of memory for parts that several programs have summed
_REASON = "deterministic: a token's bits must not depend on the batch, the chunk or the graph"


def choose_fixed_gemm(
    times: KernelTimes, profile: Profile, model: ModelConfig, off: str | None = None
) -> tuple[tuple[GemmFixed, ...], Decision]:
    """Tiles for every matrix by number of rows; one for any number with `off`. Raises PlanError where none fits the device.

    Tiles may differ by rows because all of a matrix give equal bits, which the device checks when it loads.
    """
    rates = times.rates
    launches = fixed_gemm_launches(rates.shared_per_block)
    if not launches:
        raise PlanError(
            f"no tile of the deterministic product fits the profile {profile.name}: a block may use "
            f"{rates.shared_per_block} bytes of shared memory (memory.shared_per_block); leave --deterministic out"
        )
    matrices = tuple(dict.fromkeys((*step_cost.matrices(model), (model.vocab_size, model.hidden_size))))
    buckets = _ROWS if off is None else ((0, tuple(rows for _, judged in _ROWS for rows in judged)),)
    chosen: list[GemmFixed] = []
    seconds: dict[int, float] = {}
    for n, k in matrices:
        for max_rows, judged in buckets:
            costs = {tile: [times.seconds(fixed_gemm_call(rows, n, k, tile)) for rows in judged] for tile in launches}
            least = [min(column) for column in zip(*costs.values(), strict=True)]
            best = min(launches, key=lambda tile: sum(a / b for a, b in zip(costs[tile], least, strict=True)))
            made = GemmFixed(n, k, max_rows, **asdict(best))
            if chosen and replace(chosen[-1], max_rows=max_rows) == made:
                chosen.pop()
            chosen.append(made)
            for rows, cost in zip(judged, costs[best], strict=True):
                seconds[rows] = seconds.get(rows, 0.0) + cost
    words = ", ".join(
        f"{one.n}x{one.k}{f' to {one.max_rows} rows' if one.max_rows else ''}: m{one.block_m}-n{one.block_n}-k{one.block_k}"
        for one in chosen
    )
    timed = all(
        times.measured(fixed_gemm_call(rows, n, k, tile)) is not None
        for rows in FIXED_GEMM_ROWS
        for n, k in matrices
        for tile in launches
    )
    how = "measured on the device" if timed else "predicted from bytes under way, tile and matrix rate"
    each = ", ".join(f"{1e6 * cost:.0f} us at {rows} rows" for rows, cost in seconds.items())
    reason = f"{_REASON}, so the library is not asked; one of each matrix takes {each}, {how}"
    reason += f"; one tile for any rows: {off}" if off else "; tiles of one matrix give equal bits, checked at load"
    inputs = profile_inputs(
        profile, "memory.read_bandwidth", "compute.matmul_bfloat16", "memory.shared_per_block", "memory.l2_bandwidth"
    )
    return tuple(chosen), Decision("gemm-decode", words, reason, inputs, (), seconds[1], unit="s")


def choose_fixed_attention(
    profile: Profile, model: ModelConfig, page_size: int, max_num_seqs: int, context: int
) -> tuple[tuple[DecodeAttention, ...], PrefillAttention, Decision]:
    """(programs by decode batch, the one tile, why). Raises PlanError where none fits."""
    rates = rates_of(profile)
    group = model.num_heads // model.num_kv_heads
    launches = fixed_attention_launches(model.head_dim, page_size, rates.capability, rates.shared_per_block)
    if not launches or group > FIXED_ROWS:
        raise PlanError(
            f"deterministic attention cannot run {model.name} on the profile {profile.name}: {group} heads share a KV head "
            f"({FIXED_ROWS} at most), and a block may use {rates.shared_per_block} bytes of shared memory "
            "(memory.shared_per_block); leave --deterministic out"
        )
    launch = launches[0]
    buckets = [
        DecodeAttention(
            batch, _num_programs(rates, model, batch, context), launch.block_n, launch.num_warps, launch.num_stages
        )
        for batch in DECODE_BATCHES
        if batch < 2 * max_num_seqs
    ]
    words = f"parts of {FIXED_PART_TOKENS} tokens, m{launch.block_m}-n{launch.block_n}-w{launch.num_warps}-g{launch.num_stages}"
    reason = (
        f"{_REASON}: prompts and decode run one kernel; parts are summed apart and folded in order, so how many programs "
        "share a context changes no bit"
    )
    candidates = tuple(
        Candidate(_word(one), None, "" if one == launch else "fewer bytes under way") for one in launches
    )
    inputs = profile_inputs(profile, "compute.multiprocessors", "memory.shared_per_block")
    return (
        tuple(buckets),
        PrefillAttention("fixed", **asdict(launch)),
        Decision("prefill-attention", words, reason, inputs, candidates),
    )


def fixed_parts_bytes(model: ModelConfig, buckets: Sequence[DecodeAttention], num_seqs: int, context: int) -> int:
    """Memory of the parts that several programs of a decode step have summed."""
    shared = max((min(one.max_batch, num_seqs) for one in buckets if one.num_splits > 1), default=0)
    return shared * _parts_bytes(model, context)


def _parts_bytes(model: ModelConfig, context: int) -> int:
    """Of one sequence."""
    return -(-context // FIXED_PART_TOKENS) * 4 * model.num_heads * (model.head_dim + 2)


def _num_programs(rates: Rates, model: ModelConfig, batch: int, context: int) -> int:
    """Programs that share one context: as many as keep the device busy, where memory has room for their parts."""
    if batch * _parts_bytes(model, context) > _MAX_SHARED_BYTES:
        return 1
    wanted = _PROGRAMS * rates.num_multiprocessors // (batch * model.num_kv_heads)
    most = -(-context // FIXED_PART_TOKENS)
    return max((count for count in DECODE_SPLITS if count <= min(wanted, most)), default=1)


def _word(launch: PrefillLaunch) -> str:
    return f"m{launch.block_m}-n{launch.block_n}-w{launch.num_warps}-g{launch.num_stages}"
