"""Where the times of kernels come from at a start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dragoman_agent.model.source import open_model
from dragoman_agent.pal import tuned
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.limits import Limits
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuned import timings_for

CONFIG = open_model("random:qwen3-0.6b", Path()).config
CARD = load_library("h100-sxm")


def take(mode: Any, tmp_path: Path, switches: Switches | None = None) -> tuple[Timings | None, str, str]:
    timings, decision = timings_for(CARD, CONFIG, Limits(), switches or Switches(), tmp_path, mode)
    return timings, decision.chosen if decision else "", decision.reason if decision else ""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times every case as 10 us, whole layers as quicker with dependent launch; how many were asked for in each round."""
    rounds: list[int] = []

    def fake(cases: Any, held: Timings, cache_dir: Path, index: int, progress: Any) -> Timings:
        rounds.append(len(cases))
        return held.with_seconds({c.key: 8e-6 if c.key.endswith("/dependent") else 1e-5 for c in cases})

    monkeypatch.setattr(tuned, "tune", fake)
    return rounds


def test_a_start_waits_for_nothing_and_says_how_to_time(timed: list[int], tmp_path: Path) -> None:
    timings, chosen, reason = take("auto", tmp_path)
    assert timings is not None and not timings.seconds and not timed
    assert chosen.startswith("0 of ") and "--tune now" in reason


def test_now_times_kernels_and_then_the_layers_of_the_plan_they_give(timed: list[int], tmp_path: Path) -> None:
    timings, chosen, reason = take("now", tmp_path)
    # One sequence with and without padding, dependent and not, and the 8 of dependent launch, two of which are the same; groups of
    # short sequences, and work lists.
    # Times that are all alike choose another chunk, whose products are then timed too.
    assert timings is not None and 2 <= len(timed) <= 4 and timed[-1] == 10 + 15 + 72 and min(timed[:-1]) > 100, timed
    assert chosen == f"{timed[-2]} of {timed[-2]} kernels timed on this device" and "timed now" in reason
    _, decisions = plan_for(CARD, CONFIG, Limits(), Switches(), timings)
    (launch,) = [d for d in decisions if d.subject == "dependent-launch"]
    assert launch.chosen == "to 256 sequences" and "whole layers timed on the device" in launch.reason


def test_layers_that_are_slower_so_turn_it_off(timed: list[int], tmp_path: Path) -> None:
    timings, _, _ = take("now", tmp_path)
    assert timings is not None
    slower = {key: 2e-5 for key in timings.seconds if key.endswith("/dependent")}
    plan, decisions = plan_for(CARD, CONFIG, Limits(), Switches(), timings.with_seconds(slower))
    (launch,) = [d for d in decisions if d.subject == "dependent-launch"]
    assert not plan.dependent_launch and launch.chosen == "no" and "-100.0% at 1" in launch.reason


@pytest.mark.parametrize(
    ("mode", "switches", "expected"),
    [
        ("off", Switches(), "--tune off was asked for"),
        ("now", Switches.off(), "switched off by --pal off"),
        ("now", Switches(launch_tuning=False), "--pal-launch-tuning off"),
    ],
)
def test_off_uses_none_and_takes_none(
    timed: list[int], tmp_path: Path, mode: str, switches: Switches, expected: str
) -> None:
    timings, chosen, reason = take(mode, tmp_path, switches)
    assert timings is None and chosen == "none" and expected in reason and not timed


def test_a_page_that_the_times_choose_gets_its_own_launches_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first plan's page is 64; measured, 16 is quicker."""
    rounds: list[set[int]] = []  # pages whose attention at 64 sequences is timed: pages are not compared at 64

    def fake(cases: Any, held: Timings, cache_dir: Path, index: int, progress: Any) -> Timings:
        missing = [case.key for case in cases if not held.knows(case.key)]
        rounds.append({page for page in (16, 64) if any(f"-p{page}/b64/" in key for key in missing)})
        return held.with_seconds({key: 1e-6 if "-p16/" in key else 1e-5 for key in missing})

    monkeypatch.setattr(tuned, "tune", fake)
    timings, _, _ = take("now", tmp_path)
    assert timings is not None
    assert rounds[0] == {64} and rounds[1] == {16}
    plan, decisions = plan_for(CARD, CONFIG, Limits(), Switches(), timings)
    assert plan.page_size == 16
    (attention,) = [d for d in decisions if d.subject == "decode-attention"]
    found = re.search(r"(\d+) of (\d+) times measured", attention.reason)
    assert found is not None and int(found[1]) > 0.8 * int(found[2]), attention.reason


def test_what_fails_each_time_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []

    def fake(cases: Any, held: Timings, cache_dir: Path, index: int, progress: Any) -> Timings:
        calls.append(len([case for case in cases if not held.knows(case.key)]))
        return held.with_seconds({case.key: 1e-5 for case in cases if not case.key.endswith("c4096/s1-n64-w4-g5")})

    monkeypatch.setattr(tuned, "tune", fake)
    assert take("now", tmp_path)[0] is not None
    assert calls[0] > calls[1] > calls[2] > 0 and len(calls) == 4, "kernels in three rounds, then layers"
