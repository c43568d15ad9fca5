"""A probe's processes: what each answers is kept, whatever becomes of the others. Driven by a stand-in program."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dragoman_agent.pal import probe_process
from dragoman_agent.pal.probe_process import run_probe
from dragoman_agent.pal.profile import ProfileError, Value

# Answers each step it is given, as its name says; writes down how often it was started.
PROGRAM = """
import json, os, sys, time
folder, steps = sys.argv[1], sys.argv[2].split(",")
open(folder + "/starts", "a").write(sys.argv[2] + "\\n")
for step in steps:
    print("step " + step, file=sys.stderr, flush=True)
    value = {"value": 1.0, "unit": "s", "provenance": "measured", "spread": 0.0, "note": "", "labels": []}
    body = {"step": step, "seconds": 0.1}
    if step == "crash":
        os.kill(os.getpid(), 11)
    elif step == "hang":
        time.sleep(600)
    elif step == "broken":
        print(json.dumps({**body, "error": "the context is gone"}), flush=True)
        os._exit(3)
    elif step == "fails":
        body["error"] = "not on this card"
    elif step == "babble":
        print("a library greets you", flush=True)
    elif step == "silent-exit":
        sys.exit(0)
    elif step == "list":
        body["values"] = {"x.list": {**value, "value": [1.0, 2.0], "labels": ["a", "b"]}}
    elif step == "cannot-open":
        print("GPU 0 could not be opened: no driver", file=sys.stderr)
        sys.exit(1)
    if "error" not in body:
        body.setdefault("values", {"x." + step: value})
    print(json.dumps(body), flush=True)
"""

Command = Callable[[Sequence[str]], list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The stand-in's command line for some steps."""
    return lambda steps: [sys.executable, "-c", PROGRAM, str(tmp_path), ",".join(steps)]


def starts(tmp_path: Path) -> list[str]:
    return (tmp_path / "starts").read_text().splitlines()


def test_all_steps_in_one_process(command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run = run_probe(command, ["a", "list", "b"])
    assert run.values["x.list"] == Value((1.0, 2.0), "s", "measured", spread=0.0, labels=("a", "b"))
    assert set(run.values) == {"x.a", "x.list", "x.b"} and not run.problems
    assert starts(tmp_path) == ["a,list,b"]
    said = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert "probe: step list" in said and "probe step list took 0.10 s" in said


def test_a_step_that_fails_is_skipped_with_its_reason(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    run = run_probe(command, ["a", "fails", "b"])
    assert set(run.values) == {"x.a", "x.b"}
    assert run.problems == {"fails": "not on this card"}
    assert "probe step fails was skipped: not on this card" in caplog.text


def test_a_process_that_has_answered_all_is_not_waited_for(tmp_path: Path) -> None:
    tail = f"\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nprint(json.dumps(last), flush=True)\ntime.sleep(600)\n"
    program = PROGRAM.replace("    print(json.dumps(body), flush=True)\n", "    last = body\n") + tail
    run = run_probe(lambda steps: [sys.executable, "-c", program, str(tmp_path), ",".join(steps)], ["a"])
    assert run.values["x.a"].value == 1.0 and not run.problems
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_after_a_crash_the_rest_runs_in_another_process(command: Command, tmp_path: Path) -> None:
    run = run_probe(command, ["a", "crash", "b", "c"])
    assert set(run.values) == {"x.a", "x.b", "x.c"}
    assert run.problems == {"crash": "its process ended with code -11 (step crash)"}
    assert starts(tmp_path) == ["a,crash,b,c", "b,c"]


def test_after_a_broken_context_no_other_step_is_blamed(command: Command, tmp_path: Path) -> None:
    run = run_probe(command, ["broken", "b"])
    assert set(run.values) == {"x.b"} and run.problems == {"broken": "the context is gone"}
    assert starts(tmp_path) == ["broken,b", "b"]


def test_a_step_that_hangs_is_named_and_the_rest_goes_on(command: Command) -> None:
    run = run_probe(command, ["a", "hang", "b"], step_timeout_seconds=1.0)
    assert set(run.values) == {"x.a", "x.b"}
    assert run.problems == {"hang": "it took over 1 s; is another process using the GPU?"}


def test_a_first_step_that_hangs_is_skipped_too(command: Command) -> None:
    run = run_probe(command, ["hang", "b"], step_timeout_seconds=1.0)
    assert set(run.values) == {"x.b"} and set(run.problems) == {"hang"}


def test_words_that_are_no_answer_are_told_and_passed_over(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    run = run_probe(command, ["babble"])
    assert set(run.values) == {"x.babble"}
    assert "something else than an answer: a library greets you" in caplog.text


def test_a_process_that_leaves_early_is_asked_again(command: Command, tmp_path: Path) -> None:
    run = run_probe(command, ["a", "silent-exit", "b"])
    assert set(run.values) == {"x.a", "x.b"}
    assert "ended with code 0" in run.problems["silent-exit"]


def test_a_device_that_cannot_be_opened_is_an_error(command: Command) -> None:
    with pytest.raises(ProfileError, match="GPU 0 could not be opened: no driver"):
        run_probe(command, ["cannot-open", "b"])


def test_starts_are_bounded(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_process, "_MAX_STARTS", 2)
    run = run_probe(command, ["a", "crash", "crash", "crash", "b"])
    assert len(starts(tmp_path)) == 2
    assert "not tried: the device failed in 2 processes before" in run.problems["b"]


@pytest.mark.parametrize(
    ("number", "provenance", "reason"),
    [
        (0.0, "measured", "x.a is 0, which nothing measures"),
        (-1e-9, "measured", "negative"),
        (float("nan"), "measured", "finite number was expected"),
        ([1.0, 0.0], "measured", "x.a is 0"),
        (1.0, "guessed", "provenance 'guessed'"),
    ],
)
def test_an_answer_that_no_profile_may_hold_costs_that_value_alone(
    number: object, provenance: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """json writes NaN and reads it back."""
    bad = {"value": number, "unit": "s", "provenance": provenance, "spread": None, "note": "", "labels": []}
    good = {**bad, "value": 1.0, "provenance": "measured"}
    line = json.dumps({"step": "a", "seconds": 1, "values": {"x.a": bad, "x.b": good}})
    run = run_probe(lambda steps: [sys.executable, "-c", f"print({line!r})"], ["a"])
    assert set(run.values) == {"x.b"}
    assert reason in run.problems["a"] and f"{run.problems['a']}; the value is left out" in caplog.text


def test_answers_with_foreign_fields_are_no_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps({"step": "a", "seconds": 1, "values": {"x.a": {"value": 1, "unit": "s", "colour": "red"}}})
    run = run_probe(lambda steps: [sys.executable, "-c", f"print({line!r})"], ["a"])
    assert not run.values and "something else than an answer" in caplog.text
