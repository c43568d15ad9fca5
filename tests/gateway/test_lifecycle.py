"""Clients that leave, stall or wait; engines that fail; a gateway that stops. Against real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

PATH = "/v1/completions"
LONG = 30_000  # tokens; their prefill takes over a second on the slow agent
_unique = itertools.count()


def long_prompt() -> list[int]:
    """A prompt that no cache holds."""
    number = next(_unique)
    return [65 + number % 26, 65 + number // 26 % 26, *[66] * LONG]


def connect(url: str, body: dict[str, Any], *, receive_buffer: int | None = None) -> socket.socket:
    """A socket that has sent a completions request."""
    parts = urlsplit(url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect((parts.hostname, parts.port))
    data = json.dumps(body).encode()
    connection.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(data)) + data)
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    elif how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True])
def test_b22_leaving_during_prefill_frees_the_engine(slow: Any, how: str, stream: bool) -> None:
    before = slow.metric("dragoman_gateway_requests_total", route="completions", outcome="cancelled")
    num_clients = 8
    connections = [
        connect(slow.url, {"prompt": long_prompt(), "stream": stream, "max_tokens": 5000}) for _ in range(num_clients)
    ]
    slow.wait_busy(num_clients)
    for connection in connections:
        leave(connection, how)
    start = time.monotonic()
    slow.wait_idle(seconds=5)
    assert time.monotonic() - start < 4  # the eight prefills alone would take ten seconds
    after = slow.metric("dragoman_gateway_requests_total", route="completions", outcome="cancelled")
    assert after - before == num_clients
    for connection in connections:
        if how == "half-close":
            while connection.recv(65536):
                pass
        connection.close()


def test_b22_a_client_that_leaves_before_its_body_is_whole_is_counted(slow: Any) -> None:
    def count(outcome: str) -> float:
        return float(slow.metric("dragoman_gateway_requests_total", route="completions", outcome=outcome))

    cancelled, refused = count("cancelled"), count("refused")
    for how in ("close", "reset"):
        connection = socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":", 1)[1])))
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"prompt":')
        time.sleep(0.1)
        leave(connection, how)
    slow.refused("/v1/completions", prompt="x", n=0)
    deadline = time.monotonic() + 5
    while count("cancelled") < cancelled + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (count("cancelled"), count("refused")) == (cancelled + 2, refused + 1)


def test_b22_leaving_in_the_middle_of_a_stream(slow: Any) -> None:
    before = slow.metric("dragoman_gateway_requests_total", route="completions", outcome="cancelled")
    connection = connect(slow.url, {"prompt": "x", "stream": True, "max_tokens": 5000, "ignore_eos": True})
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    slow.wait_busy(1)
    connection.close()
    slow.wait_idle(seconds=4)
    assert slow.metric("dragoman_gateway_requests_total", route="completions", outcome="cancelled") == before + 1


def test_headers_go_out_before_the_first_token(slow: Any) -> None:
    start = time.monotonic()
    body = {"prompt": long_prompt(), "stream": True, "max_tokens": 1}
    with slow.http.stream("POST", PATH, json=body) as reply:
        headers_after = time.monotonic() - start
        reply.read()
    total = time.monotonic() - start
    assert total > 1.0
    assert headers_after < total / 2


def test_s24_pings_are_comments_and_can_be_switched_off(slow_stack: Any, slow: Any) -> None:
    from tests.gateway.stack import start_gateway, wait_until_ready

    for seconds, expects_ping in (("0.3", True), ("0", False)):
        gateway, url = start_gateway(slow_stack.controller_address, "--ping-interval", seconds)
        try:
            wait_until_ready(url)
            data = httpx.post(f"{url}{PATH}", json={"prompt": long_prompt(), "stream": True, "max_tokens": 2}).content
            assert (b": ping\n\n" in data) is expects_ping
            assert data.endswith(b"data: [DONE]\n\n")
            with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
                chunks = list(client.completions.create(model="null", prompt=long_prompt(), max_tokens=2, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks)
        finally:
            gateway.stop()


def test_s29_a_reader_that_stops_is_bounded_and_dropped(extra_gateway: Callable[..., str]) -> None:
    url = extra_gateway("--write-timeout", "4")
    body = {"prompt": "A", "stream": True, "max_tokens": 30_000, "ignore_eos": True}
    connection = connect(url, body, receive_buffer=4096)
    assert connection.recv(1024)
    neighbour = httpx.post(f"{url}{PATH}", json={"prompt": "A", "max_tokens": 50}, timeout=5)
    assert neighbour.status_code == 200
    deadline = time.monotonic() + 12
    cancelled = 'dragoman_gateway_requests_total{outcome="cancelled",route="completions"} 1.0'
    while cancelled not in (metrics := httpx.get(f"{url}/metrics").text) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cancelled in metrics
    tokens = next(line for line in metrics.splitlines() if line.startswith("dragoman_gateway_output_tokens_total "))
    assert 1_000 < float(tokens.split()[1]) < 4_500
    connection.close()


def test_s29_a_slow_reader_gets_everything(alphabet: Any, parse: Any, text_of: Any) -> None:
    connection = connect(
        alphabet.url, {"prompt": "A", "stream": True, "max_tokens": 3000, "ignore_eos": True}, receive_buffer=4096
    )
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(20_000)
        time.sleep(0.001)
    connection.close()
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" in head
    plain = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        plain += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    assert len(text_of(parse(plain))) == 3000


async def test_two_hundred_streams_at_once(alphabet: Any, parse: Any, text_of: Any) -> None:
    async with httpx.AsyncClient(base_url=alphabet.url, timeout=30, limits=httpx.Limits(max_connections=200)) as http:

        async def one(index: int) -> str:
            prompt = chr(65 + index % 20)
            reply = await http.post(PATH, json={"prompt": prompt, "stream": True, "max_tokens": 40})
            text: str = text_of(parse(reply.content))
            return prompt + text[:3]

        texts = await asyncio.gather(*(one(index) for index in range(200)))
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert texts == [letters[index % 20 : index % 20 + 4] for index in range(200)]


def test_a_full_queue_is_429_with_retry_after(start_stack: Callable[..., Any]) -> None:
    stack = start_stack(
        [("--null-speed", "50", "--max-num-seqs", "1", "--max-num-waiting", "1")], "--max-queue-wait", "0.2"
    )
    held = [connect(stack.url, {"prompt": "x", "max_tokens": 2000, "stream": True}) for _ in range(2)]
    time.sleep(0.5)
    reply = httpx.post(f"{stack.url}{PATH}", json={"prompt": "x", "stream": True}, timeout=10)
    assert reply.status_code == 429
    assert (reply.json()["error"]["type"], reply.json()["error"]["code"]) == ("rate_limit_error", "queue_full")
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.headers["x-should-retry"] == "true"
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.completions.create(model="null", prompt="x")
    for connection in held:
        connection.close()


def test_s17_an_engine_that_fails_in_the_middle(start_stack: Callable[..., Any]) -> None:
    stack = start_stack([("--null-speed", "20")], "--resume-timeout", "1")
    body = {"prompt": "x", "stream": True, "max_tokens": 2000, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{stack.url}{PATH}", json=body, timeout=20) as reply:
        assert reply.status_code == 200
        pieces = reply.iter_raw()
        received = next(pieces) + next(pieces)
        os.kill(stack.agents[0].child.pid, signal.SIGKILL)
        received += b"".join(pieces)
    blocks = received.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    error = json.loads(blocks[-3].removeprefix("data: "))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "server_error"
    assert "was lost: " in error["message"] and "could not be resumed: " in error["message"]
    assert sum('"error"' in block for block in blocks) == 1
    assert '"choices":[]' not in received.decode()
    metrics = httpx.get(f"{stack.url}/metrics").text
    assert 'dragoman_gateway_requests_total{outcome="error",route="completions"} 1.0' in metrics
    assert "dragoman_gateway_requests_running 0.0" in metrics
    start = time.monotonic()
    refused = httpx.post(f"{stack.url}{PATH}", json={"prompt": "x"}, timeout=20)
    assert refused.status_code == 503 and refused.headers["x-should-retry"] == "true"
    assert time.monotonic() - start < 10


class Background(threading.Thread):
    """A request in a thread."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._body = url, body
        self.reply: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.reply = httpx.post(f"{self._url}{PATH}", json=self._body, timeout=30)

    def result(self) -> httpx.Response:
        self.join(30)
        assert self.reply is not None
        return self.reply


def test_sigterm_finishes_what_runs_and_refuses_the_rest(slow_stack: Any) -> None:
    from tests.gateway.stack import start_gateway, wait_until_ready

    gateway, url = start_gateway(slow_stack.controller_address)
    wait_until_ready(url)
    running = [Background(url, prompt="x", max_tokens=150, stream=stream) for stream in (True, False)]
    time.sleep(0.5)
    gateway.ask_to_stop(signal.SIGTERM)
    time.sleep(0.1)
    refused = httpx.post(f"{url}{PATH}", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert httpx.get(f"{url}/ready").status_code == 503
    stream, whole = (request.result() for request in running)
    assert stream.content.endswith(b"data: [DONE]\n\n") and b'"error"' not in stream.content
    assert whole.json()["usage"]["completion_tokens"] == 150
    assert gateway.stop(signal.SIGTERM) == 0


def test_sigint_ends_every_stream_with_an_event(slow_stack: Any) -> None:
    from tests.gateway.stack import start_gateway, wait_until_ready

    gateway, url = start_gateway(slow_stack.controller_address)
    wait_until_ready(url)
    running = [Background(url, prompt="x", max_tokens=5000, stream=stream) for stream in (True, False)]
    time.sleep(0.5)
    start = time.monotonic()
    gateway.ask_to_stop(signal.SIGINT)
    stream, whole = (request.result() for request in running)
    assert b'data: {"error":' in stream.content and stream.content.endswith(b"data: [DONE]\n\n")
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
    assert gateway.stop() == 0
    assert time.monotonic() - start < 5
    with contextlib.closing(socket.socket()) as probe:
        assert probe.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) != 0


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_stop_while_another_agent_is_looked_for_still_says_that_the_agent_was_lost(
    start_stack: Callable[..., Any], prompt: Any
) -> None:
    stack = start_stack([("--null-speed", "20")])
    body = {"prompt": prompt, "stream": True, "max_tokens": 2000}
    with httpx.stream("POST", f"{stack.url}{PATH}", json=body, timeout=20) as reply:
        pieces = reply.iter_raw()
        received = next(pieces) + next(pieces)
        os.kill(stack.agents[0].child.pid, signal.SIGKILL)
        time.sleep(0.3)
        stack.gateway.ask_to_stop(signal.SIGINT)
        received += b"".join(pieces)
    message = json.loads(received.decode().split("\n\n")[-3].removeprefix("data: "))["error"]["message"]
    assert "was lost: " in message
    assert message.endswith("could not be resumed: the gateway is shutting down; try again")


def test_bad_settings_are_one_line() -> None:
    import subprocess
    import sys

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, word in (
            (["--port", port], "--port"), (["--port", "x"], "port"), (["--prot", "1"], "--port"),
            (["--api-key-file", "/nowhere"], "/nowhere"), (["--host", "no.such.host.invalid"], "--host"),
            (["--controller", ","], "--controller"), (["--controller", "a:1,b:99999"], "'b:99999'"),
            (["--controller", "localhost"], "--controller: the address of a controller, 'localhost', has no port"),
            (["--host", "192.0.2.1"], "--host 192.0.2.1 cannot be used: it is no address of this machine"),
        ):  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-m", "dragoman_gateway.main", *arguments], capture_output=True, text=True, timeout=20
            )
            assert done.returncode == 2, arguments
            assert done.stderr.count("\n") == 1 and word in done.stderr, done.stderr
