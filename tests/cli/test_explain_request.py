"""`dragoman explain --request`: every candidate of a real placement, with its seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.gateway.stack import Stack, running_stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack([("--null-speed", "2"), ("--null-speed", "2")]) as made:
        yield made


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "dragoman_cli.main", "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def placed(stack: Stack) -> tuple[str, str]:
    """A request that ran: its id and its agent."""
    body: dict[str, Any] = {"prompt": "tell me of rivers", "max_tokens": 8, "ignore_eos": True}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200
    return reply.headers["x-dragoman-request-id"], reply.headers["x-dragoman-agent"]


def test_every_candidate_is_shown_with_its_seconds(stack: Stack) -> None:
    request_id, agent_id = placed(stack)
    shown = explain("--request", request_id, "--controller", stack.controller_address)
    assert shown.returncode == 0, shown.stderr
    assert request_id in shown.stdout and "up to 8 output tokens of null" in shown.stdout
    rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.startswith("agent-")}
    assert {"agent-0", "agent-1"} <= set(rows)
    assert "chosen" in [line for line in shown.stdout.splitlines() if line.startswith(agent_id)][-1]
    assert "promised first token" in shown.stdout and "eight times in ten" in shown.stdout


def test_json_says_the_same_and_a_list_of_controllers_is_asked_in_turn(stack: Stack) -> None:
    request_id, agent_id = placed(stack)
    shown = explain("--request", request_id, "--controller", f"127.0.0.1:9,{stack.controller_address}", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["chosen_agent_id"] == agent_id and len(found["candidates"]) == 2
    for one in found["candidates"]:
        assert one["prefill_seconds"] > 0 and one["decode_seconds"] > 0


def test_a_request_that_nobody_remembers_is_a_clear_error(stack: Stack) -> None:
    shown = explain("--request", "never", "--controller", stack.controller_address)
    assert shown.returncode == 1 and "no placement of request 'never' is remembered" in shown.stderr
    assert "Traceback" not in shown.stderr
    shown = explain("--request", "never", "--controller", "127.0.0.1:9")
    assert shown.returncode == 1 and "127.0.0.1:9" in shown.stderr and "Traceback" not in shown.stderr
    shown = explain("--request", "never", "--why", "page-size")
    assert shown.returncode == 2 and "ask for one of the two" in shown.stderr


def test_an_address_that_cannot_be_is_named() -> None:
    done = explain("--request", "5", "--controller", "a:99999")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--controller" in done.stderr, done.stderr
