"""A simulated agent: an engine's continuous batching as events, from its step model. It has the final word on requests.

Exact where prompts are computed: a step with prefill is one event. Where all only decode, every sequence gets a token a
step, so the steps up to the next end are one event, whatever their number: time of k steps = k times the step at the
mean context of the run. As in the engine, one step is always scheduled behind the one under way, so a newcomer waits for the
end of both. Two things are simpler than in the engine: the queue is by class and arrival, without shares of tenants, and a
shared prefix takes KV slots in each sequence.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

from dragoman.prefix_hash import UNIT_TOKENS
from dragoman_controller.fleet import Load
from dragoman_controller.simulate.profiles import AgentProfile
from dragoman_controller.simulate.streams import Stream


class _Chunk(NamedTuple):
    """Prefill of one step: its tokens, and the sequences whose prompt it completes."""

    num_tokens: int
    completing: list[Stream]


_NOTHING = _Chunk(0, [])


class SimulatedAgent:
    """One life of one agent. `next_at`: when `step` is due; infinity where nothing runs."""

    def __init__(self, profile: AgentProfile, agent_id: str, epoch: int) -> None:
        self.profile, self.agent_id, self.epoch = profile, agent_id, epoch
        self.is_alive, self.is_draining = True, False
        self.next_at = math.inf
        self.scheduled_at = -1.0
        """When the owner of the time means to call `step`; its own."""
        self.num_preemptions = 0
        self.stored: list[int] = []
        self.removed: list[int] = []
        self._steps = profile.steps
        self._order = 0
        self._waiting: list[tuple[int, int, Stream]] = []
        self._waiting_tokens = 0
        self._prefilling: list[Stream] = []
        self._prefill_context = 0
        self._uncomputed = 0
        self._decoding: list[tuple[int, int, Stream]] = []
        # Sum over the decoding of (context - step number at which it had it): their contexts now are this + n * number.
        self._context_base = 0
        self._num_steps = 0
        self._run_steps = 0
        self._run_begun = 0.0
        self._run_context = 0.0
        self._is_run = False
        self._current = self._planned = _NOTHING
        self._cache: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._cached_units = 0

    @property
    def num_requests(self) -> int:
        """Requests here, running or waiting."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def takes_requests(self) -> bool:
        """Whether an offer would be taken now."""
        return self.is_alive and not self.is_draining and self.num_requests < self.profile.num_slots

    def offer(self, stream: Stream, now: float) -> bool:
        """The final word: takes a request where a slot or a place in the queue is free, as the agent's gate does."""
        if not self.takes_requests:
            return False
        stream.accepted_at, stream.run_first_at, stream.agent_tokens = now, -1.0, 0
        stream.started = False
        self._enqueue(stream)
        if self.next_at == math.inf:
            self._begin(now)
        elif self._is_run and self._run_steps > 1:
            self._cut_run(now)
        return True

    def step(self) -> list[Stream]:
        """Ends the step or run of steps that is due at `next_at` and begins the next; the streams that ended."""
        now = self.next_at
        self._num_steps = n = self._num_steps + self._run_steps
        ended: list[Stream] = []
        decoding = self._decoding
        while decoding and decoding[0][0] <= n:
            stream = heapq.heappop(decoding)[2]
            self._context_base -= stream.prompt_tokens + stream.output_tokens - stream.end_step
            ended.append(stream)
        for stream in self._current.completing:
            self._first_token(stream, now, n, ended)
        self._begin(now)
        return ended

    def kill(self, now: float) -> list[tuple[Stream, int]]:
        """It dies; its streams, each with the output tokens that its client has got in all."""
        n = self._num_steps + self._steps_done(now)
        lost = [(stream, stream.output_tokens - (end_step - n)) for end_step, _, stream in self._decoding]
        lost += [(stream, stream.delivered + stream.agent_tokens) for stream in self._prefilling]
        lost += [(entry[2], entry[2].delivered + entry[2].agent_tokens) for entry in self._waiting]
        self.is_alive, self.next_at = False, math.inf
        self._decoding, self._prefilling, self._waiting = [], [], []
        return sorted(lost, key=lambda one: one[0].number)

    def load(self, now: float) -> Load:
        """What it would report now."""
        n = self._num_steps + self._steps_done(now)
        return Load(
            len(self._waiting),
            len(self._prefilling) + len(self._decoding),
            self._waiting_tokens + self._uncomputed,
            self._context_base + n * len(self._decoding) + self._prefill_context,
            step_count=n,
        )

    def take_events(self) -> tuple[list[int], list[int]]:
        """Prefix units stored and removed since the last call."""
        self._trim_cache()
        events = self.stored, self.removed
        self.stored, self.removed = [], []
        return events

    def all_units(self) -> list[int]:
        """Every prefix unit in its cache: a snapshot."""
        return [unit for units in self._cache.values() for unit in units]

    def held_units(self, prefix: int, units: tuple[int, ...]) -> int:
        """Units of a prefix in its cache."""
        return min(len(self._cache.get(prefix, ())), len(units))

    def forecast(self, prompt_tokens: int, output_tokens: int, cached_tokens: int, now: float) -> float:
        """Seconds until the end of a request that came now, were it the last to come: what an oracle places by.

        The queue and the streams are known with their ends; the decode is integrated over eight stretches, in each of which
        the batch is what is left of it.
        """
        n = self._num_steps + self._steps_done(now)
        ends = sorted(entry[0] - n for entry in self._decoding)
        ahead = self._waiting_tokens + self._uncomputed
        seconds = self._steps.prefill_seconds(ahead + max(prompt_tokens - cached_tokens, 1))
        missing = self.num_requests + 1 - self.profile.max_running_requests
        waited = 0
        if missing > 0 and ends:
            waited = max(ends[min(missing, len(ends)) - 1], 0)
            seconds += waited * self._step_seconds(self.profile.max_running_requests, self._mean_context(n))
        entering = len(self._prefilling) + len(self._waiting) + 1
        own = prompt_tokens + output_tokens / 2
        mean = self._mean_context(n)
        stretch = (output_tokens - 1) / 8
        for part in range(8):
            left = len(ends) - bisect_right(ends, waited + (part + 0.5) * stretch)
            batch = min(left + entering, self.profile.max_running_requests)
            context = (mean * (batch - 1) + own) / batch if mean else own
            seconds += stretch * self._step_seconds(batch, context)
        return seconds

    # What runs.

    def _begin(self, now: float) -> None:
        """Begins what was planned behind the last step, and plans behind it."""
        self._make_room()
        batch = len(self._decoding)
        current = self._planned
        if not batch and not current.num_tokens:
            current = self._plan(0)  # idle: nothing is under way to be behind of
        self._current = current
        self._planned = self._plan(self._decodes_behind(current)) if self._waiting or self._prefilling else _NOTHING
        self._run_begun, self._run_steps, self._is_run = now, 1, False
        if not batch and not current.num_tokens:
            self._run_steps, self.next_at = 0, math.inf
            return
        seconds = self._steps.prefill_seconds(current.num_tokens)
        if batch:
            mean = self._run_context = self._context_base / batch + self._num_steps
            row = self._steps.row(batch)
            if not current.num_tokens:
                self._is_run = True
                if not self._planned.num_tokens:
                    k = self._run_steps = self._run_length(batch)
                    self.next_at = now + k * row.at(mean + (k - 1) / 2)
                    return
            seconds += row.at(mean)
        self.next_at = now + seconds

    def _decodes_behind(self, current: _Chunk) -> int:
        """Streams that decode in the step behind the one that begins: not those whose last token that one computes."""
        step, going_on = self._num_steps + 1, len(self._decoding)
        if self._decoding and self._decoding[0][0] <= step:
            going_on -= sum(entry[0] <= step for entry in self._decoding)
        return going_on + sum(stream.tokens_to_come > 1 for stream in current.completing)

    def _run_length(self, batch: int) -> int:
        """Steps until a stream ends, or until the KV slots may run out."""
        steps = self._decoding[0][0] - self._num_steps
        room = (self.profile.kv_tokens - self._kv_used()) // batch - 1
        return max(min(steps, room), 1)

    def _cut_run(self, now: float) -> None:
        """Lets the run end with the step that is under way: behind the next one, the newcomer's prompt is computed."""
        row, mean, begun = self._steps.row(len(self._decoding)), self._run_context, self._run_begun
        k = min(self._steps_done(now) + 1, self._run_steps)
        if k < self._run_steps:
            self._run_steps, self.next_at = k, begun + k * row.at(mean + (k - 1) / 2)

    def _steps_done(self, now: float) -> int:
        """Whole steps of the present run that are over."""
        most = self._run_steps - 1
        if not self._is_run or most <= 0:
            return 0
        row, mean, elapsed = self._steps.row(len(self._decoding)), self._run_context, now - self._run_begun
        k = min(int(elapsed / row.at(mean)), most)
        k = min(int(elapsed / row.at(mean + k / 2)), most)
        while k < most and (k + 1) * row.at(mean + k / 2) <= elapsed:
            k += 1
        while k > 0 and k * row.at(mean + (k - 1) / 2) > elapsed:
            k -= 1
        return k

    def _first_token(self, stream: Stream, now: float, n: int, ended: list[Stream]) -> None:
        self._prefilling.remove(stream)
        self._prefill_context -= stream.context_tokens
        if stream.run_first_at < 0.0:
            stream.run_first_at = now
            if stream.first_at < 0.0:
                stream.first_at = now
        stream.agent_tokens += 1
        self._publish(stream)
        to_come = stream.tokens_to_come
        if to_come <= 0:
            ended.append(stream)
            return
        stream.end_step = n + to_come
        self._context_base += stream.context_tokens - n
        heapq.heappush(self._decoding, (stream.end_step, stream.order, stream))

    def _enqueue(self, stream: Stream) -> None:
        self._order += 1
        stream.order = self._order
        self._waiting_tokens += stream.context_tokens
        heapq.heappush(self._waiting, (stream.priority, stream.order, stream))

    def _plan(self, num_decodes: int) -> _Chunk:
        """The prefill of a step: prompts under way first, then new ones while rows, KV slots and budget last."""
        most = (num_decodes and self.profile.company_tokens) or self.profile.max_batch_tokens
        budget = most - num_decodes
        num_tokens = 0
        completing: list[Stream] = []
        for stream in self._prefilling:
            if budget <= num_tokens:
                break
            if stream.uncomputed:
                num_tokens += self._compute(stream, budget - num_tokens, completing)
        while self._waiting and num_tokens < budget:
            stream = self._waiting[0][2]
            running = len(self._prefilling) + len(self._decoding)
            if running >= self.profile.max_running_requests:
                break
            room = self.profile.kv_tokens - self._kv_used() - running * self.profile.page_tokens
            if running and stream.context_tokens > room:
                break
            heapq.heappop(self._waiting)
            self._waiting_tokens -= stream.context_tokens
            self._start(stream)
            num_tokens += self._compute(stream, budget - num_tokens, completing)
        return _Chunk(num_tokens, completing) if num_tokens else _NOTHING

    def _start(self, stream: Stream) -> None:
        cached = min(self.held_units(stream.prefix, stream.units) * UNIT_TOKENS, stream.context_tokens - 1)
        if cached:
            self._cache.move_to_end(stream.prefix)
        if not stream.started:
            stream.cached_tokens, stream.started = cached, True
        stream.uncomputed = stream.context_tokens - cached
        self._uncomputed += stream.uncomputed
        self._prefilling.append(stream)
        self._prefill_context += stream.context_tokens

    def _compute(self, stream: Stream, budget: int, completing: list[Stream]) -> int:
        count = min(stream.uncomputed, budget)
        stream.uncomputed -= count
        self._uncomputed -= count
        if not stream.uncomputed:
            completing.append(stream)
        return count

    # KV slots.

    def _kv_used(self) -> int:
        return self._context_base + self._num_steps * len(self._decoding) + self._prefill_context

    def _make_room(self) -> None:
        """Preempts the lowest and youngest while the next two steps may not fit; they are computed again later."""
        while len(self._decoding) > 1 and self._kv_used() + 2 * len(self._decoding) > self.profile.kv_tokens:
            victim = max(self._decoding, key=lambda entry: (entry[2].priority, entry[1]))
            self._decoding.remove(victim)
            heapq.heapify(self._decoding)
            stream = victim[2]
            left = victim[0] - self._num_steps
            stream.agent_tokens = stream.output_tokens - stream.delivered - left
            self._context_base -= stream.context_tokens - self._num_steps
            self.num_preemptions += 1
            self._waiting_tokens += stream.context_tokens
            heapq.heappush(self._waiting, (stream.priority, stream.order, stream))

    def _step_seconds(self, batch: int, context: float) -> float:
        return self._steps.row(batch).at(context)

    def _mean_context(self, n: int) -> float:
        return self._context_base / len(self._decoding) + n if self._decoding else 0.0

    # The prefix cache: only shared beginnings are in it, for nobody asks for others.

    def _publish(self, stream: Stream) -> None:
        if stream.prefix < 0:
            return
        held = self._cache.get(stream.prefix, ())
        if len(held) < len(stream.units):
            self.stored += stream.units[len(held) :]
            self._cached_units += len(stream.units) - len(held)
            self._cache[stream.prefix] = stream.units
        self._cache.move_to_end(stream.prefix)

    def _trim_cache(self) -> None:
        free = (self.profile.kv_tokens - self._kv_used()) // UNIT_TOKENS
        while self._cache and self._cached_units > free:
            _, units = self._cache.popitem(last=False)
            self._cached_units -= len(units)
            self.removed += units
