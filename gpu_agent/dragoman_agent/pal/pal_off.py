"""`--pal off`: the one fixed configuration for all cards, the baseline of every ablation. Changed only with a note here.

Page 16, 4 warps (128 threads), the split rule of FlashAttention-3, chunk 2,048, a graph for 1, 2, 4, 8 and every 8 to 256,
library matrix products as they come, no dependent launch.
"""

from __future__ import annotations

from dragoman_agent.pal.plan import DecodeAttention, PrefillAttention

PAGE_SIZE = 16
NUM_WARPS = 4
MAX_BATCH_TOKENS = 2048
MAX_NUM_SEQS = 256
MIN_GEMM_ROWS = 1
GRAPH_BATCH_SIZES = (1, 2, 4, *range(8, 257, 8))
TILE_KEYS = 64
PREFILL_ATTENTION = PrefillAttention("paged", 64, TILE_KEYS, NUM_WARPS, 3)
KV_SHARE = 0.8  # of what weights leave of the free memory: a fixed share in place of a budget

_TILE_TOKENS = 128  # keys of a block in the rule below, as FlashAttention-3 counts them at head size 128
_CONTEXT_TOKENS = 1024  # the context that a rule without lengths is asked for
_MAX_NUM_SPLITS = 128
_STAGES = 3


def decode_attention(num_kv_heads: int, num_multiprocessors: int) -> tuple[DecodeAttention, ...]:
    """A bucket for each graph. Splits are rounded down to the power of two that the kernel takes."""
    return tuple(
        DecodeAttention(batch, _power_of_two(_num_splits(batch * num_kv_heads, num_multiprocessors)), TILE_KEYS, NUM_WARPS, _STAGES)
        for batch in GRAPH_BATCH_SIZES
    )  # fmt: skip


def _num_splits(num_blocks: int, num_multiprocessors: int) -> int:
    """FlashAttention-3's rule (performance.md 6.2): none where blocks fill 0.8 of the multiprocessors or the context is
    at most 4 tiles; else the fewest splits with at least 85 % of the best wave efficiency.
    """
    if num_blocks >= 0.8 * num_multiprocessors or -(-_CONTEXT_TOKENS // _TILE_TOKENS) <= 4:
        return 1
    most = min(_MAX_NUM_SPLITS, num_multiprocessors, -(-_CONTEXT_TOKENS // _TILE_TOKENS))

    def efficiency(splits: int) -> float:
        waves = num_blocks * splits / num_multiprocessors
        return waves / -(-num_blocks * splits // num_multiprocessors)

    best = max(efficiency(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if efficiency(splits) >= 0.85 * best)


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)
