"""The engine as its own process: life from the first frame to the exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dragoman.v1 import error_pb2
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.messages import (
    Cancel,
    Delta,
    Failed,
    Fatal,
    Finished,
    Progress,
    Ready,
    Sampling,
    Shutdown,
    Start,
    Step,
    Stop,
)
from dragoman_agent.engine.process import main

CONFIG = EngineConfig(
    "null", "null", default_null_plan(NullModel(), num_blocks=128, max_num_seqs=16), log_level="error"
)


class Engine:
    """A spawned engine process and the socket to it."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.listener.settimeout(20)
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dragoman_agent.engine.process",
                "--socket",
                str(path),
                "--import-device",
                "null",
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(config.to_json())
        self.process.stdin.close()
        self.stream, _ = self.listener.accept()
        self.stream.settimeout(20)
        self.decoder = FrameDecoder()
        self.unread: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.stream.sendall(b"".join(encode(m) for m in messages))

    def read_until(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Messages up to the first that is wanted; fails at the end of the stream."""
        seen: list[Any] = []
        while True:
            while self.unread:
                seen.append(self.unread.pop(0))
                if wanted(seen[-1]):
                    return seen
            data = self.stream.recv(1 << 20)
            assert data, f"the engine closed the stream after {seen[-2:]}"
            self.unread = self.decoder.feed(data)

    def ready(self) -> list[Any]:
        return self.read_until(lambda m: isinstance(m, Ready))

    def exit_code(self, timeout: float = 5.0) -> int:
        return self.process.wait(timeout)

    def errors(self) -> str:
        """What it wrote to stderr, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.stream.close()
        self.listener.close()


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def begin(config: EngineConfig = CONFIG) -> Engine:
        engines.append(Engine(tmp_path / f"s{len(engines)}", config))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def request(name: str, max_tokens: int = 5, credit: int = 1 << 30) -> Start:
    return Start(name, list(b"hello"), Sampling(temperature=0.0), Stop(max_output_tokens=max_tokens), credit=credit)


def has(kind: type) -> Callable[[Any], bool]:
    return lambda m: isinstance(m, Step) and any(isinstance(e, kind) for e in m.events)


def test_a_trace_is_written_while_it_serves(spawn: Callable[..., Engine], tmp_path: Path) -> None:
    engine = spawn(replace(CONFIG, trace_dir=str(tmp_path / "trace")))
    engine.ready()
    engine.send(request("a", max_tokens=30))
    engine.read_until(has(Finished))
    engine.send(Shutdown())
    assert engine.exit_code() == 0
    (path,) = (tmp_path / "trace").iterdir()
    events = json.loads(path.read_text())
    assert {"receive", "commands", "schedule", "take", "frame", "send"} <= {event["name"] for event in events}
    assert sum(event["args"]["decode_tokens"] for event in events if event["name"].startswith("step ")) >= 29


def test_a_trace_that_cannot_be_written_is_said(spawn: Callable[..., Engine]) -> None:
    engine = spawn(replace(CONFIG, trace_dir="/proc/none"))
    (fatal,) = engine.read_until(lambda m: isinstance(m, Fatal))
    assert fatal.message.startswith("--trace-dir /proc/none: cannot write there") and "Traceback" not in fatal.message
    assert engine.exit_code() == 1


def test_from_start_to_tokens_to_the_end(spawn: Callable[..., Engine]) -> None:
    engine = spawn()
    opening = engine.ready()
    assert time.monotonic() - engine.begun < 5.0
    assert [m.phase for m in opening if isinstance(m, Progress)] == ["open", "kv", "warmup", "warmup"]
    assert opening[-1].info["model"] == "null"
    engine.send(request("a"), request("b"))
    steps = [*engine.read_until(has(Finished))]
    deltas = [e for s in steps for e in s.events if isinstance(e, Delta)]
    assert [d.cursor for d in deltas if d.request_id == "a"] == [0, 1, 2, 3, 4]
    assert [d.token_ids for d in deltas if d.request_id == "a"] == [d.token_ids for d in deltas if d.request_id == "b"]
    assert len([s for s in steps if s.events]) == 5, "one frame a step, both requests in it"
    engine.send(Shutdown())
    assert engine.exit_code() == 0


def test_idle_ticks_come_each_second(spawn: Callable[..., Engine]) -> None:
    engine = spawn()
    engine.ready()
    begun = time.monotonic()
    first, second = (engine.read_until(lambda m: isinstance(m, Step))[-1] for _ in range(2))
    assert 1.0 < time.monotonic() - begun < 4.0
    assert first.events == second.events == [] and second.step_seconds == 0.0
    assert second.load.free_blocks == second.load.total_blocks


def test_shutdown_ends_each_request_with_a_failure(spawn: Callable[..., Engine]) -> None:
    engine = spawn(replace(CONFIG, null_speed=1.0))
    engine.ready()
    engine.send(request("long", 10_000), request("none", 10, credit=0))
    engine.read_until(has(Delta))
    engine.send(Shutdown())
    failed = [e for e in engine.read_until(has(Failed))[-1].events if isinstance(e, Failed)]
    assert {e.request_id for e in failed} == {"long", "none"}
    assert all(e.reason == error_pb2.ERROR_REASON_AGENT_LOST for e in failed)
    assert engine.exit_code() == 0


def test_it_ends_when_the_parent_is_gone_and_not_at_an_interrupt(spawn: Callable[..., Engine]) -> None:
    engine = spawn()
    engine.ready()
    os.kill(engine.process.pid, signal.SIGINT)
    engine.send(request("a", 2))
    engine.read_until(has(Finished))
    engine.send(request("b", 100_000))
    engine.read_until(has(Delta))
    engine.stream.close()
    assert engine.exit_code() == 0


def test_cancel_over_the_socket(spawn: Callable[..., Engine]) -> None:
    engine = spawn(replace(CONFIG, null_speed=1.0))
    engine.ready()
    engine.send(request("a", 100_000))
    engine.read_until(has(Delta))
    engine.send(Cancel("a"))
    step = engine.read_until(has(Finished))[-1]
    assert step.events[-1].cancelled and step.load.running == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"null_oracle": "poetry"}, "null oracle 'poetry' is not known"),
        ({"model": "llama"}, "serves only the null model"),
        ({"device": "tpu", "model": "/nowhere"}, "no such file"),
    ],
)
def test_a_start_that_fails_says_why_and_exits(spawn: Callable[..., Engine], change: Any, words: str) -> None:
    engine = spawn(replace(CONFIG, **change))
    fatal = engine.read_until(lambda m: isinstance(m, Fatal))[-1]
    assert words in fatal.message
    assert engine.exit_code() == 1
    assert "Traceback" not in engine.errors()


def test_garbage_on_the_socket_ends_it_with_a_word(spawn: Callable[..., Engine]) -> None:
    engine = spawn()
    engine.ready()
    engine.stream.sendall(b"\x03\x00\x00\x00xyz")
    assert "unreadable" in engine.read_until(lambda m: isinstance(m, Fatal))[-1].message
    assert engine.exit_code() == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ('{"device": "null"}', "'model' is missing"),
        ("[]", "JSON object"),
        (CONFIG.to_json().replace('"page_size"', '"pagesize"'), "unknown key 'pagesize'"),
        (CONFIG.to_json(), "cannot connect"),
    ],
)
def test_a_bad_start_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["--socket", "/nowhere/socket"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("null", 1, "the agent has ended before it had a plan"),
        ("cuda", 1, "the agent has ended before it had a plan"),
        ("tpu", 2, "not one of cpu"),
    ],
)
def test_without_a_config_it_ends_with_a_word(kind: str, code: int, words: str) -> None:
    command = [sys.executable, "-m", "dragoman_agent.engine.process", "--socket", "/nowhere", "--import-device", kind]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def test_config_round_trip() -> None:
    assert EngineConfig.from_json(CONFIG.to_json()) == CONFIG
    assert EngineConfig.from_json(CONFIG.to_json()).plan.digest() == CONFIG.plan.digest()
