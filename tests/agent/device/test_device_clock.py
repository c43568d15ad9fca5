"""When a step on a GPU ended, on the host's clock; on events that note the host's time themselves."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("torch")

from dragoman_agent.device import torch_steps
from dragoman_agent.device.torch_steps import DeviceClock


class Event:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """It has passed."""

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Runtime:
    def __init__(self) -> None:
        self.num_events = 0

    def new_stream(self) -> None:
        """Nothing runs."""

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def new_event(self) -> Event:
        self.num_events += 1
        return Event()


@pytest.mark.parametrize(("age", "num_events"), [(8.0, 1), (0.0, 4)])
def test_events_are_placed_where_they_happened(age: float, num_events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an anchor that is renewed each time as with one that stays."""
    monkeypatch.setattr(torch_steps, "_CLOCK_SECONDS", age)
    runtime = Runtime()
    clock = DeviceClock(runtime)  # type: ignore[arg-type]
    for _ in range(3):
        event = Event()
        event.record()
        assert clock.at(event) == pytest.approx(event.at, abs=2e-3)  # type: ignore[arg-type]
    assert runtime.num_events == num_events
