"""The loop over a socket pair inside the test: what a process cannot be made to do on demand."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from tests.agent.engine.tiers_lab import HOST

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import DeviceError, StepBatch, StepHandle
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine import loop
from dragoman_agent.engine import tiers as tiers_module
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.loop import Connection, run
from dragoman_agent.engine.messages import Credit, Failed, Fatal, Finished, Shutdown, Step, TierReport


class Failing(NullDevice):
    """Fails at its n-th step, in submit or in result."""

    def __init__(self, step: int, where: str) -> None:
        super().__init__()
        self.step, self.where = step, where

    def submit(self, batch: StepBatch) -> StepHandle:
        if batch.step < self.step:
            return super().submit(batch)
        if self.where == "submit":
            raise DeviceError("illegal address in kernel")
        return self

    def result(self) -> Any:
        raise DeviceError("illegal address in kernel")


def read_all(stream: socket.socket) -> list[Any]:
    """What was sent so far."""
    decoder, messages = FrameDecoder(), []
    stream.setblocking(False)
    while True:
        try:
            data = stream.recv(1 << 20)
        except BlockingIOError:
            return messages
        messages.extend(decoder.feed(data))


@pytest.mark.parametrize("where", ["submit", "result"])
def test_a_device_failure_fails_every_request_then_the_engine(lab: Any, start: Any, pair: Any, where: str) -> None:
    ours, connection = pair
    engine = lab(device=Failing(3, where))
    ours.sendall(b"".join(encode(start(f"r{i}", "abc", 50)) for i in range(3)))
    assert run(connection, engine.core) is False
    messages = read_all(ours)
    events = [e for m in messages if isinstance(m, Step) for e in m.events]
    failed = [e for e in events if isinstance(e, Failed)]
    assert sorted(e.request_id for e in failed) == ["r0", "r1", "r2"]
    assert all(e.reason == error_pb2.ERROR_REASON_DEVICE_FAULT and "illegal address" in e.message for e in failed)
    assert isinstance(messages[-1], Fatal) and "illegal address" in messages[-1].message
    engine.assert_idle()


def test_sending_and_reading_count_as_host_work(pair: tuple[socket.socket, Connection]) -> None:
    stream, connection = pair
    connection.send(Fatal(1, "x" * 100_000))
    sent = connection.host_work.take()
    stream.sendall(encode(Credit("r", 5)))
    assert connection.receive(0.0) == [Credit("r", 5)]
    assert sent > 0 and connection.host_work.take() > 0
    assert connection.receive(0.05) == [] and connection.host_work.take() < 0.04, "waiting is no work"


def test_a_command_that_is_none_is_ignored(lab: Any, start: Any, pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours, connection = pair
    engine = lab()
    ours.sendall(encode(Fatal(1, "not for you")) + encode(Credit("nobody", 5)) + encode(start("r", "abc", 2)))
    thread = threading.Thread(target=run, args=(connection, engine.core))
    thread.start()
    decoder, events = FrameDecoder(), []
    while not any(isinstance(e, Finished) for e in events):
        events += [e for m in decoder.feed(ours.recv(1 << 20)) for e in m.events]
    ours.sendall(encode(Shutdown()))
    thread.join(5)
    assert not thread.is_alive()
    assert "Fatal" in caplog.text


def test_it_ends_when_the_other_end_is_gone(lab: Any, start: Any, pair: Any) -> None:
    ours, connection = pair
    ours.sendall(encode(start("r", "abc", 1000)))
    ours.close()
    assert run(connection, lab().core) is True
    assert not connection.is_open


def test_reports_of_a_host_tier_that_grows_do_not_take_the_place_of_ticks(
    lab: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning tens of GB takes longer than an engine may be silent for: by its frames of steps alone it counts as alive."""
    monkeypatch.setattr(loop, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(tiers_module, "REPORT_SECONDS", 0.01)
    ours, connection = pair
    core = lab(tiers=HOST).core
    thread = threading.Thread(target=run, args=(connection, core))
    thread.start()
    for _ in range(60):
        core.tiers.lower.host.index.capacity += 1
        ours.sendall(encode(Credit("nobody", 5)))  # wakes the loop, as copies and other reports do
        time.sleep(0.02)
    ours.sendall(encode(Shutdown()))
    thread.join(5)
    kinds = [type(message) for message in read_all(ours)]
    assert kinds.count(TierReport) > 20, "the reports are what this is about"
    assert kinds.count(Step) >= 6
