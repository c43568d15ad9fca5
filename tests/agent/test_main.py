"""The agent process from outside: bad settings, start, signals, death of its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.needs import need

from dragoman.channel import channel_options
from dragoman.errors import from_rpc_error
from dragoman.v1 import generation_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import (
    AttachRequest,
    AttachStart,
    GenerateRequest,
    GenerateResponse,
    StopCriteria,
)

StartAgent = Callable[..., Any]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def run_agent(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "dragoman_agent.main", "--port", "0", "--metrics-port", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def only_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refused start."""
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert not done.stdout
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "null"], ["--controllers", "--open"]),
        (["--device", "null", "--open", "--host", "0.0.0.0"], ["loopback", "--controllers"]),
        (["--device", "tpu", "--open"], ["tpu", "null"]),
        (["--device", "null", "--opne"], ["--opne", "--open"]),
        (["--device", "null", "--open", "--model", "/no/such"], ["/no/such", "null"]),
        (["--device", "cpu", "--open", "--model", "/no/such/model.gguf"], ["/no/such/model.gguf", "no such file"]),
        (["--device", "null", "--open", "--max-context", "1"], ["--max-context"]),
        (["--device", "null", "--open", "--null-speed", "-1"], ["--null-speed"]),
        (["--open", "--pal", "of"], ["--pal", "on, off"]),
        (["--open", "--model", "random:qwen3-0.6b", "--profile", "rtx4091"], ["did you mean rtx4090?"]),
        (
            ["--open", "--device", "cpu", "--model", "random:smollm2-135m", "--profile", "l4", "--profile-force"],
            ["it is of a cuda device, this is a cpu device", "--device"],
        ),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(flags: list[str], words: list[str]) -> None:
    message = only_error(run_agent(*flags))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{% for m in messages %}", "not valid at line 1"),
        (b"x" * (1 << 20) + b"y", "at most 1048576 are allowed"),
    ],
)
def test_a_chat_template_that_cannot_be_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    message = only_error(run_agent("--open", "--device", "null", "--chat-template", str(file)))
    assert f"--chat-template {file}" in message and words in message


def test_truncated_model_file_is_refused_before_anything_starts(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x00" * 29)
    assert "broken.gguf" in only_error(run_agent("--open", "--device", "cpu", "--model", str(broken)))


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_port_in_use_names_its_holder(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_agent("--device", "null", "--open", flag, str(port))
    lines = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert done.returncode == 2 and len(lines) == 1
    assert str(port) in lines[0] and flag in lines[0] and "pid" in lines[0]


def test_an_unreadable_script_is_said_and_the_exit_is_not_0() -> None:
    done = run_agent("--device", "null", "--open", "--announce", "--null-oracle", "script:/no/such/file")
    assert done.returncode == 1
    assert '"event": "fatal"' in done.stdout and "/no/such/file" in done.stdout
    assert "Traceback" not in done.stderr


def test_null_device_never_imports_torch(shared_agent: Any) -> None:
    for process in (psutil.Process(shared_agent.process.pid), shared_agent.engine):
        maps = {Path(entry.path).name for entry in process.memory_maps()}
        assert not any("torch" in name for name in maps)
        assert any("cygrpc" in name or "_umath" in name for name in maps)
    code = (
        "import sys; sys.argv=['x']; import dragoman_agent.main, dragoman_agent.agent, dragoman_agent.startup;"
        "import dragoman_agent.pal.startup; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_start_announces_serving_progress_ready(shared_agent: Any) -> None:
    kinds = [event["event"] for event in shared_agent.events]
    assert kinds[0] == "serving" and kinds[-1] == "ready"
    assert set(kinds[1:-1]) == {"progress"}
    assert shared_agent.info["device"] == "null" and shared_agent.info["kv_tokens"] > 0


def test_exposition_is_valid_prometheus_text(shared_agent: Any) -> None:
    promtool = need("promtool")
    text = scrape(shared_agent)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stderr


def scrape(agent: Any) -> str:
    with urllib.request.urlopen(f"http://{agent.metrics_address}/metrics", timeout=5) as response:
        return str(response.read().decode())


def request(max_tokens: int = 5, text: str = "hello") -> GenerateRequest:
    return GenerateRequest(request_id=str(uuid.uuid4()), text=text, stop=StopCriteria(max_output_tokens=max_tokens))


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


def open_channel(agent: Any) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(agent.address, options=channel_options())


async def generate(channel: grpc.aio.Channel, wanted: GenerateRequest) -> list[GenerateResponse]:
    stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
    return [message async for message in stub.Generate(wanted)]


async def started(channel: grpc.aio.Channel, max_tokens: int = 30_000) -> grpc.aio.UnaryStreamCall[Any, Any]:
    call = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request(max_tokens))
    for _ in range(3):
        await call.read()
    return call


async def last_of(call: grpc.aio.UnaryStreamCall[Any, Any]) -> GenerateResponse:
    """The last message of a call that must end with status OK."""
    last = None
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    assert await call.code() == grpc.StatusCode.OK
    assert last is not None
    return last


async def health(channel: grpc.aio.Channel, name: str) -> int:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return response.status


async def test_sigint_ends_streams_and_leaves_nothing(start_agent: StartAgent, tmp_path: Path) -> None:
    agent = start_agent("--null-speed", "1", environ={"TMPDIR": str(tmp_path)})
    engine = agent.engine
    async with open_channel(agent) as channel:
        calls = [await started(channel) for _ in range(8)]
        agent.signal(signal.SIGINT)
        begun = time.monotonic()
        ends = await asyncio.gather(*(last_of(call) for call in calls))
        assert {end.failed.error.reason for end in ends} == {10}  # AGENT_LOST: resume elsewhere
    assert agent.wait_exit(5) == 0
    assert time.monotonic() - begun < 5
    assert not engine.is_running()
    assert is_empty(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_one_that_is_ended_while_it_prepares_leaves_nothing(
    start_agent: StartAgent, tmp_path: Path, number: int, code: int
) -> None:
    """It reads a pipe, at whose other end nobody writes, when the signal comes."""
    template, left = tmp_path / "template", tmp_path / "tmp"
    left.mkdir()
    os.mkfifo(template)
    agent = start_agent("--chat-template", str(template), ready=False, environ={"TMPDIR": str(left)})
    with template.open("wb"):  # waits for the agent to read
        engine = agent.engine
        agent.signal(number)
        assert agent.wait_exit(10) == code  # and the end of what it and the engine say
    said = "".join(agent.log)
    assert "Traceback" not in said
    assert ("dragoman-agent: interrupted before it served" in said) == (number == signal.SIGINT)
    psutil.wait_procs([engine], timeout=10)
    # A zombie where nobody takes in what has no parent.
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    assert is_empty(left)


async def test_sigterm_drains(start_agent: StartAgent) -> None:
    agent = start_agent("--null-speed", "1", "--drain-notice", "0.5")
    async with open_channel(agent) as channel:
        call = await started(channel, max_tokens=1500)
        agent.signal(signal.SIGTERM)
        while await health(channel, "readiness") == SERVING:
            pass
        assert await health(channel, "liveness") == SERVING
        assert (await generate(channel, request()))[-1].HasField("finished"), "requests are taken during the notice"
        await asyncio.sleep(0.6)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, request())
        error = from_rpc_error(caught.value)
        assert error.reason_name == "agent_draining" and error.retry_delay
        end = await last_of(call)
        assert end.finished.usage.output_tokens == 1500
    assert agent.wait_exit(5) == 0


async def test_drain_timeout_ends_what_still_runs(start_agent: StartAgent) -> None:
    agent = start_agent("--null-speed", "1", "--drain-notice", "0", "--drain-timeout", "0.5")
    async with open_channel(agent) as channel:
        call = await started(channel)
        agent.signal(signal.SIGTERM)
        assert (await last_of(call)).failed.error.reason == 10
    assert agent.wait_exit(5) == 0


async def test_engine_killed_ends_streams_and_the_process(start_agent: StartAgent) -> None:
    agent = start_agent("--null-speed", "1")
    async with open_channel(agent) as channel:
        calls = [await started(channel) for _ in range(4)]
        attach = generation_service_pb2_grpc.GenerationServiceStub(channel).Attach()
        await attach.write(AttachRequest(start=AttachStart(stream_id=1, request=request(30_000))))
        await attach.read()
        agent.engine.kill()
        begun = time.monotonic()
        ends = await asyncio.gather(*(last_of(call) for call in calls))
        assert time.monotonic() - begun < 1.0
        assert {end.failed.error.reason for end in ends} == {10}
        assert "signal 9" in ends[0].failed.error.message
        last = None
        while (frame := await attach.read()) is not grpc.aio.EOF:
            last = frame
        assert last is not None and last.events[-1].response.failed.error.reason == 10
    assert agent.wait_exit(5) == 1
    assert agent.wait_for("fatal")["message"]


async def test_wedged_engine_is_not_serving_and_recovers(start_agent: StartAgent) -> None:
    agent = start_agent()
    async with open_channel(agent) as channel:
        agent.engine.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        while await health(channel, "readiness") == SERVING:
            await asyncio.sleep(0.05)
            assert time.monotonic() - begun < 6
        assert await health(channel, "liveness") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, request())
        assert from_rpc_error(caught.value).reason_name == "agent_lost"
        agent.engine.send_signal(signal.SIGCONT)
        while await health(channel, "readiness") != SERVING:
            await asyncio.sleep(0.05)
            assert time.monotonic() - begun < 12
        assert (await generate(channel, request()))[-1].HasField("finished")
    agent.signal(signal.SIGINT)
    agent.wait_exit(10)
    log = "".join(agent.log)
    assert 0 < log.find(": not serving") < log.find("the engine steps again: serving"), log


def test_killed_agent_leaves_nothing_behind(start_agent: StartAgent, tmp_path: Path) -> None:
    agent = start_agent(environ={"TMPDIR": str(tmp_path)})
    engine = agent.engine
    agent.process.kill()
    engine.wait(5)
    assert is_empty(tmp_path)


async def test_full_agent_refuses_with_a_delay(start_agent: StartAgent) -> None:
    agent = start_agent("--null-speed", "1", "--max-num-seqs", "2", "--max-num-waiting", "1")
    async with open_channel(agent) as channel:
        calls = [await started(channel, max_tokens=4000) for _ in range(2)]
        queued = generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request(4000))
        await queued.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, request())
        error = from_rpc_error(caught.value)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.reason_name == "queue_full" and error.retry_delay is not None and 0 < error.retry_delay <= 60
        calls[0].cancel()
        queued.cancel()
        while True:
            try:
                await generate(channel, request())
                break
            except grpc.aio.AioRpcError as full:
                assert from_rpc_error(full).reason_name == "queue_full"


async def test_reader_that_stops_holds_no_more_than_its_window(start_agent: StartAgent) -> None:
    """Bytes the client's HTTP/2 window takes, and 256 tokens of credit: then the engine stops for this request."""
    agent = start_agent()
    async with open_channel(agent) as channel:
        call = await started(channel, max_tokens=30_000)
        await asyncio.sleep(1.0)
        text = await asyncio.to_thread(scrape, agent)
        made = next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith("dragoman_output_tokens_total")
        )
        assert made < 6000
        call.cancel()
