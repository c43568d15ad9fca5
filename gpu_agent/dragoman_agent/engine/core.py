"""The engine without its process: commands in, steps on the device, one frame of events out for each.

A turn keeps one step under way behind the one that it waits for: step n + 1 is scheduled and handed over while step n runs, with
the tokens of step n filled in on the device. So a stop is noticed one step late, and the token computed meanwhile is dropped;
lengths are known beforehand. Where step n + 1 draws by the text so far (a grammar, penalties), the model runs ahead as well and the
sampling is supplied once the tokens of step n are taken. Only a prompt whose log-probabilities are asked for is not run ahead of.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import BlockDevice, Device, DeviceMemoryError, GroupingDevice, LateStep, StepHandle
from dragoman_agent.engine.batch import BatchBuilder, BuiltStep
from dragoman_agent.engine.block_account import BlockAccount, account
from dragoman_agent.engine.exchange import BlockExchange
from dragoman_agent.engine.host_work import HostTrace, HostWork
from dragoman_agent.engine.live_requests import Clock, LiveRequests
from dragoman_agent.engine.messages import Cancel, Credit, Load, Start, StartEmbed, Step, Tune
from dragoman_agent.engine.request import Request, Sequence, Status
from dragoman_agent.engine.results import StepResults
from dragoman_agent.engine.scheduler import Scheduler
from dragoman_agent.engine.step_plan import StepPlan, preemption_key
from dragoman_agent.engine.tiers import TierSizes, open_tiers
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

Command = Start | StartEmbed | Cancel | Credit | Tune
ACCOUNT_SECONDS = 1.0

logger = logging.getLogger(__name__)


class InFlight(NamedTuple):
    """A step under way."""

    built: BuiltStep
    plan: StepPlan
    handle: StepHandle
    num_prefill_tokens: int
    num_decode_tokens: int
    handed_over: float  # time.perf_counter when the device was given it


class StepTrace(HostTrace, Protocol):
    """Hears of what the engine does; see trace.py."""

    def step(self, flight: InFlight, seconds: float, waited: float, ended: float) -> None:
        """A step that took the device `seconds`; waited for from `waited` to `ended`, both of `time.perf_counter`."""


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
        tier_sizes: TierSizes | None = None,
        run_ahead: bool = True,
        trace: StepTrace | None = None,
    ) -> None:
        """`vocab_size`: width of the logits; None is the tokenizer's. `run_ahead` False waits for each step's tokens.

        `trace` hears of each part of the host's work and of each step. Raises DiskTierError when the directory of
        `tier_sizes` cannot be used.
        """
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.scheduler = Scheduler(plan)
        self._device = device
        self.exchange = (
            BlockExchange(device, self.scheduler.pool, plan.max_num_seqs) if isinstance(device, BlockDevice) else None
        )
        self.tiers = None
        if tier_sizes is not None and isinstance(device, BlockDevice):
            self.tiers = open_tiers(device, self.scheduler.pool, plan, model_digest, tier_sizes, clock)
        if self.tiers is not None and self.exchange is not None:
            self.scheduler.use_tiers(self.tiers)
            self.exchange.tiers = self.tiers
            self.tiers.note_brought = self.exchange.note_brought
        self._live = LiveRequests(self.scheduler, tokenizer, model_digest, plan, clock, vocab_size)
        self._plan = plan
        self._clock = clock
        samples_late = getattr(device, "samples_late", False)
        self._builder = BatchBuilder(plan, vocab_size, samples_late=samples_late)
        self._in_flight: deque[InFlight] = deque()
        self._max_in_flight = 2 if run_ahead else 1
        self.holds_launches = False  # set by who needs a moment without a step under way
        self._submit_computes = getattr(device, "computes_in_submit", False)
        self._results = StepResults(self.scheduler, self._live, plan.page_size)
        self._trace = trace
        self.host_work = HostWork(trace)
        self._step_count = 0
        self._last_counts = (0, 0)
        self._step_seconds = 0.0
        self._account = BlockAccount(0, 0)
        self._next_account = 0.0

    # Commands.

    def receive(self, command: Command) -> None:
        """Take one command. A bad one is answered by a Failed event, never by an exception."""
        if isinstance(command, Start | StartEmbed):
            self._live.start(command)
            return
        if isinstance(command, Tune):
            self.scheduler.tune(command)
            if isinstance(self._device, GroupingDevice):
                self._device.group_rows(command.attention_rows)
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
    def is_moving(self) -> bool:
        """Whether KV blocks move between tiers, which a turn soon has to look at."""
        return self.tiers is not None and self.tiers.is_busy

    @property
    def is_stepping(self) -> bool:
        """Whether steps are under way."""
        return bool(self._in_flight)

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
        begun = self.host_work.done("expire", begun)
        if self.tiers is not None:
            self.tiers.turn(now, is_idle=not (self._in_flight or self.scheduler.running))
            self.host_work.done("tiers", begun)
        if self.holds_launches:
            return
        flights = self._in_flight
        while len(flights) < self._max_in_flight and not (flights and flights[-1].built.is_serial):
            if not self._launch_step(now):
                return

    def _launch_step(self, now: float) -> bool:
        """Launch one step; False when nothing can run, or not before the step under way has ended."""
        done = self.host_work.done
        begun = time.perf_counter()
        plan = self.scheduler.schedule(now)
        begun = done("schedule", begun)
        if not plan.num_tokens:
            return False
        for sequence, _ in plan.prefills:
            self._note_start(sequence, now)
        self._step_count += 1
        built = self._builder.build(plan, self._step_count)
        self.scheduler.launched(plan, built.sampled, self._step_count)
        begun = done("build", begun)
        try:
            handle = self._device.submit(built.batch)
        except DeviceMemoryError as error:
            self._give_way(plan, error, now)
            return not self._in_flight
        if not built.batch.sampling_follows:
            self.scheduler.memory_limit.fitted()
        submitted = time.perf_counter() if self._submit_computes else done("submit", begun)
        self._in_flight.append(InFlight(built, plan, handle, plan.num_prefill_tokens, len(plan.decodes), begun))
        self.scheduler.release_ahead()
        self.scheduler.hash_ahead(plan)
        done("release", submitted)
        return True

    def _give_way(self, plan: StepPlan, error: DeviceMemoryError, now: float) -> None:
        """A step had no memory: smaller ones from now on; where it was small already, its last request fails."""
        if self.scheduler.memory_limit.failed(plan.num_tokens):
            limit = self.scheduler.memory_limit.max_step_tokens
            logger.warning("a step of %d tokens is tried again with at most %d: %s", plan.num_tokens, limit, error)
        elif request := _likeliest_too_much(plan):
            logger.warning("request %s fails: %s", request.request_id, error)
            message = f"the device has no memory for it now: {error}"
            self._live.fail(request, error_pb2.ERROR_REASON_DEVICE_MEMORY, message)
        self.scheduler.withdraw(plan, now)

    def emit(self) -> Step | None:
        """The frame of what was collected; None when there is nothing to say."""
        begun = time.perf_counter()
        self._results.hand_out()
        begun = self.host_work.done("hand out", begun)
        if not (self._live.events or self._results or any(self._last_counts)):
            return None
        step = self._frame()
        self.host_work.done("frame", begun)
        return step

    def collect(self) -> bool:
        """Wait for the oldest step under way and take its tokens; False when there is none. Raises DeviceError."""
        if not self._in_flight:
            return False
        flight = self._in_flight.popleft()
        waited = time.perf_counter()
        try:
            result = flight.handle.result()
        except DeviceMemoryError as error:
            self._give_way_late(flight, error)
            return True
        begun = time.perf_counter()
        if self._trace is not None:
            self._trace.step(flight, result.seconds, waited, begun)
        watched = self._builder.take(flight.built, result.token_ids)
        goes_on = bool(self._in_flight) and self._in_flight[0].built.sampled is flight.built.sampled
        self._results.take(flight.built, result, watched, self._clock(), goes_on=goes_on)
        self._step_seconds += result.seconds
        self._last_counts = (flight.num_prefill_tokens, flight.num_decode_tokens)
        self.host_work.done("take", begun)
        if self._in_flight and self._in_flight[0].built.batch.sampling_follows:
            self._supply(self._in_flight[0])
        return True

    def _give_way_late(self, flight: InFlight, error: DeviceMemoryError) -> None:
        """A step that was under way had no memory. What runs behind it reads what it did not write: it is waited for, so that
        nobody else gets the blocks it writes to, and withdrawn too.
        """
        behind = list(self._in_flight)
        self._in_flight.clear()
        for one in behind:
            if one.built.batch.sampling_follows:
                assert isinstance(one.handle, LateStep)
                one.handle.supply(one.built.batch.sampling)
            with suppress(DeviceMemoryError):
                one.handle.result()
        now = self._clock()
        self._give_way(flight.plan, error, now)
        for one in behind:
            self.scheduler.withdraw(one.plan, now)

    def _supply(self, flight: InFlight) -> None:
        """Tell the step under way how it is sampled, now that the tokens before it are known."""
        begun = time.perf_counter()
        sampling = self._builder.late_sampling(flight.built)
        begun = self.host_work.done("late sampling", begun)
        assert isinstance(flight.handle, LateStep)
        try:
            flight.handle.supply(sampling)
        except DeviceMemoryError as error:
            self._in_flight.popleft()
            self._give_way(flight.plan, error, self._clock())
            return
        self.scheduler.memory_limit.fitted()
        if not self._submit_computes:
            self.host_work.done("supply", begun)

    def tick(self) -> Step:
        """A frame while idle."""
        return self._frame()

    @property
    def has_output(self) -> bool:
        """Whether `emit` has something to say."""
        return bool(self._results or self._live.events or any(self._last_counts))

    def _note_start(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if request.started is None:
            request.started = now
            request.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            if self.exchange is not None:
                self.exchange.note_use(sequence.block_table[: request.num_cached_tokens // self._plan.page_size])

    # What is said.

    def _frame(self) -> Step:
        events = self._live.take_events()
        stored, removed = self.scheduler.pool.take_events()
        below: tuple[list[bytes], list[bytes]] = ([], [])
        if self.tiers is not None:
            below = self.tiers.lower.take_events()
        keys, token_ids = self._results.columns()
        step = Step(
            self._step_count,
            events,
            self._load(),
            self._step_seconds,
            self.host_work.take() if any(self._last_counts) else 0.0,
            [unit[:8] for unit in stored],
            [unit[:8] for unit in removed],
            [unit[:8] for unit in below[0]],
            [unit[:8] for unit in below[1]],
            keys,
            token_ids,
        )
        self._last_counts = (0, 0)
        self._step_seconds = 0.0
        return step

    def _load(self) -> Load:
        scheduler = self.scheduler
        now = self._clock()
        if now >= self._next_account:
            self._next_account = now + ACCOUNT_SECONDS
            self._account = account(scheduler)
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
            lost_blocks=self._account.num_lost,
            waste_tokens=self._account.num_waste_tokens,
        )


def _likeliest_too_much(plan: StepPlan) -> Request | None:
    """Of a step's requests, all of which ran before in smaller company, the last that came; None where all have left."""
    prefills = [sequence for sequence, _ in plan.prefills if sequence.status is Status.RUNNING]
    decodes = [sequence for sequence in plan.decodes if sequence.status is Status.RUNNING]
    if prefills:
        return prefills[-1].request
    return max(decodes, key=preemption_key).request if decodes else None
