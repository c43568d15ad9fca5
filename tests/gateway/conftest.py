"""Stacks of the oracles the gateway's tests need, and a client that reads as tests do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.gateway.stack import Process, Stack, running_stack, start_gateway, wait_until_ready


@pytest.fixture(scope="session")
def alphabet_stack() -> Iterator[Stack]:
    """An agent that continues the alphabet."""
    with running_stack([("--null-oracle", "alphabet")]) as stack:
        yield stack


@pytest.fixture(scope="session")
def echo_stack() -> Iterator[Stack]:
    """An agent that repeats the prompt."""
    with running_stack([("--null-oracle", "echo")]) as stack:
        yield stack


@pytest.fixture(scope="session")
def hash_stack() -> Iterator[Stack]:
    """An agent whose output depends on the whole prefix and the seed."""
    with running_stack([()]) as stack:
        yield stack


@pytest.fixture(scope="session")
def slow_stack() -> Iterator[Stack]:
    """An agent that takes its time, as a real device would: for clients that leave."""
    with running_stack([("--null-speed", "10")]) as stack:
        yield stack


@pytest.fixture(scope="session")
def lonely_gateway() -> Iterator[str]:
    """A gateway whose controller does not exist: for what HTTP alone decides."""
    gateway, url = start_gateway("127.0.0.1:9", "--body-timeout", "1", "--header-timeout", "1.5")
    yield url
    gateway.stop()


@pytest.fixture(scope="session")
def keyed_gateway() -> Iterator[str]:
    """As lonely_gateway, with a key."""
    gateway, url = start_gateway("127.0.0.1:9", "--api-key", "sesame")
    yield url
    gateway.stop()


@pytest.fixture
def extra_gateway(alphabet_stack: Stack) -> Iterator[Callable[..., str]]:
    """Starts further gateways of the alphabet's controller, with options of their own."""
    started: list[Process] = []

    def start(*arguments: str) -> str:
        gateway, url = start_gateway(alphabet_stack.controller_address, *arguments)
        started.append(gateway)
        wait_until_ready(url)
        return url

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture
def start_stack() -> Iterator[Callable[..., Stack]]:
    """Starts stacks of a test's own, which end with it."""
    stacks: list[Any] = []

    def start(agents: list[tuple[str, ...]], *gateway: str) -> Stack:
        context = running_stack(agents, gateway)
        stack = context.__enter__()
        stacks.append(context)
        return stack

    yield start
    for context in stacks:
        context.__exit__(None, None, None)


class Api:
    """The HTTP side of one gateway, and the checks that every case ends with."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which must be 200."""
        reply = self.post("/v1/completions", prompt=prompt, **body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def chat(self, messages: Any, **body: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions, which must be 200."""
        reply = self.post("/v1/chat/completions", messages=messages, **body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The JSON events of a stream, whose framing is checked on the way."""
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(reply.content)

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a request that must be refused with an envelope."""
        reply = self.post(path, **body)
        assert reply.status_code == status, reply.text
        error: dict[str, Any] = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "Traceback" not in reply.text and ".py" not in reply.text
        return error

    def load(self) -> dict[str, int]:
        """Running and waiting requests and free KV blocks over all agents, as the controller last heard."""
        agents = self.http.get("/v1/server/info").json()["agents"]
        names = ("running_requests", "waiting_requests", "free_kv_blocks")
        return {name: sum(agent[name] for agent in agents) for name in names}

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no sample {name}{labels}")

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Returns when nothing runs here or at the agents."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            load = self.load()
            running = self.metric("dragoman_gateway_requests_running")
            if not (load["running_requests"] or load["waiting_requests"] or running):
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy: {self.load()}")

    def wait_free(self, num_blocks: int, seconds: float = 5.0) -> None:
        """Returns when the agents have told of as many free KV blocks."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.load()["free_kv_blocks"] == num_blocks:
                return
            time.sleep(0.05)
        raise AssertionError(f"{num_blocks} blocks were free: {self.load()}")

    def wait_busy(self, num_requests: int, seconds: float = 5.0) -> None:
        """Returns when the agents have told the controller of so many requests."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            load = self.load()
            if load["running_requests"] + load["waiting_requests"] >= num_requests:
                return
            time.sleep(0.02)
        raise AssertionError(f"not busy: {self.load()}")

    def canary(self) -> dict[str, Any]:
        """A fixed request; equal before and after a case that did no harm."""
        answer = self.complete("canary", max_tokens=8, temperature=0, logprobs=1, return_token_ids=True)
        answer["usage"].pop("prompt_tokens_details")
        return {"choices": answer["choices"], "usage": answer["usage"]}


def parse_events(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a whole stream. Comments are skipped; anything unexpected fails."""
    assert data.endswith(b"data: [DONE]\n\n"), data[-200:]
    events = []
    for block in data.decode().split("\n\n")[:-2]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        events.append(json.loads(block[6:]))
    return events


def joined_text(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream, of either route."""
    pieces = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(pieces)


@pytest.fixture
def parse() -> Any:
    """`parse_events`, for streams read in another way."""
    return parse_events


@pytest.fixture
def text_of() -> Any:
    """`joined_text`."""
    return joined_text


@contextmanager
def guarded_api(stack: Stack) -> Iterator[Api]:
    """An Api; afterwards nothing may be left running, no KV block held, and the canary must sing as before."""
    api = Api(stack.url)
    api.wait_idle()
    num_free_blocks = api.load()["free_kv_blocks"]
    before = api.canary()
    try:
        yield api
    finally:
        api.wait_idle()
        assert api.canary() == before
        api.wait_idle()
        api.wait_free(num_free_blocks)
        api.http.close()


@pytest.fixture(scope="module")
def alphabet(alphabet_stack: Stack) -> Iterator[Api]:
    """The alphabet's gateway."""
    with guarded_api(alphabet_stack) as api:
        yield api


@pytest.fixture(scope="module")
def echo(echo_stack: Stack) -> Iterator[Api]:
    """The echo's gateway."""
    with guarded_api(echo_stack) as api:
        yield api


@pytest.fixture(scope="module")
def hashed(hash_stack: Stack) -> Iterator[Api]:
    """The hash oracle's gateway."""
    with guarded_api(hash_stack) as api:
        yield api


@pytest.fixture
def slow(slow_stack: Stack) -> Iterator[Api]:
    """The gateway of an agent that takes its time."""
    with guarded_api(slow_stack) as api:
        yield api
