"""Checks of a plan before it is loaded and of a step before it computes: a wrong index must not reach another's cache. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dragoman_agent.device.base import DeviceError, Int32Array, StepBatch
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import Plan

_INT32 = np.dtype(np.int32)
_ONE = np.int32(1)


class SoundDecode(NamedTuple):
    """A decode step in which no fault was found, for the check of one that goes on from it. Nobody writes to its arrays."""

    token_ids: Int32Array
    slot_mapping: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    sample_seqs: Int32Array
    pages: Int32Array  # [num_seqs] that the step writes to, in each sequence's table
    blocks: Int32Array  # [num_seqs] there
    longest: int  # of `context_lens`
    num_previous: int


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


def check_batch(
    batch: StepBatch, config: ModelConfig, plan: Plan, num_previous: int = 0, last: SoundDecode | None = None
) -> SoundDecode | None:
    """Raises ValueError naming the array and index when the batch does not fit the model, the plan or itself.

    `num_previous` rows of the step before can be referred to. `last` is what an earlier call for the same model and plan returned:
    arrays that it has are not looked at again. Returns what the next call may have.
    """
    sound = _go_on(batch, config, plan, num_previous, last) if last is not None else None
    sound = sound or _sound_decode(batch, config, plan, num_previous)
    if sound is None:
        _check_any(batch, config, plan, num_previous)
    return sound


def _check_any(batch: StepBatch, config: ModelConfig, plan: Plan, num_previous: int) -> None:
    """As `check_batch`, of any step."""
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


def _go_on(
    batch: StepBatch, config: ModelConfig, plan: Plan, num_previous: int, last: SoundDecode
) -> SoundDecode | None:
    """A decode step of the sequences of `last`, a token further each, in which `check_batch` would find no fault; None where it
    is another step or has one. Only what changed is looked at: of tables that got blocks, that nothing else did.
    """
    positions, context_lens, tables = last.context_lens, batch.context_lens, batch.block_tables
    page_size, longest = plan.page_size, last.longest + 1
    if (
        batch.positions is not positions
        or batch.query_starts is not last.query_starts
        or batch.sample_seqs is not last.sample_seqs
        or not batch.slot_mapping.dtype == context_lens.dtype == tables.dtype == _INT32
        or not batch.slot_mapping.shape == context_lens.shape == positions.shape
        or tables.shape != last.block_tables.shape
        or longest > min(plan.max_context_tokens, tables.shape[1] * page_size)
        or len(batch.pool_seqs) + len(batch.score_rows) + len(batch.score_targets)
        or (positions + _ONE).tobytes() != context_lens.tobytes()
    ):
        return None
    is_known = batch.token_ids is last.token_ids and num_previous >= last.num_previous
    if not is_known and not _are_tokens(batch.token_ids, len(positions), config, num_previous):
        return None
    pages, blocks = positions // np.int32(page_size), last.blocks
    slots = last.slot_mapping + _ONE
    (new,) = (pages != last.pages).nonzero()
    at = new * tables.shape[1] + pages[new]  # where the tables have the blocks of pages that the step begins
    if len(new):
        begun = tables.reshape(-1).take(at)
        blocks = blocks.copy()
        blocks[new] = begun
        if not _are_apart(blocks, plan):
            return None
        slots[new] = begun * np.int32(page_size)
    if slots.tobytes() != batch.slot_mapping.tobytes():
        return None
    if tables is not last.block_tables:
        changed = tables != last.block_tables
        if np.count_nonzero(changed) != np.count_nonzero(changed.reshape(-1).take(at)):
            return None
    return SoundDecode(
        batch.token_ids, batch.slot_mapping, last.query_starts, context_lens, tables, last.sample_seqs, pages, blocks, longest,
        num_previous,
    )  # fmt: skip


def _sound_decode(batch: StepBatch, config: ModelConfig, plan: Plan, num_previous: int) -> SoundDecode | None:
    """A step of decode alone, a token a sequence, in which `check_batch` would find no fault; None may be a sound step too.

    The road of nearly every step that does not go on from another, so it may not cost what naming a fault does: bytes are
    compared, and what is negative is seen as too large.
    """
    positions, context_lens, tables = batch.positions, batch.context_lens, batch.block_tables
    page_size, num_seqs = plan.page_size, len(positions)
    if not 1 <= num_seqs <= min(plan.max_batch_tokens, plan.max_num_seqs) or plan.num_blocks * page_size > 1 << 31:
        return None
    if (
        not batch.slot_mapping.dtype == positions.dtype == context_lens.dtype == tables.dtype == _INT32
        or not batch.slot_mapping.shape == positions.shape == context_lens.shape == (num_seqs,)
        or len(tables) != num_seqs
        or not batch.query_starts.dtype == batch.sample_seqs.dtype == _INT32
    ):
        return None
    if len(batch.pool_seqs) + len(batch.score_rows) + len(batch.score_targets):
        return None
    rows = np.arange(num_seqs + 1, dtype=_INT32)
    rising = rows.tobytes()
    if batch.query_starts.tobytes() != rising or not rising.startswith(batch.sample_seqs.tobytes()):
        return None
    if (positions + _ONE).tobytes() != context_lens.tobytes():
        return None
    longest = _greatest(positions) + 1
    if longest > min(plan.max_context_tokens, tables.shape[1] * page_size):
        return None
    if not _are_tokens(batch.token_ids, num_seqs, config, num_previous):
        return None
    pages = positions // np.int32(page_size)
    width = tables.shape[1]
    blocks = tables.reshape(-1).take(pages + np.arange(0, num_seqs * width, width, dtype=_INT32))
    if ((blocks - pages) * np.int32(page_size) + positions).tobytes() != batch.slot_mapping.tobytes():
        return None
    # Where the block of the last page is one, and no block comes behind a place without one, those before it are blocks too.
    is_block = (tables - _ONE).view(np.uint32) < np.uint32(plan.num_blocks - 1)
    if np.count_nonzero(is_block[:, :-1] < is_block[:, 1:]) or not _are_apart(blocks, plan):
        return None
    return SoundDecode(
        batch.token_ids, batch.slot_mapping, batch.query_starts, context_lens, tables, batch.sample_seqs, pages, blocks, longest,
        num_previous,
    )  # fmt: skip


def _are_tokens(token_ids: Int32Array, num_seqs: int, config: ModelConfig, num_previous: int) -> bool:
    """Whether they are one of the vocabulary, or of `num_previous` rows, for each sequence."""
    if token_ids.dtype != _INT32 or token_ids.shape != (num_seqs,):
        return False
    return _greatest(token_ids + np.int32(num_previous)) < config.vocab_size + num_previous


def _are_apart(blocks: Int32Array, plan: Plan) -> bool:
    """Whether they are blocks that sequences may have, none of them twice."""
    rising = blocks.copy()
    rising.sort()
    return bool(rising[0] > 0 and rising[-1] < plan.num_blocks) and not np.count_nonzero(rising[1:] == rising[:-1])


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
