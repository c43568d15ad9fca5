"""What a device left for after the start: never beside a step, at once while nobody asks, now and then under load."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dragoman_agent.device.base import (
    DeviceError,
    DeviceMemoryError,
    PreparingDevice,
    SamplingBatch,
    StepBatch,
    StepResult,
)
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.host_work import HostWork
from dragoman_agent.engine.loop import run
from dragoman_agent.engine.messages import Failed, Fatal, Finished, Shutdown, Step, Warmed
from dragoman_agent.engine.preparing import LOADED_SECONDS, Moment, Preparing, moment

NUM_PARTS = 5


@dataclass
class Tracked:
    """A step whose result the device knows to be taken or not."""

    handle: Any
    device: LeavesParts

    def supply(self, sampling: SamplingBatch) -> None:
        self.handle.supply(sampling)

    def result(self) -> StepResult:
        self.device.num_under_way -= 1
        result: StepResult = self.handle.result()
        return result


class LeavesParts(NullDevice):
    """Loses the newest step's tokens with each part, as a GPU does."""

    prepares_later = True

    def __init__(self, fails: Exception | None = None) -> None:
        super().__init__()
        self.info: dict[str, Any] = {"graph_batch_sizes": [1], "road": "null"}
        self.parts: list[int] = []  # steps under way at each
        self.num_under_way = 0
        self.fails = fails
        self.on_part: Callable[[int], None] = lambda nth: None

    def submit(self, batch: StepBatch) -> Any:
        handle = super().submit(batch)
        self.num_under_way += 1
        return Tracked(handle, self)

    def prepare(self) -> bool:
        self.parts.append(self.num_under_way)
        self.on_part(len(self.parts))
        if self._previous is not None:
            self._previous = np.full_like(self._previous, 7)
        self.info["graph_batch_sizes"] = list(range(1, len(self.parts) + 1))
        if self.fails is not None and len(self.parts) == 3:
            raise self.fails
        return len(self.parts) < NUM_PARTS


@dataclass
class Served:
    """What was sent, and when the parts were done."""

    sent: list[Any]
    at: list[float]

    @property
    def events(self) -> list[Any]:
        return [event for message in self.sent if isinstance(message, Step) for event in message.events]


def serve(engine: Any, *commands: Any) -> Served:
    """Turns of a hundredth of a second until all is said and prepared."""
    core, device, clock = engine.core, engine.device, engine.clock
    preparing = Preparing(device, core, clock)
    served, is_left = Served([], []), True
    device.on_part = lambda nth: served.at.append(clock.now)
    for command in commands:
        core.receive(command)
    for _ in range(5000):
        ran = core.turn(served.sent.append)
        if is_left:
            is_left = preparing.turn(served.sent.append, is_busy=ran)
        clock.now += 0.01
        if not (is_left or core.requests or core.has_output):
            break
    assert not core.holds_launches
    engine.assert_idle()
    return served


def test_the_moment_of_a_part() -> None:
    assert moment(is_idle=True, is_stepping=False, seconds_since=0.0) is Moment.PREPARE
    assert moment(is_idle=False, is_stepping=True, seconds_since=0.2) is Moment.WAIT
    assert moment(is_idle=False, is_stepping=True, seconds_since=LOADED_SECONDS) is Moment.DRAIN
    assert moment(is_idle=False, is_stepping=False, seconds_since=LOADED_SECONDS) is Moment.PREPARE
    assert moment(is_idle=False, is_stepping=False, seconds_since=0.2) is Moment.WAIT, "between two steps of a stream"


@pytest.mark.parametrize(
    "extra", [{}, {"num_logprobs": 1}, {"repetition_penalty": 1.2}], ids=["plain", "logprobs", "sampled late"]
)
def test_under_steady_load_parts_wait_for_a_moment_without_a_step(
    lab: Any, start: Any, answers: Any, extra: dict[str, Any]
) -> None:
    commands = [start(f"r{i}", "abc" * (i + 1), 200, **extra) for i in range(3)]
    expected = answers(lab().run(*commands))
    engine = lab(device=LeavesParts())
    served = serve(engine, *commands)
    assert engine.device.parts == [0] * NUM_PARTS
    assert answers(served.events) == expected and len(expected["r2", 0].token_ids) == 200
    gaps = np.diff([100.0, *served.at])
    assert gaps.min() >= LOADED_SECONDS, "a stream pays for a part now and then, not for all at once"
    assert gaps.max() < 2 * LOADED_SECONDS, "nor is the rest put off until nobody asks"


def test_nobody_waits_for_a_part_to_see_tokens_that_are_there(lab: Any, start: Any) -> None:
    engine = lab(device=LeavesParts())
    told: list[bool] = []
    prepare = engine.device.prepare
    engine.device.prepare = lambda: (told.append(engine.core.has_output), prepare())[1]
    serve(engine, start("r", "abc", 200))
    assert told == [False] * NUM_PARTS


def test_while_nobody_asks_one_part_follows_another(lab: Any) -> None:
    engine = lab(device=LeavesParts())
    served = serve(engine)
    assert np.diff(served.at) == pytest.approx([0.01] * (NUM_PARTS - 1)), "one a turn"
    assert served.sent == [Warmed({"graph_batch_sizes": [1, 2, 3, 4, 5]})], "only what Ready said otherwise"


@pytest.mark.parametrize("num_tokens", [0, 300])
def test_without_memory_the_rest_is_left_out(
    lab: Any, start: Any, answers: Any, caplog: pytest.LogCaptureFixture, num_tokens: int
) -> None:
    commands = [start("r", "abc", num_tokens)] if num_tokens else []
    expected = answers(lab().run(*commands))
    engine = lab(device=LeavesParts(DeviceMemoryError("no memory left for 2 graphs; lower --memory-utilization")))
    with caplog.at_level(logging.WARNING):
        served = serve(engine, *commands)
    assert len(engine.device.parts) == 3 and answers(served.events) == expected
    (warmed,) = [message for message in served.sent if isinstance(message, Warmed)]
    assert "2 graphs" in warmed.problem and warmed.info == {"graph_batch_sizes": [1, 2, 3]}
    (record,) = caplog.records
    assert "the engine serves on: no memory left for 2 graphs; lower" in record.message


def test_a_part_is_no_work_of_a_step() -> None:
    heard: list[str] = []

    class Trace:
        def host(self, part: str, begun: float, ended: float) -> None:
            heard.append(part)

    work = HostWork(Trace())
    work.beside("prepare", 0.0)
    assert heard == ["prepare"] and work.take() == 0.0


def test_only_a_device_that_leaves_something_is_asked(lab: Any) -> None:
    device = LeavesParts()
    assert isinstance(device, PreparingDevice)
    engine = lab(device=device)
    assert Preparing.of(NullDevice(), engine.core) is None
    assert Preparing.of(device, engine.core) is not None
    device.prepares_later = False
    assert Preparing.of(device, engine.core) is None


def test_between_two_parts_the_loop_looks_for_commands(lab: Any, start: Any, pair: Any) -> None:
    ours, connection = pair
    engine = lab(device=LeavesParts())
    request = encode(start("r", "abc", 2))
    timeouts: list[float] = []
    receive = connection.receive
    connection.receive = lambda timeout: (timeouts.append(timeout), receive(timeout))[1]
    engine.device.on_part = lambda nth: ours.sendall(request) if nth == 2 else None
    thread = threading.Thread(target=run, args=(connection, engine.core, Preparing(engine.device, engine.core)))
    thread.start()
    decoder, messages = FrameDecoder(), []
    while not any(isinstance(message, Warmed) for message in messages):
        messages += decoder.feed(ours.recv(1 << 20))
    ours.sendall(encode(Shutdown()))
    thread.join(10)
    assert not thread.is_alive()
    events = [event for message in messages if isinstance(message, Step) for event in message.events]
    assert any(isinstance(event, Finished) for event in events), "before the last part"
    assert max(timeouts[:-2]) < 0.1 < timeouts[-1], "it does not sleep until all is done"
    assert engine.device.parts == [0] * NUM_PARTS


def test_a_device_that_fails_in_a_part_has_failed(lab: Any, start: Any, pair: Any) -> None:
    ours, connection = pair
    engine = lab(device=LeavesParts(DeviceError("illegal address in kernel")))
    engine.device.on_part = lambda nth: ours.sendall(encode(start("r", "abc", 9, credit=1))) if nth == 1 else None
    assert run(connection, engine.core, Preparing(engine.device, engine.core)) is False
    messages = FrameDecoder().feed(ours.recv(1 << 20))
    assert isinstance(messages[-1], Fatal) and "illegal address" in messages[-1].message
    events = [event for message in messages if isinstance(message, Step) for event in message.events]
    assert isinstance(events[-1], Failed) and events[-1].request_id == "r"
