"""`dragoman simulate`: the same bytes for a seed, comparisons, and words for what cannot be simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Dragoman, assert_error

from dragoman_controller.simulate.profiles import profile_to_dict, standard_profile

SMALL = ("--agents", "6", "--requests", "120")


def runs(dragoman: Dragoman, *arguments: str) -> dict[str, Any]:
    done = dragoman("simulate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["runs"]
    return found


def test_a_seed_gives_the_same_bytes_in_every_process() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "dragoman_cli.main",
        "simulate",
        *SMALL,
        "--json",
        "--fault",
        "kill:agent-00001@1",
    ]
    texts = [
        subprocess.run(
            [*command, "--seed", seed],
            capture_output=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hashes},
        ).stdout
        for seed, hashes in (("1", "1"), ("1", "2"), ("2", "1"))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_placements_and_policies_are_compared(dragoman: Dragoman, tmp_path: Path) -> None:
    for name, limit in (("strict", 1), ("wide", 0)):
        (tmp_path / f"{name}.toml").write_text(f"[default_tenant]\nmax_running_requests = {limit}\n")
    policies = ("--policy", str(tmp_path / "strict.toml"), "--policy", str(tmp_path / "wide.toml"))
    found = runs(dragoman, *SMALL, *policies, "--compare", "random,dragoman")
    assert list(found) == ["random strict.toml", "dragoman strict.toml", "random wide.toml", "dragoman wide.toml"]
    queued = {name: run["queue"]["share_queued"] for name, run in found.items()}
    assert queued["dragoman strict.toml"] > 0.1 > queued["dragoman wide.toml"]


def test_a_trace_is_played_on_a_fleet_of_profiles(dragoman: Dragoman, tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(json.dumps(profile_to_dict(standard_profile())))
    lines = [{"seconds": n / 10, "tenant": f"t{n % 2}", "prompt_tokens": 50, "output_tokens": 5} for n in range(10)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--trace", str(tmp_path / "trace.jsonl"), "--fleet", f"{tmp_path / 'agent.json'}:2")
    (run,) = runs(dragoman, *arguments).values()
    assert run["requests"]["finished"] == 10 and set(run["fairness"]["tenants"]) == {"t0", "t1"}
    done = dragoman("simulate", *arguments)
    assert "10 requests on 2 simulated agents" in done.stdout
    for word in ("TTFT p99", "fairness (Jain)", "quote of finish", "over the least finish", "t1"):
        assert word in done.stdout


def test_cards_are_planned_without_having_them(dragoman: Dragoman) -> None:
    fleet = ("--fleet", "rtx4090:2", "--fleet", "l4:2", "--model", "qwen3-0.6b")
    (run,) = runs(dragoman, *fleet, "--requests", "60").values()
    assert run["requests"]["finished"] == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--compare", "best"), "known are dragoman, random, least-loaded, oracle"),
        (("--burst", "many@3"), "COUNT@SECONDS"),
        (("--burst", "5@1e300"), "at most 1,000,000 seconds"),
        (("--hog", "1e12"), "with bursts and the hog"),
        (("--output", "1000000000"), "--output"),
        (("--fault", "kill:agent-00099@3"), "agent-00000 to agent-00005"),
        (("--policy", "absent.toml"), "absent.toml cannot be read: No such file or directory"),
        (("--cell-agents", "1000"), "1 to 256"),
        (("--burstiness", "2"), "burstiness is 2"),
    ],
)
def test_what_cannot_be_simulated_is_said(dragoman: Dragoman, arguments: tuple[str, ...], words: str) -> None:
    done = dragoman("simulate", *SMALL, *arguments)
    assert_error(done, words, code=1 if "absent" in words else 2)


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--fleet", "rtx4090"), "write NAME:COUNT", 2),
        (("--fleet", "rtx4099:1"), "no profile", 1),
        (("--trace", "absent.jsonl"), "absent.jsonl cannot be read: No such file or directory", 1),
        (("--trace", "/"), "/ cannot be read: Is a directory", 1),
        (("--trace", "absent.jsonl", "--requests", "5"), "--requests has no effect here", 2),
        (("--trace", "absent.jsonl", "--prefix-share", "0.5"), "--prefix-share has no effect here", 2),
        (("--rate", "5", "--load", "0.5"), "--load has no effect here", 2),
        (("--fleet", "l4:1", "--agents", "5"), "--agents has no effect here", 2),
        (("--model", "qwen3-8b"), "--model has no effect here", 2),
    ],
)
def test_what_has_no_effect_beside_another_option_is_refused(
    dragoman: Dragoman, arguments: tuple[str, ...], words: str, code: int
) -> None:
    assert_error(dragoman("simulate", *arguments), words, code=code)
