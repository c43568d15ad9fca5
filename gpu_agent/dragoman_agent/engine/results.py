"""What a step brought, given to its requests: tokens appended, ends noticed, and what is to be said of both."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Int32Array, StepResult
from dragoman_agent.engine.batch import BuiltStep
from dragoman_agent.engine.events import last_delta, logprob_entries
from dragoman_agent.engine.live_requests import LiveRequests
from dragoman_agent.engine.messages import Delta, Embedded, LogprobEntry
from dragoman_agent.engine.request import Request, Sequence, Status
from dragoman_agent.engine.scheduler import Scheduler


class StepResults:
    """Owns what was sampled and has not been said yet. Streams with a key say their tokens in columns, the others as events."""

    def __init__(self, scheduler: Scheduler, live: LiveRequests, page_size: int) -> None:
        self._scheduler = scheduler
        self._live = live
        self._page_size = page_size
        # Tokens of the last step that need text; entries of a list belong together.
        self._sampled: list[Sequence] = []
        self._sampled_ids: list[int] = []
        self._sampled_logprobs: dict[int, list[LogprobEntry]] = {}  # by index, where asked for
        self._sampled_at = 0.0
        self._columns: list[tuple[Int32Array, Int32Array]] = []  # keys and token ids

    def __bool__(self) -> bool:
        """Whether there is something to say."""
        return bool(self._sampled or self._columns)

    def take(
        self, built: BuiltStep, result: StepResult, watched: list[int], now: float, *, goes_on: bool = False
    ) -> None:
        """Take one step's result. `watched` are the rows to look at, see BatchBuilder.take. `goes_on`: the step behind it, which
        is under way, samples the same sequences.
        """
        if built.pooled:
            self._take_embeddings(built, result)
        if built.scored:
            self._take_scores(built.scored, result)
        self._sampled_at = now
        if np.count_nonzero(result.finite) < len(result.finite):
            self._fail_non_finite(built, result)
        unsaid = self._append(built, result.token_ids.tolist(), goes_on=goes_on)
        step = built.batch.step
        seen = [(row, built.sampled[row]) for row in watched if built.sampled[row].cut_step < step]
        ended = [row for row, sequence in seen if self._look_at(sequence, row, result, step)]
        if ended:
            self._end(built, ended)
        self._add_columns(built, result.token_ids, unsaid + ended)
        if self._scheduler.blocked:
            for _, sequence in seen:
                if not sequence.request.is_over:
                    self._scheduler.unblock(sequence.request, now)

    def _fail_non_finite(self, built: BuiltStep, result: StepResult) -> None:
        for row in np.flatnonzero(~result.finite).tolist():
            sequence = built.sampled[row]
            if sequence.cut_step < built.batch.step:
                self._live.fail_non_finite(sequence)

    def _append(self, built: BuiltStep, token_ids: list[int], *, goes_on: bool) -> list[int]:
        """Append the sampled tokens; the rows that want none any more. This is between two steps: every line counts."""
        step = built.batch.step
        dropped: list[int] = []
        if step > self._scheduler.newest_cut:
            for text, token_id in zip(built.texts, token_ids, strict=True):
                text.append(token_id)
        else:
            for row, (sequence, token_id) in enumerate(zip(built.sampled, token_ids, strict=True)):
                if sequence.cut_step >= step:
                    dropped.append(row)  # stopped, cancelled or preempted while this step was under way
                else:
                    sequence.token_ids.append(token_id)
        if not goes_on:
            for sequence in built.sampled:
                if sequence.future_step == step:
                    sequence.future_step = 0
        return dropped

    def _look_at(self, sequence: Sequence, row: int, result: StepResult, step: int) -> bool:
        """What a token means beyond going on; whether its sequence ends with it."""
        if sequence.cut_step >= step:
            return False  # another choice failed just now and took the request along
        tokens = sequence.token_ids
        num_tokens = len(tokens)
        self._scheduler.publish(sequence, num_tokens - 1)
        if sequence.key >= 0:
            if sequence.request.first_token is None:
                sequence.request.first_token = self._sampled_at
        elif not self._keep_for_text(sequence, row, result):
            return False
        form = sequence.form
        return (
            num_tokens >= sequence.max_num_tokens
            or (tokens[-1] in sequence.stop_ids and num_tokens > sequence.min_num_tokens)
            or (form is not None and form.is_complete)
        )

    def _keep_for_text(self, sequence: Sequence, row: int, result: StepResult) -> bool:
        """A token whose text is made by `hand_out`, once the device has its next step. False when the request failed."""
        token_id = sequence.token_ids[-1]
        form = sequence.form
        if form is not None:
            form.take([token_id])
            if form.failure:
                self._live.fail_form(sequence, form.failure)
                return False
        if result.logprobs is not None:
            entries = logprob_entries(result, row, sequence.request.sampling.num_logprobs)
            self._sampled_logprobs[len(self._sampled)] = entries
        self._sampled.append(sequence)
        self._sampled_ids.append(token_id)
        return True

    def _end(self, built: BuiltStep, ended: list[int]) -> None:
        """Sequences that ended with their token. A choice that failed in this step has taken its whole request along."""
        sequences = [s for row in ended if (s := built.sampled[row]).status is Status.RUNNING]
        self._scheduler.leave(sequences, Status.ENDED)
        for sequence in sequences:
            if sequence.key >= 0:
                self._live.events.append(last_delta(sequence, sequence.token_ids[-1]))
                self._live.finish_choice(sequence)

    def _add_columns(self, built: BuiltStep, token_ids: Int32Array, unsaid: list[int]) -> None:
        keys = built.keys
        if unsaid or not built.has_keys:
            is_said = keys >= 0
            is_said[unsaid] = False
            keys, token_ids = keys[is_said], token_ids[is_said]
        if len(keys):
            self._columns.append((keys, token_ids))

    def _take_embeddings(self, built: BuiltStep, result: StepResult) -> None:
        vectors = result.embeddings
        assert vectors is not None, "the device returned no embedding for a pooled sequence"
        for sequence, vector in zip(built.pooled, vectors, strict=True):
            if sequence.cut_step >= built.batch.step:
                continue
            if not np.isfinite(vector).all():
                self._live.fail_non_finite(sequence)
                continue
            self._scheduler.publish(sequence, len(sequence.token_ids))
            self._live.end(sequence.request, Embedded(sequence.request.request_id, vector.astype("<f4").tobytes()))

    def _take_scores(self, scored: list[tuple[Request, range]], result: StepResult) -> None:
        first = 0
        for request, positions in scored:
            rows = slice(first, first + len(positions))
            first = rows.stop
            scores = request.scores
            if request.is_over or scores is None:
                continue
            if not scores.take(positions, rows, result):
                self._live.fail_non_finite(request.sequences[0])
            elif scores.is_complete:
                self._live.events.append(scores.opened(request.request_id))

    # What is said.

    def hand_out(self) -> None:
        """Make the text of the tokens that need one, and their events."""
        sampled, self._sampled = self._sampled, []
        token_ids, self._sampled_ids = self._sampled_ids, []
        logprobs, self._sampled_logprobs = self._sampled_logprobs, {}
        events = self._live.events
        for index, (sequence, token_id) in enumerate(zip(sampled, token_ids, strict=True)):
            output = sequence.output
            if sequence.status is Status.FINISHED or output is None:
                continue
            request = sequence.request
            if request.first_token is None:
                request.first_token = self._sampled_at
            cursor = output.num_sent
            piece = output.push(token_id)
            if sequence.form is not None and sequence.form.is_complete:
                piece = output.complete(piece)
            text, finish, stop_string, stop_token_id = piece
            entries = logprobs[index] if logprobs else []
            events.append(
                Delta(
                    request.request_id, sequence.choice, cursor, [token_id], text,
                    entries, finish, stop_string, stop_token_id,
                )
            )  # fmt: skip
            if finish:
                self._live.finish_choice(sequence)

    def columns(self) -> tuple[bytes, bytes]:
        """Keys and token ids since the last call, int32 little-endian; see Step."""
        columns, self._columns = self._columns, []
        if not columns:
            return b"", b""
        keys, token_ids = zip(*columns, strict=True)
        return _join(keys), _join(token_ids)


def _join(parts: tuple[Int32Array, ...]) -> bytes:
    values: npt.NDArray[np.int32] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return values.astype("<i4", copy=False).tobytes()
