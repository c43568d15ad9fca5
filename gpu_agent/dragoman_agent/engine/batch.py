"""From a step's plan to the arrays a device takes. What does not change between steps lives in rows and is gathered at once."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Int32Array, SamplingBatch, StepBatch, no_ids, no_masks
from dragoman_agent.engine.prompt_scores import score_rows
from dragoman_agent.engine.request import Request, Sequence
from dragoman_agent.engine.sparse_sampling import SparseSampling
from dragoman_agent.engine.step_plan import StepPlan
from dragoman_agent.pal.plan import Plan

_EMPTY, _NO_MASKS = no_ids(), no_masks()
_ONE = np.int32(1)
_SEED_MASK = (1 << 64) - 1
_ROW = attrgetter("row")
_TOKEN_IDS = attrgetter("token_ids")


@dataclass(slots=True)
class BuiltStep:
    """A batch and whose it is: `sampled` and `pooled` in the order of the result's rows."""

    batch: StepBatch
    rows: npt.NDArray[np.intp]  # [num_samples] of the persistent batch
    sampled: list[Sequence]  # the same list as in the step before where nobody came or went
    texts: list[list[int]]  # tokens of each of `sampled`
    pooled: list[Sequence]
    scored: list[tuple[Request, range]]  # prompts and their positions, in the order of the result's scores
    keys: Int32Array  # [num_samples] see Start.key; -1 for none
    has_keys: bool  # all of them
    quiet_lens: Int32Array  # [num_samples] computed tokens with which a row's length is reached
    ends_page: npt.NDArray[np.bool_]  # [num_samples] rows whose last page is full
    watched: npt.NDArray[np.bool_]  # [num_samples] see BatchBuilder.take
    longest: int  # tokens of the longest context
    is_serial: bool = False  # the step after it must wait for its tokens


class BatchBuilder:
    """Rows of the running sequences, and the batches made of them.

    A row follows its sequence from the step that starts it: what it has computed and which token comes next is counted here
    for all rows at once. A step of decode alone of the sequences that the step before had is made of that step.
    """

    def __init__(self, plan: Plan, vocab_size: int, *, samples_late: bool = False) -> None:
        """`vocab_size` is the width of the logits. `samples_late`: the device takes a step's sampling late, see LateStep."""
        self._samples_late = samples_late
        num_rows = plan.max_num_seqs
        max_num_blocks = -(-plan.max_context_tokens // plan.page_size)
        self._page_size = np.int32(plan.page_size)
        self._tables = np.zeros((num_rows, max_num_blocks), dtype=np.int32)
        self._num_blocks = [0] * num_rows  # of each table; 0 beyond them
        self._fixed = np.zeros((9, num_rows), dtype=np.int32)  # what stays while a row has its sequence
        self._prompt_lens, self._top_ks, self._choices, self._num_logprobs, self._keys, self._quiet_lens = self._fixed[
            :6
        ]
        self._temperatures, self._top_ps, self._min_ps = self._fixed[6:].view(np.float32)
        self._seeds = np.zeros(num_rows, dtype=np.uint64)
        self._num_computed = np.zeros(num_rows, dtype=np.int32)  # tokens, those of the steps under way included
        self._last_tokens = np.zeros(num_rows, dtype=np.int32)  # the newest that the host knows
        self._future_steps = np.zeros(num_rows, dtype=np.int64)  # newest step that samples a token for the row
        self._future_rows = np.zeros(num_rows, dtype=np.int32)  # and its row of that step's result
        self._rising = np.arange(num_rows + 1, dtype=np.int32)
        self._ones = np.ones(num_rows, dtype=np.int32)
        coming = -1 - self._rising
        # By their number, inputs of rows that were the same in the step before: one array each, which a device checks once.
        self._coming = [coming[:num] for num in range(num_rows + 1)]
        self._last: BuiltStep | None = None  # the newest step, where it was one of decode alone
        self._taken_step = 0
        self._loaded_step = 0  # the newest in which rows got a sequence
        self._stop_ids: set[int] = set()  # that some row has had
        self._ever_stop = np.zeros(vocab_size, dtype=np.bool_)  # the same by id
        self._sparse = SparseSampling(num_rows, vocab_size)
        self._is_serial = np.zeros(num_rows, dtype=np.bool_)
        self._draws_by_text = np.zeros(num_rows, dtype=np.bool_)

    def build(self, plan: StepPlan, step: int) -> BuiltStep:
        """The batch of `plan`: decode sequences first, then prefill chunks. What is as in the step before may be shared with it."""
        if plan.prefills:
            self._loaded_step = step
        for sequence, _ in plan.prefills:
            self._load_row(sequence)
        for sequence in plan.grown:
            self._grow_row(sequence)
        last = self._last
        # A row changes its sequence in a step with prompts only, so equal sequences have the rows that they had.
        if last is not None and not plan.prefills and plan.decodes == last.sampled:
            built = self._go_on(last, step)
        else:
            built = self._begin(plan, step)
        rows = built.rows
        if self._sparse:
            # A row whose last token is under way cannot be told yet what it may sample next.
            coming = self._future_steps[rows] > self._taken_step
            built.batch.sampling_follows = bool((self._draws_by_text[rows] & coming).any())
            if not built.batch.sampling_follows:
                self._sparse.add(built.batch.sampling, rows)
        self._future_steps[rows] = step
        self._last = None if plan.prefills else built
        return built

    def _go_on(self, last: BuiltStep, step: int) -> BuiltStep:
        """A token each for the sequences of `last`, which was one of decode alone."""
        before = last.batch
        rows = last.rows
        positions = before.context_lens
        context_lens = positions + _ONE
        longest = last.longest + 1
        tables = before.block_tables
        slot_mapping = before.slot_mapping + _ONE
        (begun,) = last.ends_page.nonzero()  # sequences that begin a page
        if len(begun):
            pages = positions[begun] // self._page_size
            blocks = self._tables[rows[begun], pages]
            slot_mapping[begun] = blocks * self._page_size
            if tables.shape[1] * self._page_size < longest:
                tables = self._table_rows(rows, longest)
            else:
                tables = tables.copy()
                tables[begun, pages] = blocks
        is_coming = before.step > self._taken_step
        ends_page = context_lens % self._page_size == 0
        self._num_computed[rows] = context_lens
        batch = StepBatch(
            step=step,
            token_ids=self._coming[len(rows)] if is_coming else self._last_tokens[rows],
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=before.query_starts,
            context_lens=context_lens,
            block_tables=tables,
            prompt_lens=before.prompt_lens,
            sample_seqs=before.sample_seqs,
            pool_seqs=_EMPTY,
            sampling=_without_sparse(before.sampling, before.sampling.cursors + _ONE),
            score_rows=_EMPTY,
            score_targets=_EMPTY,
        )
        return BuiltStep(
            batch=batch,
            rows=rows,
            sampled=last.sampled,
            texts=last.texts,
            pooled=[],
            scored=[],
            keys=last.keys,
            has_keys=last.has_keys,
            quiet_lens=last.quiet_lens,
            ends_page=ends_page,
            watched=ends_page | (context_lens >= last.quiet_lens),
            longest=longest,
            is_serial=last.is_serial,
        )

    def _begin(self, plan: StepPlan, step: int) -> BuiltStep:
        """Any step, from the rows."""
        num_decodes = len(plan.decodes)
        sequences = plan.decodes + [sequence for sequence, _ in plan.prefills]
        rows = np.fromiter(map(_ROW, sequences), dtype=np.intp, count=len(sequences))
        counts, query_starts = self._queries(plan)
        context_lens = self._num_computed[rows] + counts
        self._num_computed[rows] = context_lens
        longest = int(context_lens.max())
        tables = self._table_rows(rows, longest)
        positions, slot_mapping = self._slots(tables, context_lens, counts, query_starts)
        sampled, pooled = self._outputs(plan)
        fixed, sampled_rows, sampled_lens, chosen = self._fixed.take(rows, axis=1), rows, context_lens, sequences
        prompt_lens = fixed[0]
        if len(sampled) != len(sequences):
            fixed, sampled_rows, sampled_lens = fixed.take(sampled, axis=1), rows[sampled], context_lens[sampled]
            chosen = [sequences[i] for i in sampled.tolist()]
        batch = StepBatch(
            step=step,
            token_ids=self._token_ids(plan, rows[:num_decodes], query_starts),
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            prompt_lens=prompt_lens,
            sample_seqs=sampled,
            pool_seqs=pooled,
            sampling=self._sampling(fixed, self._seeds[sampled_rows], sampled_lens),
            score_rows=_EMPTY,
            score_targets=_EMPTY,
        )
        keys, quiet_lens = fixed[4], fixed[5]
        ends_page = sampled_lens % self._page_size == 0
        # The first token is looked at whatever it is.
        watched = ends_page | (sampled_lens >= quiet_lens) | (self._future_steps[sampled_rows] == 0)
        self._future_rows[sampled_rows] = self._rising[: len(sampled_rows)]
        return BuiltStep(
            batch=batch,
            rows=sampled_rows,
            sampled=chosen,
            texts=list(map(_TOKEN_IDS, chosen)),
            pooled=[sequences[i] for i in pooled.tolist()],
            scored=_add_scores(batch, plan, num_decodes) if plan.prefills else [],
            keys=keys,
            has_keys=not np.count_nonzero(keys < 0),
            quiet_lens=quiet_lens,
            ends_page=ends_page,
            watched=watched,
            longest=longest,
            is_serial=bool(np.count_nonzero(self._is_serial[rows])),
        )

    def take(self, built: BuiltStep, token_ids: Int32Array) -> list[int]:
        """The tokens that a step sampled are known. Call it in the order of the steps.

        Returns the rows that have to be looked at whatever token came, which are the first one of a sequence, those at the end
        of a page or of their length, and those whose text is made here, and the rows whose token may end them: in all others
        the stream just goes on, as keys tell.
        """
        step = self._taken_step = built.batch.step
        rows = built.rows
        if step < self._loaded_step:  # a row that was given to another sequence meanwhile has its own last token
            kept = self._last_tokens[rows]
            self._last_tokens[rows] = np.where(self._future_steps[rows] >= step, token_ids, kept)
        else:
            self._last_tokens[rows] = token_ids
        (watched,) = (built.watched | self._ever_stop.take(token_ids)).nonzero()
        found: list[int] = watched.tolist()
        return found

    def _table_rows(self, rows: npt.NDArray[np.intp], longest: int) -> Int32Array:
        """Block tables of `rows`, as wide as `longest` tokens need."""
        return self._tables[:, : -(-longest // int(self._page_size))].take(rows, axis=0)

    def _queries(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """Query tokens of each sequence, [num_seqs], and where they start, [num_seqs + 1]."""
        num_decodes, num_seqs = len(plan.decodes), len(plan.decodes) + len(plan.prefills)
        counts, query_starts = self._ones[:num_seqs], self._rising[: num_seqs + 1]
        if plan.prefills:
            counts, query_starts = counts.copy(), query_starts.copy()
            counts[num_decodes:] = [count for _, count in plan.prefills]
            np.add.accumulate(counts, out=query_starts[1:])
        return counts, query_starts

    def _token_ids(self, plan: StepPlan, rows: npt.NDArray[np.intp], starts: Int32Array) -> Int32Array:
        """Inputs of all sequences, [num_tokens]: of those in decode, which have `rows`, the last token, or -1 - r where that is
        still under way in row r of the last step.
        """
        under_way = self._future_steps[rows] > self._taken_step
        decoded: Int32Array = np.where(under_way, -1 - self._future_rows[rows], self._last_tokens[rows])
        if not plan.prefills:
            return decoded
        token_ids = np.empty(int(starts[-1]), dtype=np.int32)
        token_ids[: len(rows)] = decoded
        start = len(rows)
        for sequence, count in plan.prefills:
            first = sequence.num_computed
            token_ids[start : start + count] = sequence.token_ids[first : first + count]
            start += count
        return token_ids

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
        if not sequence.stop_ids <= self._stop_ids:
            self._stop_ids |= sequence.stop_ids
            self._ever_stop[[i for i in sequence.stop_ids if i < len(self._ever_stop)]] = True
        request = sequence.request
        sampling = request.sampling
        self._temperatures[row] = sampling.temperature
        self._top_ks[row] = sampling.top_k
        self._top_ps[row] = sampling.top_p
        self._min_ps[row] = sampling.min_p
        self._seeds[row] = sampling.seed & _SEED_MASK
        self._choices[row] = sequence.choice
        self._num_logprobs[row] = sampling.num_logprobs
        self._keys[row] = sequence.key
        self._draws_by_text[row] = request.draws_by_text
        self._is_serial[row] = request.is_serial or (request.draws_by_text and not self._samples_late)
        self._sparse.load(sequence)

    def _grow_row(self, sequence: Sequence) -> None:
        table, row = sequence.block_table, sequence.row
        for at in range(self._num_blocks[row], len(table)):  # one, nearly always
            self._tables[row, at] = table[at]
        self._num_blocks[row] = len(table)

    def _slots(
        self, tables: Int32Array, context_lens: Int32Array, counts: Int32Array, starts: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Positions and KV slots of all query tokens, each [num_tokens]."""
        owners = self._rising[: len(counts)]
        num_tokens = int(starts[-1])
        if num_tokens == len(counts):
            positions = context_lens - _ONE
        else:
            owners = owners.repeat(counts)
            # The last query of a sequence is the last token of its context.
            positions = np.arange(num_tokens, dtype=np.int32) + (context_lens - starts[1:])[owners]
        pages = positions // self._page_size
        return positions, (tables[owners, pages] - pages) * self._page_size + positions

    def _outputs(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """Indices of the sequences that are sampled, and of those whose hidden state is wanted."""
        num_decodes = len(plan.decodes)
        ended = [  # prompts whose last token is in the step
            (index, sequence.request.is_embedding)
            for index, (sequence, count) in enumerate(plan.prefills, num_decodes)
            if count == sequence.num_uncomputed
        ]
        pooled = [index for index, is_embedding in ended if is_embedding]
        num_sampled = num_decodes + len(ended) - len(pooled)
        sampled = self._rising[:num_sampled]
        if num_sampled != num_decodes + len(plan.prefills):
            sampled = sampled.copy()
            sampled[num_decodes:] = [index for index, is_embedding in ended if not is_embedding]
        return sampled, np.array(pooled, dtype=np.int32) if pooled else _EMPTY

    def late_sampling(self, built: BuiltStep) -> SamplingBatch:
        """The sampling of a step that was submitted without it, now that the tokens before are known."""
        known = built.batch.sampling
        sampling = _without_sparse(known, known.cursors)
        step = built.batch.step
        self._sparse.add(sampling, built.rows, [s.cut_step < step for s in built.sampled])
        return sampling

    def _sampling(self, fixed: Int32Array, seeds: npt.NDArray[np.uint64], context_lens: Int32Array) -> SamplingBatch:
        """`fixed` [9, num_samples] is what the sampled rows hold."""
        numbers = fixed.view(np.float32)
        return SamplingBatch(
            temperatures=numbers[6],
            top_ks=fixed[1],
            top_ps=numbers[7],
            min_ps=numbers[8],
            seeds=seeds,
            choices=fixed[2],
            cursors=context_lens - fixed[0],
            num_logprobs=fixed[3],
            masked_rows=_EMPTY,
            masks=_NO_MASKS,
        )


def _without_sparse(known: SamplingBatch, cursors: Int32Array) -> SamplingBatch:
    """The parts of `known` that are one number a row, which stay, at `cursors`."""
    return SamplingBatch(
        temperatures=known.temperatures,
        top_ks=known.top_ks,
        top_ps=known.top_ps,
        min_ps=known.min_ps,
        seeds=known.seeds,
        choices=known.choices,
        cursors=cursors,
        num_logprobs=known.num_logprobs,
        masked_rows=_EMPTY,
        masks=_NO_MASKS,
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
