"""Checks of a plan before it is loaded and of a step before it computes: a wrong index must not reach another's cache. Torch-free."""

from __future__ import annotations

import numpy as np

from dragoman_agent.device.base import DeviceError, Int32Array, StepBatch
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import Plan

_INT32 = np.dtype(np.int32)
_ONE = np.int32(1)


def check_loadable(kind: str, plan: Plan, *, loaded: bool, closed: bool) -> None:
    """Whether a device of `kind` may load by `plan`. Raises DeviceError."""
    if closed:
        raise DeviceError("This device is closed; open another one.")
    if loaded:
        raise DeviceError("A model is already loaded on this device; open another device for another model.")
    if plan.device_kind != kind:
        raise DeviceError(
            f"The plan is one for a {plan.device_kind} device, this is a {kind} device; plan again for it."
        )


def check_batch(batch: StepBatch, config: ModelConfig, plan: Plan, num_previous: int = 0) -> None:
    """Raises ValueError naming the array and index when the batch does not fit the model, the plan or itself.

    `num_previous` rows of the step before can be referred to.
    """
    if _is_sound_decode(batch, config, plan, num_previous):
        return
    num_tokens, num_seqs = len(batch.token_ids), len(batch.context_lens)
    if not 1 <= num_tokens <= plan.max_batch_tokens:
        raise ValueError(f"a step takes 1 to {plan.max_batch_tokens} tokens, token_ids has {num_tokens}")
    if num_seqs > plan.max_num_seqs:
        raise ValueError(f"a step takes at most {plan.max_num_seqs} sequences, context_lens has {num_seqs}")
    lengths = {
        "positions": (len(batch.positions), num_tokens),
        "slot_mapping": (len(batch.slot_mapping), num_tokens),
        "query_starts": (len(batch.query_starts), num_seqs + 1),
        "block_tables": (len(batch.block_tables), num_seqs),
    }
    for name, (length, expected) in lengths.items():
        if length != expected:
            raise ValueError(f"{name} has {length} rows; {num_tokens} tokens of {num_seqs} sequences need {expected}")
    num_queries = np.diff(batch.query_starts)
    if batch.query_starts[0] != 0 or batch.query_starts[-1] != num_tokens or (num_queries < 1).any():
        raise ValueError("query_starts must rise from 0 to the number of tokens")
    limit = min(plan.max_context_tokens, batch.block_tables.shape[1] * plan.page_size)
    _in_range("token_ids", batch.token_ids, -num_previous, config.vocab_size)
    _in_range("positions", batch.positions, 0, plan.max_context_tokens)
    _in_range("slot_mapping", batch.slot_mapping, plan.page_size, plan.num_blocks * plan.page_size)
    _in_range("context_lens", batch.context_lens, 1, limit + 1)
    _in_range("sample_seqs", batch.sample_seqs, 0, num_seqs)
    _in_range("pool_seqs", batch.pool_seqs, 0, num_seqs)
    _in_range("score_rows", batch.score_rows, 0, num_tokens)
    _in_range("score_targets", batch.score_targets, 0, config.vocab_size)
    short = np.flatnonzero(num_queries > batch.context_lens)
    if len(short):
        raise ValueError(f"context_lens[{short[0]}] is shorter than the sequence's query tokens")
    used = -(-batch.context_lens // plan.page_size)
    tables = batch.block_tables[:, : int(used.max())]
    is_used = np.arange(tables.shape[1]) < used[:, None]
    wrong = np.argwhere(((tables < 1) | (tables >= plan.num_blocks)) & is_used)
    if len(wrong):
        i, at = wrong[0].tolist()
        raise ValueError(f"block_tables[{i}][{at}] is {tables[i, at]}; 1 to {plan.num_blocks - 1} are possible")
    _check_places(batch, plan.page_size, num_queries)


def _is_sound_decode(batch: StepBatch, config: ModelConfig, plan: Plan, num_previous: int) -> bool:
    """Whether a step is one of decode alone, a token a sequence, in which `check_batch` would find no fault.

    The road of nearly every step, so it may not cost what naming a fault does: bytes are compared, and what is negative is
    seen as too large. It may say no to a sound step.
    """
    token_ids, positions, tables = batch.token_ids, batch.positions, batch.block_tables
    page_size, num_seqs = plan.page_size, len(positions)
    if not 1 <= num_seqs <= min(plan.max_batch_tokens, plan.max_num_seqs) or plan.num_blocks * page_size > 1 << 31:
        return False
    if (
        not len(token_ids) == len(tables) == num_seqs
        or not token_ids.dtype == positions.dtype == tables.dtype == _INT32
    ):
        return False
    if len(batch.pool_seqs) + len(batch.score_rows) + len(batch.score_targets):
        return False
    rows = np.arange(num_seqs + 1, dtype=_INT32)
    rising = rows.tobytes()
    if batch.query_starts.tobytes() != rising or not rising.startswith(batch.sample_seqs.tobytes()):
        return False
    if (positions + _ONE).tobytes() != batch.context_lens.tobytes():
        return False
    if _greatest(positions) >= min(plan.max_context_tokens, tables.shape[1] * page_size):
        return False
    if _greatest(token_ids + np.int32(num_previous)) >= config.vocab_size + num_previous:
        return False
    pages = positions // np.int32(page_size)
    width = tables.shape[1]
    blocks = tables.reshape(-1).take(pages + np.arange(0, num_seqs * width, width, dtype=_INT32))
    if ((blocks - pages) * np.int32(page_size) + positions).tobytes() != batch.slot_mapping.tobytes():
        return False
    # Where the block of the last page is one, and no block comes behind a place without one, those before it are blocks too.
    is_block = (tables - _ONE).view(np.uint32) < np.uint32(plan.num_blocks - 1)
    if np.count_nonzero(is_block[:, :-1] < is_block[:, 1:]):
        return False
    blocks.sort()
    return bool(blocks[0] > 0 and blocks[-1] < plan.num_blocks) and not np.count_nonzero(blocks[1:] == blocks[:-1])


def _greatest(values: Int32Array) -> int:
    """Of some int32; a negative one counts as 2**31 or more."""
    unsigned = values.view(np.uint32)
    return int(unsigned[unsigned.argmax()])


def _check_places(batch: StepBatch, page_size: int, num_queries: Int32Array) -> None:
    """Tokens stand at the end of their contexts, are written where the block tables say, and no block has two writers."""
    first = batch.context_lens - num_queries
    sequences = np.arange(len(first))
    owners = np.repeat(sequences, num_queries)
    positions = first[owners] + np.arange(len(owners)) - batch.query_starts[owners]
    _equal("positions", batch.positions, positions, "its place at the end of its context")
    pages = positions // page_size
    slots = batch.block_tables[owners, pages] * page_size + positions % page_size
    _equal("slot_mapping", batch.slot_mapping, slots, "what the block table says")
    first_pages = first // page_size
    num_pages = (batch.context_lens - 1) // page_size - first_pages + 1
    writers = np.repeat(sequences, num_pages)
    nth = np.arange(len(writers)) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    blocks = batch.block_tables[writers, first_pages[writers] + nth]
    order = np.argsort(blocks, kind="stable")
    twice = np.flatnonzero(np.diff(blocks[order]) == 0)
    if len(twice):
        one, other = writers[order[twice[0]]], writers[order[twice[0] + 1]]
        raise ValueError(f"block_tables[{one}] and block_tables[{other}] both write block {blocks[order[twice[0]]]}")


def _equal(name: str, values: Int32Array, expected: Int32Array, what: str) -> None:
    wrong = np.flatnonzero(values != expected)
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"{name}[{at}] is {values[at]}; {what} is {expected[at]}")


def resolve_tokens(token_ids: Int32Array, previous: Int32Array) -> Int32Array:
    """`token_ids` with references to the step before replaced by what it sampled. A failed row's id is made a valid one.

    Raises ValueError for a row that the step before did not have.
    """
    coming = np.flatnonzero(token_ids < 0)
    if not len(coming):
        return token_ids
    rows = -1 - token_ids[coming]
    if rows.max() >= len(previous):
        at = int(coming[rows.argmax()])
        raise ValueError(
            f"token_ids[{at}] is {token_ids[at]}, row {rows.max()} of the step before; it sampled {len(previous)}"
        )
    resolved = token_ids.copy()
    resolved[coming] = np.maximum(previous[rows], 0)
    return resolved


def _in_range(name: str, values: Int32Array, low: int, high: int) -> None:
    wrong = np.flatnonzero((values < low) | (values >= high))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"{name}[{at}] is {values[at]}; {low} to {high - 1} are possible")
