"""From a step's plan to the arrays a device takes. What does not change between steps lives in rows and is gathered at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Int32Array, Penalties, SamplingBatch, StepBatch
from dragoman_agent.engine.constraints import banned_ids
from dragoman_agent.engine.grammar import Form, GrammarMasks
from dragoman_agent.engine.messages import Sampling
from dragoman_agent.engine.prompt_scores import score_rows
from dragoman_agent.engine.request import Request, Sequence, has_penalties
from dragoman_agent.engine.step_plan import StepPlan
from dragoman_agent.pal.plan import Plan

_EMPTY = np.zeros(0, dtype=np.int32)
_SEED_MASK = (1 << 64) - 1
_ROW = attrgetter("row")


@dataclass(slots=True)
class BuiltStep:
    """A batch and whose it is: `sampled` and `pooled` in the order of the result's rows."""

    batch: StepBatch
    rows: npt.NDArray[np.intp]  # [num_samples] of the persistent batch
    sampled: list[Sequence]
    pooled: list[Sequence]
    scored: list[tuple[Request, range]]  # prompts and their positions, in the order of the result's scores
    keys: Int32Array  # [num_samples] see Start.key; -1 for none
    watched: npt.NDArray[np.bool_]  # [num_samples] see BatchBuilder.take
    is_serial: bool = False  # the step after it must wait for its tokens


class BatchBuilder:
    """Rows of the running sequences, and the batches made of them.

    A row follows its sequence from the step that starts it: what it has computed and which token comes next is counted here
    for all rows at once.
    """

    def __init__(self, plan: Plan, vocab_size: int, *, samples_late: bool = False) -> None:
        """`vocab_size` is the width of the logits. `samples_late`: the device takes a step's sampling late, see LateStep."""
        self._samples_late = samples_late
        num_rows = plan.max_num_seqs
        max_num_blocks = -(-plan.max_context_tokens // plan.page_size)
        self._page_size = plan.page_size
        self._tables = np.zeros((num_rows, max_num_blocks), dtype=np.int32)
        self._num_blocks = [0] * num_rows  # of each table; 0 beyond them
        self._prompt_lens = np.zeros(num_rows, dtype=np.int32)
        self._temperatures = np.zeros(num_rows, dtype=np.float32)
        self._top_ks = np.zeros(num_rows, dtype=np.int32)
        self._top_ps = np.ones(num_rows, dtype=np.float32)
        self._min_ps = np.zeros(num_rows, dtype=np.float32)
        self._seeds = np.zeros(num_rows, dtype=np.uint64)
        self._choices = np.zeros(num_rows, dtype=np.int32)
        self._num_logprobs = np.full(num_rows, -1, dtype=np.int32)
        self._keys = np.full(num_rows, -1, dtype=np.int32)
        self._num_computed = np.zeros(num_rows, dtype=np.int32)  # tokens, those of the steps under way included
        self._last_tokens = np.zeros(num_rows, dtype=np.int32)  # the newest that the host knows
        self._future_steps = np.zeros(num_rows, dtype=np.int64)  # newest step that samples a token for the row
        self._future_rows = np.zeros(num_rows, dtype=np.int32)  # and its row of that step's result
        self._taken_step = 0
        self._quiet_lens = np.zeros(num_rows, dtype=np.int32)  # computed tokens with which its length is reached
        self._ever_stop = np.zeros(vocab_size, dtype=np.bool_)  # ids that some row has had as a stop
        self._sparse: dict[int, Sequence] = {}  # rows whose sampling has parts that are not one number
        self._is_sparse = np.zeros(num_rows, dtype=np.bool_)
        self._is_serial = np.zeros(num_rows, dtype=np.bool_)
        self._draws_by_text = np.zeros(num_rows, dtype=np.bool_)
        self._masks = GrammarMasks(vocab_size)

    def build(self, plan: StepPlan, step: int) -> BuiltStep:
        """The batch of `plan`: decode sequences first, then prefill chunks."""
        for sequence, _ in plan.prefills:
            self._load_row(sequence)
        for sequence in plan.grown:
            self._grow_row(sequence)
        num_decodes = len(plan.decodes)
        sequences = plan.decodes + [sequence for sequence, _ in plan.prefills]
        rows = np.fromiter(map(_ROW, sequences), dtype=np.intp, count=len(sequences))
        counts = np.ones(len(sequences), dtype=np.int32)
        query_starts = np.arange(len(sequences) + 1, dtype=np.int32)
        if plan.prefills:
            counts[num_decodes:] = [count for _, count in plan.prefills]
            np.cumsum(counts, out=query_starts[1:])
        context_lens = self._num_computed[rows] + counts
        self._num_computed[rows] = context_lens
        tables = self._tables[:, : -(-int(context_lens.max()) // self._page_size)].take(rows, axis=0)
        positions, slot_mapping = self._slots(tables, context_lens, counts, query_starts, num_decodes)
        token_ids = self._token_ids(plan, rows[:num_decodes], query_starts)
        sampled, pooled = self._outputs(plan, num_decodes)
        sampled_rows = rows[sampled] if plan.prefills else rows
        prompt_lens = self._prompt_lens[rows]
        cursors = context_lens - prompt_lens
        if len(sampled) != len(sequences):
            cursors = cursors[sampled]
        batch = StepBatch(
            step=step,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            prompt_lens=prompt_lens,
            sample_seqs=sampled,
            pool_seqs=pooled,
            sampling=self._sampling(sampled_rows, cursors),
        )
        if self._sparse:
            # A row whose last token is under way cannot be told yet what it may sample next.
            coming = self._future_steps[sampled_rows] > self._taken_step
            batch.sampling_follows = bool((self._draws_by_text[sampled_rows] & coming).any())
            if not batch.sampling_follows:
                self._add_sparse(batch.sampling, sampled_rows)
        built = BuiltStep(
            batch=batch,
            rows=sampled_rows,
            sampled=sequences,
            pooled=[],
            scored=[],
            keys=self._keys[sampled_rows],
            watched=self._watched(sampled_rows, context_lens[sampled] if plan.prefills else context_lens),
            is_serial=bool(self._is_serial[rows].any()),
        )
        if plan.prefills:
            built.sampled = [sequences[i] for i in sampled.tolist()]
            built.pooled = [sequences[i] for i in pooled.tolist()]
            built.scored = _add_scores(batch, plan, num_decodes)
        self._future_steps[sampled_rows] = step
        self._future_rows[sampled_rows] = np.arange(len(sampled_rows), dtype=np.int32)
        return built

    def _watched(self, rows: npt.NDArray[np.intp], lens: Int32Array) -> npt.NDArray[np.bool_]:
        """Rows that have to be looked at whatever token comes: the first one, those at the end of a page or of their length,
        and those whose text is made here."""
        watched: npt.NDArray[np.bool_] = lens >= self._quiet_lens[rows]
        watched |= lens % np.int32(self._page_size) == 0
        watched |= self._future_steps[rows] == 0
        return watched

    def take(self, built: BuiltStep, token_ids: Int32Array) -> list[int]:
        """The tokens that a step sampled are known. Call it in the order of the steps.

        Returns the rows to look at: in all others the stream just goes on, as keys tell.
        """
        step = self._taken_step = built.batch.step
        rows = built.rows
        # A row that was given to another sequence meanwhile has its own last token.
        self._last_tokens[rows] = np.where(self._future_steps[rows] >= step, token_ids, self._last_tokens[rows])
        watched: list[int] = np.flatnonzero(built.watched | self._ever_stop[token_ids]).tolist()
        return watched

    def _token_ids(self, plan: StepPlan, rows: npt.NDArray[np.intp], starts: Int32Array) -> Int32Array:
        """Inputs of all sequences, [num_tokens]. `rows` are those in decode."""
        token_ids = np.empty(int(starts[-1]), dtype=np.int32)
        token_ids[: len(rows)] = self._next_tokens(rows)
        for index, (sequence, count) in enumerate(plan.prefills, len(rows)):
            first = sequence.num_computed
            token_ids[starts[index] : starts[index + 1]] = sequence.token_ids[first : first + count]
        return token_ids

    def _next_tokens(self, rows: npt.NDArray[np.intp]) -> Int32Array:
        """Input of each row in decode: its last token, or -1 - r where that is still under way in row r of the last step."""
        under_way = self._future_steps[rows] > self._taken_step
        return np.where(under_way, -1 - self._future_rows[rows], self._last_tokens[rows])

    def _load_row(self, sequence: Sequence) -> None:
        """Write everything a row holds of `sequence`; its blocks may have changed if it was preempted."""
        row = sequence.row
        table = sequence.block_table
        self._tables[row, : len(table)] = table
        self._tables[row, len(table) : self._num_blocks[row]] = 0
        self._num_blocks[row] = len(table)
        self._prompt_lens[row] = sequence.num_prompt
        self._num_computed[row] = sequence.num_computed
        self._last_tokens[row] = sequence.token_ids[-1]
        self._future_steps[row] = 0
        self._quiet_lens[row] = sequence.max_num_tokens - 1 if sequence.key >= 0 else 0
        self._ever_stop[[i for i in sequence.stop_ids if i < len(self._ever_stop)]] = True
        sampling = sequence.request.sampling
        self._temperatures[row] = sampling.temperature
        self._top_ks[row] = sampling.top_k
        self._top_ps[row] = sampling.top_p
        self._min_ps[row] = sampling.min_p
        self._seeds[row] = sampling.seed & _SEED_MASK
        self._choices[row] = sequence.choice
        self._num_logprobs[row] = sampling.num_logprobs
        self._keys[row] = sequence.key
        request = sequence.request
        self._draws_by_text[row] = request.draws_by_text
        self._is_serial[row] = request.is_serial or (request.draws_by_text and not self._samples_late)
        self._is_sparse[row] = is_sparse = _is_sparse(sequence)
        if is_sparse:
            self._sparse[row] = sequence
        else:
            self._sparse.pop(row, None)

    def _grow_row(self, sequence: Sequence) -> None:
        table, row = sequence.block_table, sequence.row
        known = self._num_blocks[row]
        self._tables[row, known : len(table)] = table[known:]
        self._num_blocks[row] = len(table)

    def _slots(
        self, tables: Int32Array, context_lens: Int32Array, counts: Int32Array, starts: Int32Array, num_decodes: int
    ) -> tuple[Int32Array, Int32Array]:
        """Positions and KV slots of all query tokens, each [num_tokens]."""
        first = context_lens - counts
        if num_decodes == len(counts):
            positions = first
            owners = np.arange(num_decodes, dtype=np.int32)
        else:
            owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
            positions = np.arange(int(starts[-1]), dtype=np.int32) - starts[owners] + first[owners]
        pages, offsets = np.divmod(positions, np.int32(self._page_size))
        return positions, tables[owners, pages] * np.int32(self._page_size) + offsets

    def _outputs(self, plan: StepPlan, num_decodes: int) -> tuple[Int32Array, Int32Array]:
        """Indices of the sequences that are sampled, and of those whose hidden state is wanted."""
        if not plan.prefills:
            return np.arange(num_decodes, dtype=np.int32), _EMPTY
        sampled = list(range(num_decodes))
        pooled: list[int] = []
        for index, (sequence, count) in enumerate(plan.prefills, num_decodes):
            if count == sequence.num_uncomputed:
                (pooled if sequence.request.is_embedding else sampled).append(index)
        return np.array(sampled, dtype=np.int32), np.array(pooled, dtype=np.int32) if pooled else _EMPTY

    def late_sampling(self, built: BuiltStep) -> SamplingBatch:
        """The sampling of a step that was submitted without it, now that the tokens before are known."""
        sampling = replace(built.batch.sampling, penalties={}, logit_bias={}, banned={}, allowed={})
        step = built.batch.step
        self._add_sparse(sampling, built.rows, [s.cut_step < step for s in built.sampled])
        return sampling

    def _sampling(self, rows: npt.NDArray[np.intp], cursors: Int32Array) -> SamplingBatch:
        return SamplingBatch(
            temperatures=self._temperatures[rows],
            top_ks=self._top_ks[rows],
            top_ps=self._top_ps[rows],
            min_ps=self._min_ps[rows],
            seeds=self._seeds[rows],
            choices=self._choices[rows],
            cursors=cursors,
            num_logprobs=self._num_logprobs[rows],
        )

    def _add_sparse(self, batch: SamplingBatch, rows: npt.NDArray[np.intp], wanted: list[bool] | None = None) -> None:
        """Add what is not one number a row. Rows that are not `wanted` have lost their sequence: what they draw is dropped."""
        masked: list[int] = []
        forms: list[Form] = []
        for index in np.flatnonzero(self._is_sparse[rows]).tolist():
            if wanted is not None and not wanted[index]:
                continue
            sequence = self._sparse[int(rows[index])]
            sampling = sequence.request.sampling
            if has_penalties(sampling):
                batch.penalties[index] = _penalties(sampling, sequence)
            if sampling.logit_bias:
                batch.logit_bias[index] = (
                    np.array(list(sampling.logit_bias), dtype=np.int32),
                    np.array(list(sampling.logit_bias.values()), dtype=np.float32),
                )
            if sampling.allowed_token_ids:
                batch.allowed[index] = np.array(sampling.allowed_token_ids, dtype=np.int32)
            banned = banned_ids(sequence)
            if banned:
                batch.banned[index] = np.array(banned, dtype=np.int32)
            if sequence.form is not None:
                masked.append(index)
                forms.append(sequence.form)
        if not masked:
            return
        batch.masked_rows = np.array(masked, dtype=np.int32)
        batch.masks = self._masks.fill(forms)
        for form, mask, index in zip(forms, batch.masks, masked, strict=True):
            if not self._sparse[int(rows[index])].request.stop.eos_token_ids:
                form.hide_end(mask)


def _is_sparse(sequence: Sequence) -> bool:
    """Whether a sequence has sampling parts that are not one number."""
    sampling = sequence.request.sampling
    return bool(
        has_penalties(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_word_ids
        or sequence.request.stop.masked_until_min
        or sequence.form is not None
    )


def _add_scores(batch: StepBatch, plan: StepPlan, num_decodes: int) -> list[tuple[Request, range]]:
    """Ask for the scores that the prefills of this step can give; whose they are."""
    scored: list[tuple[Request, range]] = []
    rows: list[Int32Array] = []
    targets: list[int] = []
    for index, (sequence, count) in enumerate(plan.prefills, num_decodes):
        scores = sequence.scores_due
        if scores is None:
            continue
        start = sequence.num_computed
        positions = scores.due(start, count)
        if positions:
            scored.append((sequence.request, positions))
            rows.append(score_rows(int(batch.query_starts[index]), start, positions))
            targets.extend(sequence.token_ids[positions.start + 1 : positions.stop + 1])
            batch.num_score_logprobs = max(batch.num_score_logprobs, scores.num_top)
    if scored:
        batch.score_rows = np.concatenate(rows)
        batch.score_targets = np.array(targets, dtype=np.int32)
    return scored


def _penalties(sampling: Sampling, sequence: Sequence) -> Penalties:
    return Penalties(
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        prompt_ids=np.array(sequence.request.prompt_ids, dtype=np.int32),
        output_ids=np.array(sequence.token_ids[sequence.num_prompt :], dtype=np.int32),
    )
