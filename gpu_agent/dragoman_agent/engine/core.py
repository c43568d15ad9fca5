"""The engine without its process: commands in, steps on the device, one frame of events out for each.

A turn keeps one step under way behind the one that it waits for: step n + 1 is scheduled and handed over while step n runs, with
the tokens of step n filled in on the device. So a stop is noticed one step late, and the token computed meanwhile is dropped;
lengths are known beforehand. A request whose next step depends on its last token on the host (a grammar, penalties) is not run
ahead of: then the text of step n is made while step n + 1 runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import BlockDevice, Device, StepHandle, StepResult
from dragoman_agent.engine.batch import BatchBuilder, BuiltStep
from dragoman_agent.engine.events import logprob_entries
from dragoman_agent.engine.exchange import BlockExchange
from dragoman_agent.engine.live_requests import Clock, LiveRequests
from dragoman_agent.engine.messages import (
    Cancel,
    Credit,
    Delta,
    Embedded,
    Load,
    LogprobEntry,
    Start,
    StartEmbed,
    Step,
    Tune,
)
from dragoman_agent.engine.request import Request, Sequence, Status
from dragoman_agent.engine.scheduler import Scheduler
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

Command = Start | StartEmbed | Cancel | Credit | Tune


class _InFlight(NamedTuple):
    built: BuiltStep
    handle: StepHandle
    num_prefill_tokens: int
    num_decode_tokens: int


class EngineCore:
    """Owns the live requests. One thread calls it; the device is loaded before it is built."""

    def __init__(
        self,
        device: Device,
        tokenizer: TextTokenizer,
        model_digest: bytes,
        plan: Plan,
        clock: Clock = time.monotonic,
        vocab_size: int | None = None,
        *,
        run_ahead: bool = True,
    ) -> None:
        """`vocab_size`: width of the logits; None is the tokenizer's. `run_ahead` False waits for each step's tokens."""
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.scheduler = Scheduler(plan)
        self._device = device
        self.exchange = (
            BlockExchange(device, self.scheduler.pool, plan.max_num_seqs) if isinstance(device, BlockDevice) else None
        )
        self._live = LiveRequests(self.scheduler, tokenizer, model_digest, plan, clock, vocab_size)
        self._plan = plan
        self._clock = clock
        self._builder = BatchBuilder(plan, vocab_size)
        self._in_flight: deque[_InFlight] = deque()
        self._max_in_flight = 2 if run_ahead else 1
        # Tokens of the last step, not yet handed out; entries of a list belong together.
        self._sampled: list[Sequence] = []
        self._sampled_ids: list[int] = []
        self._sampled_logprobs: dict[int, list[LogprobEntry]] = {}  # by index, where asked for
        self._sampled_at = 0.0
        self._step_count = 0
        self._last_counts = (0, 0)
        self._step_seconds = 0.0
        self._host_seconds = 0.0

    # Commands.

    def receive(self, command: Command) -> None:
        """Take one command. A bad one is answered by a Failed event, never by an exception."""
        if isinstance(command, Start | StartEmbed):
            self._live.start(command)
            return
        if isinstance(command, Tune):
            self.scheduler.tune(command)
            return
        request = self.requests.get(command.request_id)
        if request is None:
            return
        if isinstance(command, Cancel):
            self._live.cancel(request)
        else:
            self.scheduler.grant(request, command.until, self._clock())

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait for their grammar."""
        return self._live.num_compiling > 0

    @property
    def requests(self) -> Mapping[str, Request]:
        """The live requests by id."""
        return self._live.by_id

    def fail_all(self, reason: error_pb2.ErrorReason, message: str) -> Step:
        """End every request; the frame that says so."""
        for request in list(self.requests.values()):
            self._live.fail(request, reason, message)
        return self._frame()

    def turn(self, send: Callable[[Step], None]) -> bool:
        """Keep the device supplied, collect a step, and `send` a frame of each; False when no step was under way.

        Frames are made while the device is busy: of this step at once when another runs behind it, else after the next
        launch. Raises DeviceError; what was sent before stands.
        """
        self.launch()
        if self.has_output and (step := self.emit()) is not None:
            send(step)
        ran = self.collect()
        if self._in_flight and (step := self.emit()) is not None:
            send(step)
        return ran

    # The parts of a turn.

    def launch(self) -> None:
        """Decide the next steps and hand them to the device. Raises DeviceError."""
        begun = time.perf_counter()
        now = self._clock()
        self._live.expire(now)
        if self._live.num_compiling:
            self._live.admit_compiled(now)
        self._host_seconds += time.perf_counter() - begun
        flights = self._in_flight
        while len(flights) < self._max_in_flight and not (flights and flights[-1].built.is_serial):
            if not self._launch_step(now):
                return

    def _launch_step(self, now: float) -> bool:
        """Launch one step; False when nothing can run."""
        begun = time.perf_counter()
        plan = self.scheduler.schedule(now)
        if not plan.num_tokens:
            self._host_seconds += time.perf_counter() - begun
            return False
        for sequence, _ in plan.prefills:
            self._note_start(sequence, now)
        self._step_count += 1
        built = self._builder.build(plan, self._step_count)
        self.scheduler.launched(plan, built.sampled, self._step_count)
        self._host_seconds += time.perf_counter() - begun
        handle = self._device.submit(built.batch)
        self._in_flight.append(_InFlight(built, handle, plan.num_prefill_tokens, len(plan.decodes)))
        self.scheduler.release_ahead()
        return True

    def emit(self) -> Step | None:
        """The frame of what was collected; None when there is nothing to say."""
        begun = time.perf_counter()
        self._hand_out()
        if not self._live.events and not any(self._last_counts):
            return None
        self._host_seconds += time.perf_counter() - begun
        return self._frame()

    def collect(self) -> bool:
        """Wait for the oldest step under way and take its tokens; False when there is none. Raises DeviceError."""
        if not self._in_flight:
            return False
        flight = self._in_flight.popleft()
        result = flight.handle.result()
        begun = time.perf_counter()
        self._take(flight.built, result, self._clock())
        self._step_seconds += result.seconds
        self._last_counts = (flight.num_prefill_tokens, flight.num_decode_tokens)
        self._host_seconds += time.perf_counter() - begun
        return True

    def tick(self) -> Step:
        """A frame while idle."""
        return self._frame()

    @property
    def has_output(self) -> bool:
        """Whether `emit` has something to say."""
        return bool(self._sampled or self._live.events or any(self._last_counts))

    def _note_start(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if request.started is None:
            request.started = now
            request.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            if self.exchange is not None:
                self.exchange.note_use(sequence.block_table[: request.num_cached_tokens // self._plan.page_size])

    # Results.

    def _take(self, built: BuiltStep, result: StepResult, now: float) -> None:
        if built.pooled:
            self._take_embeddings(built, result)
        if built.scored:
            self._take_scores(built.scored, result)
        self._sampled_at = now
        ended = self._take_tokens(built, result)
        if ended:
            # A choice that failed in this step took its whole request along.
            self.scheduler.leave([s for s in ended if s.status is Status.RUNNING], Status.ENDED)
        if built.computed and self.scheduler.blocked:
            for sequence in built.sampled:
                if not sequence.request.is_over:
                    self.scheduler.unblock(sequence.request, now)

    def _take_tokens(self, built: BuiltStep, result: StepResult) -> list[Sequence]:
        """Append the sampled tokens; the sequences that end with theirs. This is between two steps: every line counts."""
        page_size = self._plan.page_size
        running = Status.RUNNING
        all_finite = bool(result.finite.all())
        ended: list[Sequence] = []
        taken, taken_ids = self._sampled, self._sampled_ids
        step = built.batch.step
        for index, (sequence, token_id) in enumerate(zip(built.sampled, result.token_ids.tolist(), strict=True)):
            if sequence.status is not running or sequence.cut_step >= step:
                continue  # it was stopped, cancelled or preempted while this step was under way
            if sequence.future_step == step:
                sequence.future_step = 0
            if not all_finite and not result.finite[index]:
                self._live.fail_non_finite(sequence)
                continue
            tokens = sequence.token_ids
            num_tokens = len(tokens)
            if num_tokens >= (sequence.num_published + 1) * page_size:
                self.scheduler.publish(sequence, num_tokens)
            tokens.append(token_id)
            form = sequence.form
            if form is not None:
                form.take([token_id])
                if form.failure:
                    self._live.fail_form(sequence, form.failure)
                    continue
            if (
                num_tokens + 1 >= sequence.max_num_tokens
                or (token_id in sequence.stop_ids and num_tokens >= sequence.min_num_tokens)
                or (form is not None and form.is_complete)
            ):
                ended.append(sequence)
            if result.logprobs is not None:
                self._sampled_logprobs[len(taken)] = logprob_entries(
                    result, index, sequence.request.sampling.num_logprobs
                )
            taken.append(sequence)
            taken_ids.append(token_id)
        return ended

    def _take_embeddings(self, built: BuiltStep, result: StepResult) -> None:
        vectors = result.embeddings
        assert vectors is not None, "the device returned no embedding for a pooled sequence"
        for sequence, vector in zip(built.pooled, vectors, strict=True):
            if sequence.status is not Status.RUNNING or sequence.cut_step >= built.batch.step:
                continue
            if not np.isfinite(vector).all():
                self._live.fail_non_finite(sequence)
                continue
            self.scheduler.publish(sequence, len(sequence.token_ids))
            self._live.end(sequence.request, Embedded(sequence.request.request_id, vector.tolist()))

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

    # Events.

    def _hand_out(self) -> None:
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
                    request.request_id,
                    sequence.choice,
                    cursor,
                    [token_id],
                    text,
                    entries,
                    finish,
                    stop_string,
                    stop_token_id,
                )
            )
            if finish:
                self._live.finish_choice(sequence)

    def _frame(self) -> Step:
        events = self._live.take_events()
        stored, removed = self.scheduler.pool.take_events()
        step = Step(
            self._step_count,
            events,
            self._load(),
            self._step_seconds,
            self._host_seconds,
            [unit[:8] for unit in stored],
            [unit[:8] for unit in removed],
        )
        self._last_counts = (0, 0)
        self._step_seconds = self._host_seconds = 0.0
        return step

    def _load(self) -> Load:
        scheduler = self.scheduler
        num_prefill, num_decode = self._last_counts
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.blocked) + len(scheduler.parked) + self._live.num_compiling,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
            total_blocks=scheduler.pool.num_blocks - 1,
            pending_prefill_tokens=scheduler.pending_prefill_tokens,
            running_context_tokens=scheduler.running_context_tokens if scheduler.running else 0,
            preemptions=scheduler.num_preemptions,
            step_count=self._step_count,
            prefill_tokens=num_prefill,
            decode_tokens=num_decode,
            unused_blocks=scheduler.pool.num_unused,
            eviction_seconds=scheduler.pool.eviction_seconds,
            max_step_tokens=scheduler.max_step_tokens,
        )
