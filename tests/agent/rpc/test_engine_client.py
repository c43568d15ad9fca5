"""EngineClient against a real engine process on the null device, and the pure parts beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2, generation_service_pb2
from dragoman.v1.generation_service_pb2 import GenerateRequest
from dragoman_agent.config import AgentSettings
from dragoman_agent.device.null_model import default_null_plan, open_null_model
from dragoman_agent.engine.frames import encode
from dragoman_agent.engine.messages import (
    Delta,
    Failed,
    Fatal,
    Finished,
    LogprobEntry,
    Progress,
    Ready,
    Sampling,
    Start,
    Stop,
    Warmed,
)
from dragoman_agent.engine_process import EngineProcess
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.rpc.convert import fill_response, merge_deltas
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.gate import Capacity, Gate, Phase, StepClock
from dragoman_agent.rpc.served_model import INLINE_TEXT_CHARS, served_model
from dragoman_agent.rpc.streaming import CursorTrack
from dragoman_agent.startup import EarlyEngine, engine_config
from dragoman_agent.tickets import OPEN_GRANT
from dragoman_text import TextTokenizer


class Listener:
    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.progress: list[Progress] = []
        self.warmed: list[Warmed] = []
        self.deaths: list[tuple[int, str]] = []
        self.died = asyncio.Event()

    def engine_progress(self, progress: Progress) -> None:
        self.progress.append(progress)

    def engine_ready(self, ready: Ready) -> None:
        self.ready.set()

    def engine_warmed(self, warmed: Warmed) -> None:
        self.warmed.append(warmed)

    def engine_died(self, reason: int, message: str) -> None:
        self.deaths.append((reason, message))
        self.died.set()


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = asyncio.Event()

    def deliver(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, Delta):
            self.ended.set()


class Rig:
    """A client, its engine, and what it said."""

    def __init__(self, settings: AgentSettings | None = None) -> None:
        settings = settings or AgentSettings(device="null", open=True)
        model = open_null_model("null")
        plan = default_null_plan(model, max_num_seqs=2, max_num_waiting=1)
        self.process = EarlyEngine("null").configure(engine_config(settings, plan))
        self.listener = Listener()
        self.client = EngineClient(self.process, self.listener, TextTokenizer.from_files(model.tokenizer))
        self.ends: list[tuple[Event, int]] = []

    def submit(self, request_id: str, max_tokens: int = 4, credit: int = 256) -> Sink:
        sink = Sink()
        start = Start(request_id, [1, 2, 3], Sampling(temperature=0.0), Stop(max_tokens), credit=credit)
        self.client.submit(start, sink, lambda event, count: self.ends.append((event, count)))
        return sink


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.client.start()
    try:
        async with asyncio.timeout(30):
            await made.listener.ready.wait()
        yield made
    finally:
        await made.client.stop(3)


async def test_events_reach_their_sink_and_one_end_is_told(rig: Rig) -> None:
    sinks = [rig.submit(f"r{i}", max_tokens=3 + i) for i in range(3)]
    async with asyncio.timeout(5):
        for sink in sinks:
            await sink.ended.wait()
        await rig.client.wait_idle()
    for index, sink in enumerate(sinks):
        assert {event.request_id for event in sink.events} == {f"r{index}"}
        assert isinstance(sink.events[-1], Finished)
    assert sorted(count for _, count in rig.ends) == [3, 4, 5]
    assert rig.client.num_live_seqs == 0 and not rig.client.live


async def test_what_the_start_left_for_later_is_told_once_it_is_done(rig: Rig) -> None:
    assert not rig.listener.warmed, "the null device leaves nothing"
    told = Warmed({"decode_steps": [(1, 128, 0.5)]}, "no memory for the rest")
    rig.client._data_received(encode(told))
    (heard,) = rig.listener.warmed
    assert heard == Warmed({"decode_steps": [[1, 128, 0.5]]}, "no memory for the rest") and rig.client.is_serving


async def test_detached_request_stays_live_until_the_engine_says_so(rig: Rig) -> None:
    sink = rig.submit("gone", max_tokens=30_000, credit=1)
    rig.client.cancel("gone", detach=True)
    assert "gone" in rig.client.live
    rig.client.cancel("gone")
    rig.client.cancel("unknown")
    async with asyncio.timeout(5):
        await rig.client.wait_idle()
    assert not sink.ended.is_set()
    assert [event.cancelled for event, _ in rig.ends if isinstance(event, Finished)] == [True]


async def test_death_fails_every_live_request_once(rig: Rig) -> None:
    sinks = [rig.submit(f"r{i}", max_tokens=30_000, credit=1) for i in range(2)]
    os.kill(rig.client.pid, 9)
    async with asyncio.timeout(2):
        await rig.listener.died.wait()
    for sink in sinks:
        last = sink.events[-1]
        assert isinstance(last, Failed) and last.reason == error_pb2.ERROR_REASON_AGENT_LOST
    assert len(rig.listener.deaths) == 1 and "signal 9" in rig.listener.deaths[0][1]
    assert rig.client.is_dead and not rig.client.is_serving


async def test_stop_tells_the_streams_and_nobody_hears_of_a_death(rig: Rig) -> None:
    sink = rig.submit("r", max_tokens=30_000, credit=1)
    await rig.client.stop(3)
    assert isinstance(sink.events[-1], Failed)
    assert not rig.listener.deaths


async def test_wedged_engine_does_not_serve(rig: Rig) -> None:
    assert rig.client.is_serving
    rig.client._step_age_limit = 0.0
    await asyncio.sleep(0.01)
    assert not rig.client.is_serving


async def test_wedged_engine_lets_its_callers_go_and_frees_them_when_it_wakes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = rig.submit("r", max_tokens=30_000, credit=1)
    assert rig.client.let_go_when_wedged() == 0
    monkeypatch.setattr("dragoman_agent.rpc.engine_client.WEDGED_SECONDS", 0.0)
    os.kill(rig.client.pid, signal.SIGSTOP)
    try:
        assert rig.client.let_go_when_wedged() == 1
        assert rig.client.let_go_when_wedged() == 0
        last = sink.events[-1]
        assert isinstance(last, Failed) and last.reason == error_pb2.ERROR_REASON_AGENT_LOST
        assert "r" in rig.client.live
        num_events = len(sink.events)
    finally:
        os.kill(rig.client.pid, signal.SIGCONT)
    async with asyncio.timeout(5):
        await rig.client.wait_idle()
    assert isinstance(rig.ends[-1][0], Finished) and rig.ends[-1][0].cancelled and len(sink.events) == num_events


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_engine_that_said_its_last_word_and_does_not_end_is_ended(rig: Rig, is_stopped: bool) -> None:
    """A driver may hold up a process whose device has failed. Streams hear of it before anything is waited for, and nothing after."""
    sink = rig.submit("r", max_tokens=30_000, credit=1)
    last_word = encode(Fatal(int(error_pb2.ERROR_REASON_DEVICE_FAULT), "the device failed: so"))
    late = encode(Fatal(int(error_pb2.ERROR_REASON_INTERNAL), "what was still on its way"))
    rig.client._data_received(last_word + late)
    assert [words for _, words in rig.listener.deaths] == ["the device failed: so"]
    last = sink.events[-1]
    assert isinstance(last, Failed) and last.reason == error_pb2.ERROR_REASON_DEVICE_FAULT
    assert rig.client.is_dead and rig.client._process.returncode is None, "it may have something to write yet"
    if is_stopped:
        await rig.client.stop(3)
    assert await ending(rig) == -9
    assert rig.client._fatal is not None and rig.client._fatal.message == "the device failed: so"


async def ending(rig: Rig) -> int:
    """The exit code of the engine, which ends soon."""
    await asyncio.wait_for(rig.client._exited.wait(), 1)
    code = rig.client._process.returncode
    assert code is not None
    return code


async def test_a_hung_engine_is_given_up_after_a_minute(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rig.client.give_up_when_hung() and not rig.client.is_dead
    os.kill(rig.client.pid, signal.SIGSTOP)
    monkeypatch.setattr("dragoman_agent.rpc.hang_watch.GIVEN_UP_SECONDS", 0.0)
    assert rig.client.give_up_when_hung() and rig.client.is_dead
    assert "is given up" in rig.listener.deaths[0][1] and await ending(rig) == -9
    assert not rig.client.give_up_when_hung()


async def test_gate_holds_the_last_word(rig: Rig) -> None:
    metrics = AgentMetrics(device_kind="null", waiting_by_class=lambda: (0, 0, 0))
    gate = Gate(rig.client, Capacity(2, 1), None, metrics, lambda: 0.01)

    def admit(request_id: str, choices: int = 1) -> str:
        start = Start(request_id, [1], Sampling(), Stop(1000), num_choices=choices, credit=1)
        try:
            gate.admit(start, OPEN_GRANT, Sink())
        except DragomanError as error:
            assert error.retryable == (error.retry_delay is not None)
            return error.reason_name
        return "accepted"

    assert admit("early") == "model_loading"
    gate.phase = Phase.SERVING
    assert [admit("a"), admit("a"), admit("b"), admit("c"), admit("d")] == [
        "accepted",
        "duplicate_request",
        "accepted",
        "accepted",
        "queue_full",
    ]
    assert 5.0 < gate.retry_delay() <= 10.0, "1000 tokens to go at 10 ms each"
    assert gate.waiting_by_class()[1] == 3
    for request_id in "abc":
        rig.client.cancel(request_id)
    async with asyncio.timeout(5):
        await rig.client.wait_idle()
    assert admit("wide", choices=128) == "accepted", "wider than the agent, on an idle one"
    assert admit("next") == "queue_full"
    gate.phase = Phase.CLOSED
    assert admit("late") == "agent_draining"


async def test_an_engine_that_ended_before_it_was_listened_for_has_its_last_word() -> None:
    settings = AgentSettings(device="null", open=True, null_oracle="script:/no/such/file")
    made = Rig(settings)
    ended = threading.Event()
    made.process.watch(ended.set)
    assert await asyncio.to_thread(ended.wait, 20)
    await made.client.start()
    try:
        async with asyncio.timeout(5):
            await made.listener.died.wait()
        ((_, message),) = made.listener.deaths
        assert "/no/such/file" in message and made.listener.progress
    finally:
        await made.client.stop(3)


def test_socket_directory_is_private_and_goes_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = EngineProcess([sys.executable, "-c", "import time; time.sleep(60)"])
    (directory,) = tmp_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert process.returncode is None
    process.kill()
    process.kill()
    assert process.returncode == -9 and not list(tmp_path.iterdir())


def delta(cursor: int, *ids: int, choice: int = 0, **fields: Any) -> Delta:
    return Delta("r", choice, cursor, list(ids), "".join(map(chr, ids)), **fields)


def test_deltas_merge_only_where_they_follow_each_other() -> None:
    merged = merge_deltas(delta(0, 97), delta(1, 98, finish="stop", stop_string="x"))
    assert merged == delta(0, 97, 98, finish="stop", stop_string="x")
    assert merge_deltas(delta(0, 97), delta(2, 98)) is None
    assert merge_deltas(delta(0, 97), delta(1, 98, choice=1)) is None
    assert merge_deltas(delta(0, 97, finish="length"), delta(1, 98)) is None


def test_conversion_carries_every_field() -> None:
    event = delta(3, 97, choice=2, finish="stop", stop_token_id=97, logprobs=[LogprobEntry(97, -0.5, [(98, -1.0)])])
    message = generation_service_pb2.GenerateResponse()
    fill_response(message, event, lambda token: bytes([token]))
    assert (message.delta.cursor, message.delta.choice_index, message.delta.text) == (3, 2, "a")
    assert message.delta.finish.stop_token_id == 97
    assert message.delta.finish.reason == generation_service_pb2.FINISH_REASON_STOP
    (entry,) = message.delta.logprobs
    assert (entry.token_bytes, entry.logprob, entry.top[0].token_bytes) == (b"a", -0.5, b"b")
    failed = generation_service_pb2.GenerateResponse()
    fill_response(failed, Failed("r", int(error_pb2.ERROR_REASON_DEVICE_FAULT), "broke", 5, 2, 1), bytes)
    assert failed.failed.error.reason == error_pb2.ERROR_REASON_DEVICE_FAULT
    assert (failed.failed.usage.prompt_tokens, failed.failed.usage.cached_tokens) == (5, 2)


def test_credit_follows_the_choice_that_is_furthest_behind() -> None:
    track = CursorTrack(Start("r", [1], Sampling(), Stop(), num_choices=3))
    track.advance(delta(0, 97, 97, 97, choice=0))
    assert track.least_open() == 3, "a choice that has not begun holds nobody up"
    track.advance(delta(0, 97, choice=1))
    assert track.least_open() == 1
    track.advance(delta(1, 97, choice=1, finish="stop"))
    assert track.least_open() == 3


def test_step_clock_forgets_after_a_second() -> None:
    now = [0.0]
    clock = StepClock(0.5, lambda: now[0])
    assert (clock.mean(), clock.mean_or_predicted()) == (0.0, 0.5)
    clock.add(0.1)
    now[0] = 0.9
    clock.add(0.3)
    assert clock.mean() == pytest.approx(0.2)
    now[0] = 1.5
    assert clock.mean() == pytest.approx(0.3)
    now[0] = 3.0
    assert clock.mean() == 0.0


def test_long_text_goes_to_a_thread_and_hopeless_text_nowhere() -> None:
    model = served_model(open_null_model("null"), (), 32_768)
    ids = model.prompt_now(GenerateRequest(text="x" * INLINE_TEXT_CHARS))
    assert ids is not None and len(ids) == INLINE_TEXT_CHARS
    assert model.prompt_now(GenerateRequest(text="x" * (INLINE_TEXT_CHARS + 1))) is None
    with pytest.raises(DragomanError, match="at least"):
        model.prompt_now(GenerateRequest(text="x" * 15_000_000))
    assert model.token_bytes(5) == b"\x05" and model.token_bytes(100_000) == b""


def test_names_of_the_model() -> None:
    model = served_model(open_null_model("null"), ("chat", "other"), 64)
    for name in ("", "chat", "other"):
        model.check_name(name)
    with pytest.raises(DragomanError, match="serves chat, other"):
        model.check_name("null")
