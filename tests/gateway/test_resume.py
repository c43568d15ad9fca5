"""A stream whose agent is lost goes on with another one: no token twice, none missing, the same text."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import joined_text, parse_events
from tests.gateway.stack import Stack, running_stack, wait_until_ready

PATH = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "resume me", "max_tokens": 250, "seed": 7, "temperature": 1, "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[Stack]:
    """Two equal agents, slow enough to be killed in the middle."""
    with running_stack([("--null-speed", "10"), ("--null-speed", "10")]) as stack:
        yield stack


def lose(stack: Stack, agent_id: str, signal_number: int = signal.SIGKILL) -> None:
    index = next(i for i, agent in enumerate(stack.agents) if agent_id in agent.child.args)
    os.kill(stack.agents[index].child.pid, signal_number)


def replace(stack: Stack, agent_id: str) -> None:
    """Start the lost agent again, as a new life."""
    index = next(i for i, agent in enumerate(stack.agents) if agent_id in agent.child.args)
    stack.agents[index].stop()
    del stack.agents[index]
    stack.add_agent("--agent-id", agent_id, "--null-speed", "10")
    wait_until_ready(stack.url, num_agents=2)


def resumed(stack: Stack) -> float:
    text = httpx.get(f"{stack.url}/metrics").text
    return float(
        next(line for line in text.splitlines() if line.startswith('dragoman_resumes_total{result="ok"}')).split()[1]
    )


def token_ids(events: list[dict[str, Any]], index: int) -> list[int]:
    return [i for e in events for c in e["choices"] if c["index"] == index for i in c.get("token_ids", [])]


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"stop": ["qz", "Qz", "zq"]}, {"temperature": 0, "logprobs": 2}])
def test_a_stream_survives_the_loss_of_its_agent(pair: Stack, extra: dict[str, Any]) -> None:
    body = {**BODY, **extra, "stream": True, "stream_options": {"include_usage": True}}
    undisturbed = parse_events(httpx.post(f"{pair.url}{PATH}", json=body, timeout=30).content)
    before = resumed(pair)
    with httpx.stream("POST", f"{pair.url}{PATH}", json=body, timeout=30) as reply:
        pieces = reply.iter_raw()
        received = b"".join(next(pieces) for _ in range(20))
        agent_id = reply.headers["x-dragoman-agent"]
        lose(pair, agent_id)
        received += b"".join(pieces)
    events = parse_events(received)
    for index in range(extra.get("n", 1)):
        assert token_ids(events, index) == token_ids(undisturbed, index)
        assert joined_text(events, index) == joined_text(undisturbed, index)
    assert len({event["id"] for event in events}) == 1
    usage, expected = events[-1]["usage"], undisturbed[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        expected["prompt_tokens"], expected["completion_tokens"],
    )  # fmt: skip
    assert resumed(pair) == before + 1
    replace(pair, agent_id)


def test_a_whole_answer_survives_too(pair: Stack) -> None:
    import threading

    body = {**BODY, "max_tokens": 600}
    undisturbed = httpx.post(f"{pair.url}{PATH}", json=body, timeout=60)
    replies: list[httpx.Response] = []
    request = threading.Thread(
        target=lambda: replies.append(httpx.post(f"{pair.url}{PATH}", json=body, timeout=60)), daemon=True
    )
    busy: list[str] = []
    request.start()
    while not busy and request.is_alive():
        agents = httpx.get(f"{pair.url}/v1/server/info").json()["agents"]
        busy = [agent["agent_id"] for agent in agents if agent["running_requests"]]
    lose(pair, busy[0])
    request.join(30)
    assert replies[0].json()["choices"] == undisturbed.json()["choices"]
    replace(pair, busy[0])


def test_f2_a_frozen_agent_is_left_and_its_late_words_refused(pair: Stack) -> None:
    body = {**BODY, "stream": True, "max_tokens": 200}
    undisturbed = parse_events(httpx.post(f"{pair.url}{PATH}", json=body, timeout=30).content)
    with httpx.stream("POST", f"{pair.url}{PATH}", json=body, timeout=30) as reply:
        pieces = reply.iter_raw()
        received = b"".join(next(pieces) for _ in range(20))
        agent_id = reply.headers["x-dragoman-agent"]
        lose(pair, agent_id, signal.SIGSTOP)
        for piece in pieces:
            received += piece
            if b"[DONE]" not in received:
                lose(pair, agent_id, signal.SIGCONT)  # awake again while the stream goes on elsewhere
    assert token_ids(parse_events(received), 0) == token_ids(undisturbed, 0)
    replace(pair, agent_id)
