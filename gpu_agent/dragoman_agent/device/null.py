"""The null device: computes nothing and keeps every contract. Its answers come from an arena it writes and reads by slots.

Each KV slot holds the token and a polynomial hash (mod 2**64) of the whole prefix up to it. A step writes by slot mapping and
reads by block table, so an error in paging, slots or preemption changes the output, as it would on a real device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dragoman_agent.device.base import (
    BlockFormat,
    DeviceError,
    Float32Array,
    Int32Array,
    LoadProgress,
    ProgressFn,
    SamplingBatch,
    StepBatch,
    StepResult,
    UInt8Array,
)
from dragoman_agent.device.block_copies import DoneCopy, new_rows
from dragoman_agent.device.checks import check_batch, check_loadable, resolve_tokens
from dragoman_agent.device.oracles import Context, Oracle, UInt64Array, logprobs, make_oracle, mix, narrow, seeded

if TYPE_CHECKING:
    from dragoman_agent.model.config import ModelConfig
    from dragoman_agent.model.source import ModelSource
    from dragoman_agent.pal.plan import Plan

_FACTOR = 0xD1342543DE82EF95  # odd, so that it has an inverse mod 2**64
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_START = np.uint64(0x5DEECE66D1CE4E5B)
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class NullStepHandle:
    """A step that is done at a given time."""

    _result: StepResult | None
    _due: float
    _draw: Callable[[SamplingBatch], StepResult]

    def supply(self, sampling: SamplingBatch) -> None:
        """See LateStep."""
        self._result = self._draw(sampling)

    def result(self) -> StepResult:
        """See StepHandle: wait until the step is due."""
        if self._result is None:
            raise DeviceError("The sampling of this step has not been supplied.")
        remaining = self._due - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return self._result

    def ended(self) -> float:
        """See TimedStep."""
        return self._due


class NullDevice:
    """Implements Device without torch."""

    kind = "null"
    computes_in_submit = True
    samples_late = True

    def __init__(self, oracle: str = "hash", speed: float = 0.0) -> None:
        """`oracle`: hash, echo, alphabet or script:FILE. `speed` times the plan's step model is how long steps take."""
        self._oracle_name = oracle
        self._speed = speed
        self._due = 0.0
        self._previous: Int32Array | None = np.zeros(0, dtype=np.int32)  # None while its step waits for its sampling
        self._plan: Plan | None = None
        self._closed = False

    def load(self, model: ModelSource, plan: Plan, progress: ProgressFn) -> None:
        """See Device."""
        check_loadable(self.kind, plan, loaded=self._plan is not None, closed=self._closed)
        self._config: ModelConfig = model.config
        end_token_id = model.config.eos_token_ids[0] if model.config.eos_token_ids else 0
        self._oracle: Oracle = make_oracle(self._oracle_name, model.config.vocab_size, end_token_id)
        self._page_size = plan.page_size
        num_slots = plan.num_blocks * plan.page_size
        self._states = np.zeros(num_slots, dtype=np.uint64)
        self._tokens = np.zeros(num_slots, dtype=np.int32)
        self._powers = _powers(_FACTOR, plan.max_batch_tokens + 1)
        self._inverses = _powers(_INVERSE, plan.max_batch_tokens + 1)
        self._plan = plan
        progress(LoadProgress("kv", plan.num_blocks, plan.num_blocks, "steps"))

    def submit(self, batch: StepBatch) -> NullStepHandle:
        """See Device. A batch that does not fit itself or the plan raises DeviceError."""
        plan = self._loaded_plan()
        begun = time.perf_counter()
        if self._previous is None:
            raise DeviceError(f"Step {batch.step} was submitted before the sampling of the step before was supplied.")
        try:
            check_batch(batch, self._config, plan, len(self._previous))
        except ValueError as error:
            raise DeviceError(f"Step {batch.step} failed on the null device: {error}") from error
        batch = replace(batch, token_ids=resolve_tokens(batch.token_ids, self._previous))
        self._write(batch, plan.page_size)
        seconds = self._speed * _step_seconds(batch, plan)

        def draw(sampling: SamplingBatch) -> StepResult:
            result = self._answer(batch, sampling, plan.page_size)
            self._previous = result.token_ids
            result.seconds = seconds or time.perf_counter() - begun
            return result

        result = None
        if batch.sampling_follows:
            self._previous = None
        else:
            result = draw(batch.sampling)
        self._due = max(self._due, begun) + seconds if seconds else time.perf_counter()
        return NullStepHandle(result, self._due, draw)

    @property
    def block_format(self) -> BlockFormat:
        """See BlockDevice. A slot is a state of 8 bytes and a token of 4."""
        self._loaded_plan()
        return BlockFormat("null", "states, tokens", self._page_size * (self._states.itemsize + self._tokens.itemsize))

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        """See BlockDevice. Steps are computed as they are submitted, so all are done."""
        self._loaded_plan()
        states = self._states.reshape(-1, self._page_size)[blocks].view(np.uint8)
        tokens = self._tokens.reshape(-1, self._page_size)[blocks].view(np.uint8)
        return np.concatenate((states, tokens), axis=1)

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        """See BlockDevice."""
        if data.shape != (len(blocks), self.block_format.block_bytes):
            raise DeviceError(
                f"Blocks of shape {data.shape} do not fit blocks of {self.block_format.block_bytes} bytes."
            )
        split = self._page_size * self._states.itemsize
        self._states.reshape(-1, self._page_size)[blocks] = np.ascontiguousarray(data[:, :split]).view(np.uint64)
        self._tokens.reshape(-1, self._page_size)[blocks] = np.ascontiguousarray(data[:, split:]).view(np.int32)

    @property
    def max_num_copied_blocks(self) -> int:
        """See BlockDevice."""
        return self._loaded_plan().num_blocks

    def new_rows(self, num_blocks: int) -> UInt8Array:
        """See BlockDevice."""
        return new_rows(num_blocks, self.block_format.block_bytes)

    def copy_out(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> DoneCopy:
        """See BlockDevice."""
        begun = time.perf_counter()
        for row, data in zip(rows, self.read_blocks(blocks), strict=True):
            row[:] = data
        return DoneCopy(time.perf_counter() - begun)

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> DoneCopy:
        """See BlockDevice."""
        begun = time.perf_counter()
        self.write_blocks(blocks, np.stack(rows))
        return DoneCopy(time.perf_counter() - begun)

    def close(self) -> None:
        """See Device."""
        self._plan, self._closed = None, True

    def _loaded_plan(self) -> Plan:
        if self._plan is None:
            raise DeviceError("No model is loaded on this device; load one first.")
        return self._plan

    def _write(self, batch: StepBatch, page_size: int) -> None:
        """Hash on from what the block tables say is before each sequence's tokens, and write by slot mapping.

        With x_j the stirred token and S_(-1) the hash before, S_j = S_(j-1) * f + x_j. All j at once:
        S_j = f**(j+1) * (S_(-1) + sum over i <= j of x_i * f**-(i+1)).
        """
        starts = batch.query_starts[:-1]
        counts = np.diff(batch.query_starts)
        first = batch.context_lens - counts
        before = np.where(first > 0, self._states[_slots(batch, np.maximum(first - 1, 0), page_size)], _START)
        if len(batch.token_ids) == len(counts):
            states = before * np.uint64(_FACTOR) + _stir(batch.token_ids)
        else:
            owners = np.repeat(np.arange(len(counts)), counts)
            steps = np.arange(len(batch.token_ids)) - starts[owners] + 1
            sums = np.cumsum(_stir(batch.token_ids) * self._inverses[steps])
            offsets = np.concatenate((np.zeros(1, dtype=np.uint64), sums))[starts]
            states = self._powers[steps] * (before[owners] + sums - offsets[owners])
        self._states[batch.slot_mapping] = states
        self._tokens[batch.slot_mapping] = batch.token_ids

    def _read_states(self, batch: StepBatch, rows: Int32Array, page_size: int) -> UInt64Array:
        """Hash of each row's whole context, spoilt by every seam between two pages that does not fit.

        A seam fits when the first slot of a page continues the hash in the last slot of the page before.
        """
        context_lens = batch.context_lens[rows]
        states = self._states[_slots(batch, batch.context_lens - 1, page_size)][rows]
        num_pages = -(-context_lens // page_size)
        tables = batch.block_tables[rows, : int(num_pages.max())]
        heads = tables * page_size
        previous = np.empty(tables.shape, dtype=np.uint64)
        previous[:, 0] = _START
        previous[:, 1:] = self._states[heads[:, :-1] + page_size - 1]
        gaps = self._states[heads] - previous * np.uint64(_FACTOR) - _stir(self._tokens[heads])
        pages = np.arange(tables.shape[1])
        gaps[pages >= num_pages[:, None]] = 0
        weights = mix(pages.astype(np.uint64) + _ODD) | np.uint64(1)
        spoilt: UInt64Array = states ^ (gaps * weights).sum(axis=1, dtype=np.uint64)
        return spoilt

    def _answer(self, batch: StepBatch, sampling: SamplingBatch, page_size: int) -> StepResult:
        rows = batch.sample_seqs
        result = StepResult(np.zeros(len(rows), dtype=np.int32), np.ones(len(rows), dtype=np.bool_))
        if len(rows):
            states = seeded(self._read_states(batch, rows, page_size), sampling)
            tables = batch.block_tables[rows]

            def read_token(positions: Int32Array) -> Int32Array:
                blocks = tables[np.arange(len(rows)), positions // page_size]
                tokens: Int32Array = self._tokens[blocks * page_size + positions % page_size]
                return tokens

            last_tokens = read_token(batch.context_lens[rows] - 1)
            context = Context(states, last_tokens, batch.prompt_lens[rows], sampling.cursors, read_token)
            result.token_ids = self._oracle(context)
            result.finite[narrow(result.token_ids, states, sampling, self._config.vocab_size)] = False
            most = int(sampling.num_logprobs.max())
            if most >= 0:
                result.logprobs, result.top_ids, result.top_logprobs = logprobs(
                    result.token_ids, states, most, self._config.vocab_size
                )
        if len(batch.score_rows):
            states = self._states[batch.slot_mapping[batch.score_rows]]
            result.score_logprobs, result.score_top_ids, result.score_top_logprobs = logprobs(
                batch.score_targets, states, batch.num_score_logprobs, self._config.vocab_size
            )
        if len(batch.pool_seqs):
            states = self._read_states(batch, batch.pool_seqs, page_size)
            result.embeddings = _embeddings(states, self._config.hidden_size)
        return result


def _powers(factor: int, count: int) -> UInt64Array:
    """factor**0 .. factor**(count - 1), mod 2**64."""
    values = np.full(count, factor, dtype=np.uint64)
    values[0] = 1
    return np.cumprod(values, dtype=np.uint64)


def _stir(token_ids: Int32Array) -> UInt64Array:
    return mix(token_ids.astype(np.uint64) + _ODD)


def _slots(batch: StepBatch, positions: Int32Array, page_size: int) -> Int32Array:
    """KV slot of one position of each sequence, through the block tables."""
    pages, offsets = np.divmod(positions, np.int32(page_size))
    blocks = batch.block_tables[np.arange(len(positions)), pages]
    slots: Int32Array = blocks * np.int32(page_size) + offsets
    return slots


def _step_seconds(batch: StepBatch, plan: Plan) -> float:
    """What the plan's step model predicts: the decode of all sequences of one token, and the prefill of the others."""
    counts = np.diff(batch.query_starts)
    is_decode = counts == 1
    num_decodes = int(is_decode.sum())
    seconds = plan.step_model.prefill_seconds(int(counts[~is_decode].sum()))
    if num_decodes:
        mean_context = float(batch.context_lens[is_decode].mean())
        seconds += plan.step_model.decode_step_seconds(num_decodes, mean_context)
    return seconds


def _embeddings(states: UInt64Array, hidden_size: int) -> Float32Array:
    """Unit vectors [num_pooled, hidden_size], one for each state."""
    lanes = mix(states[:, None] + np.arange(1, hidden_size + 1, dtype=np.uint64) * _ODD)
    values = (lanes >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - np.float32(1.0)
    unit: Float32Array = values / np.linalg.norm(values, axis=1, keepdims=True).astype(np.float32)
    return unit
