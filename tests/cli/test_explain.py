"""`dragoman explain`: of a running agent and offline, one subject or all, and the mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.cli.command import Dragoman, assert_error

OFFLINE = ("--profile", "rtx4060-laptop", "--model", "qwen3-0.6b")


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    """The address of a real agent on the null device."""
    flags = ["--device", "null", "--open", "--announce", "--port", "0", "--metrics-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "dragoman_agent.main", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield next(str(event["grpc"]) for event in map(json.loads, process.stdout) if event.get("event") == "serving")
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_a_running_agent_explains_itself(dragoman: Dragoman, agent: str) -> None:
    done = dragoman("explain", "--agent", agent)
    assert done.returncode == 0, done.stderr
    first, *paragraphs = done.stdout.split("\n\n")
    assert first.startswith("null on null device, plan ")
    told = " ".join(" ".join(paragraphs).split())
    assert "road: null. Because: the null device computes nothing." in told
    assert "page-size: 64 tokens." in told
    assert told.count("page-size:") == 1


def test_one_subject_of_a_running_agent(dragoman: Dragoman, agent: str) -> None:
    done = dragoman("explain", "--why", "page-size", environ={"DRAGOMAN_AGENT": agent})
    assert done.returncode == 0, done.stderr
    assert "page-size: 64 tokens." in done.stdout
    assert "road:" not in done.stdout
    told = json.loads(dragoman("explain", "--why", "page-size", "--agent", agent, "--json").stdout)
    assert [entry["subject"] for entry in told["decisions"]] == ["page-size"]
    assert told["model"] == "null"


def test_an_agent_of_the_environment_is_there_for_other_commands_too(dragoman: Dragoman, agent: str) -> None:
    environ = {"DRAGOMAN_AGENT": agent, "DRAGOMAN_AGENT_ID": "vm", "DRAGOMAN_CONTROLLER": "127.0.0.1:1"}
    assert dragoman("explain", "--why", "page-size", environ=environ).returncode == 0
    assert dragoman("explain", *OFFLINE, "--why", "page-size", environ=environ).returncode == 0


def test_offline_says_that_the_profile_was_named(dragoman: Dragoman) -> None:
    done = dragoman("explain", *OFFLINE)
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "profile: rtx4060-laptop (" in told
    assert "asked for with --profile: the library's rtx4060-laptop" in told
    assert "memory.read_bandwidth = " in told
    assert "(derived)" in told


def test_switches_are_told_with_any_subject(dragoman: Dragoman) -> None:
    done = dragoman("explain", *OFFLINE, "--pal", "off", "--why", "page-size")
    assert "switches: --pal off. Because: asked for" in " ".join(done.stdout.split())
    assert "page-size: 16" in done.stdout


def test_offline_a_plan_is_explained_as_it_was_asked_for(dragoman: Dragoman) -> None:
    asked = dragoman("explain", *OFFLINE, "--deterministic", "--kv-dtype", "fp8")
    told = " ".join(asked.stdout.split())
    assert "kv-dtype: float8_e4m3fn. Because: asked for" in told and "deterministic: yes" in told, asked.stderr
    assert "deterministic: yes" not in dragoman("explain", *OFFLINE).stdout


@pytest.mark.parametrize(
    ("arguments", "parts", "code"),
    [
        (
            (*OFFLINE, "--why", "pagesize"),
            ("nothing was decided about 'pagesize'; did you mean page-size?", "kv-blocks"),
            1,
        ),
        (("--profile", "l4"), ("--profile alone is no plan", "add --model"), 2),
        (("--pal", "off"), ("belong to a plan made here", "add --model"), 2),
        (("--deterministic",), ("--deterministic and --pal belong to a plan made here", "add --model"), 2),
        (("--kv-dtype", "fp8"), ("--kv-dtype", "belong to a plan made here"), 2),
        (("--agent", ""), ("--agent: the address '' has no port: give host:port",), 2),
        (("--agent", "localhost"), ("--agent: the address 'localhost' has no port: give host:port",), 2),
        (("--agent-id", "a"), ("--agent-id has no effect without TLS", "certificate", "set DRAGOMAN_TLS_CERT"), 2),
        (("--controller", "a:1"), ("--controller has no effect here", "only --request asks"), 2),
        (("--agent", "a:1", *OFFLINE), ("--agent has no effect here", "a plan that is made here"), 2),
        (("--agent-id", "a", "--request", "b"), ("--agent-id has no effect here", "by the controller"), 2),
        (("--agent", "127.0.0.1:1"), ("cannot reach the agent at 127.0.0.1:1", "dragoman ps"), 1),
        (("--profile", "rtx4060-laptop", "--model", "qwen3-8b"), ("there is no plan to explain", "does not fit"), 1),
    ],
)
def test_mistakes_are_one_answer(
    dragoman: Dragoman, arguments: tuple[str, ...], parts: tuple[str, ...], code: int
) -> None:
    assert_error(dragoman("explain", *arguments), *parts, code=code)
