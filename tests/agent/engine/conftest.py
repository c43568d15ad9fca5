"""An engine on the null device inside the test, with a clock that moves only when told."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.agent.engine.tiers_lab import SLOW_PREFILL, ids, prompt

from dragoman_agent.device.base import Device
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.events import Event
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.loop import Connection
from dragoman_agent.engine.messages import Delta, Embedded, Failed, Finished, Sampling, Start, Step, Stop
from dragoman_agent.engine.tiers import TierSizes
from dragoman_agent.pal.plan import Plan

MODEL = NullModel()
LOTS_OF_CREDIT = 1 << 30


@dataclass
class Clock:
    """Monotonic seconds."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """What came of one choice."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str = ""
    last: Delta | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Lab:
    """One engine and what it said."""

    def __init__(self, plan: Plan, device: Device, clock: Clock, tier_sizes: TierSizes | None = None) -> None:
        self.plan = plan
        self.clock = clock
        device.load(MODEL, plan, lambda progress: None)
        self.device = device
        self.core: EngineCore = build_core(device, MODEL, plan, clock, tier_sizes)
        self.events: list[Event] = []
        self.steps: list[Step] = []

    def run(self, *commands: Any) -> list[Event]:
        """Feed commands, run until all is over; the events since then."""
        events = run_all(self.core, commands, on_step=self.steps.append)
        self.events.extend(events)
        return events

    def turn(self, count: int = 1) -> list[Event]:
        """So many turns; their events."""
        events: list[Event] = []
        for _ in range(count):
            steps: list[Step] = []
            self.core.turn(steps.append)
            self.steps.extend(steps)
            for step in steps:
                events.extend(step.events)
        self.events.extend(events)
        return events

    def assert_idle(self) -> None:
        """Nothing is held by anyone."""
        scheduler = self.core.scheduler
        assert not self.core.requests
        assert not scheduler.running and not scheduler.waiting and not scheduler.parked and not scheduler.blocked
        assert scheduler.pool.num_free == self.plan.num_blocks - 1
        assert scheduler.pending_prefill_tokens == 0
        assert len(scheduler._free_rows) == self.plan.max_num_seqs


def gather_answers(events: Iterable[Event]) -> dict[tuple[str, int], Answer]:
    """The choices by (request id, choice). Asserts that cursors have no gap and nothing follows an end."""
    found: dict[tuple[str, int], Answer] = defaultdict(Answer)
    starts: dict[tuple[str, int], int] = {}
    over: set[str] = set()
    for event in events:
        assert event.request_id not in over, "an event after the terminal one"
        if not isinstance(event, Delta):
            over.add(event.request_id)
            continue
        key = (event.request_id, event.choice)
        answer = found[key]
        assert not answer.finish, "a delta after the choice had ended"
        starts.setdefault(key, event.cursor)
        assert event.cursor == starts[key] + len(answer.token_ids), "cursors must be contiguous"
        answer.token_ids.extend(event.token_ids)
        answer.pieces.append(event.text)
        answer.finish = event.finish
        answer.last = event
    return found


def gather_terminals(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Terminal events by request."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if isinstance(event, Finished | Failed | Embedded):
            found[event.request_id].append(event)
    return found


def make_start(request_id: str, prompt: str | list[int], max_tokens: int = 16, **overrides: Any) -> Start:
    """A greedy request with more credit than it needs; fields of Start, Sampling and Stop by name."""
    sampling = {k: overrides.pop(k) for k in list(overrides) if k in Sampling.__dataclass_fields__}
    stop = {k: overrides.pop(k) for k in list(overrides) if k in Stop.__dataclass_fields__}
    return Start(
        request_id,
        list(prompt.encode()) if isinstance(prompt, str) else prompt,
        Sampling(**{"temperature": 0.0, **sampling}),
        Stop(max_output_tokens=max_tokens, **stop),
        **{"credit": LOTS_OF_CREDIT, **overrides},
    )


@pytest.fixture
def lab() -> Callable[..., Lab]:
    """Build an engine: plan fields by name, `oracle`, a `device`, the sizes of lower tiers."""

    def build(
        *, oracle: str = "hash", device: Device | None = None, tiers: TierSizes | None = None, **plan: Any
    ) -> Lab:
        made = default_null_plan(MODEL, **{"num_blocks": 256, "max_num_seqs": 16, "max_batch_tokens": 512, **plan})
        return Lab(made, device or NullDevice(oracle), Clock(), tiers)

    return build


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    """Two ends of a stream: ours, and the engine's."""
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    yield ours, Connection(theirs)
    ours.close()
    theirs.close()


@pytest.fixture
def answers() -> Callable[[Iterable[Event]], dict[tuple[str, int], Answer]]:
    """The function that gathers events into answers."""
    return gather_answers


@pytest.fixture
def terminals() -> Callable[[Iterable[Event]], dict[str, list[Event]]]:
    """The function that gathers terminal events."""
    return gather_terminals


@pytest.fixture
def start() -> Callable[..., Start]:
    """The function that makes a Start command."""
    return make_start


@pytest.fixture
def never_evicted(lab: Any, start: Any, answers: Any) -> Any:
    """The tokens of an engine that never evicts."""

    def tokens(*seeds: int) -> dict[int, list[int]]:
        here = lab(step_model=SLOW_PREFILL)
        events = here.run(*(start(f"r{seed}", prompt(seed), 20) for seed in seeds))
        return {seed: ids(answers, events, f"r{seed}") for seed in seeds}

    return tokens
