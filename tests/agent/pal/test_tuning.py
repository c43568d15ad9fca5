"""Timing kernels through a process: what is kept, what is left out, and what is said when it fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman_agent.pal import tuning
from dragoman_agent.pal.candidates import TuningCase
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuning import TuningError, kernel_hash, load_timings, tune

CASES = [
    TuningCase(f"gemm/m{m}/n64/k32", "gemm", {"m": m, "n": 64, "k": 32}, None, 1e-6) for m in (1, 8, 64)
]  # fmt: skip
Script = Callable[[str], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Replaces the timing process by Python code that reads `cases` and may print answers."""

    def use(code: str) -> None:
        path = tmp_path / "timer.py"
        path.write_text(f"import json, sys\ncases = json.load(sys.stdin)\n{code}\n")
        monkeypatch.setattr(tuning, "_command", lambda index, *options: [sys.executable, str(path), *options])

    return use


ANSWER = "for i, case in enumerate(cases): print(json.dumps({'key': case['key'], 'seconds': 1e-6 * (i + 1)}))"


def test_times_are_kept_and_only_what_is_missing_is_timed_again(script: Script, tmp_path: Path) -> None:
    script(ANSWER)
    said: list[str] = []
    first = tune(CASES[:2], load_timings(tmp_path, "card"), tmp_path, 0, said.append)
    assert [first.get(case.key) for case in CASES] == [1e-6, 2e-6, None]
    assert "timing 2 kernels" in said[0]
    script(f"assert [c['key'] for c in cases] == ['{CASES[2].key}']\n{ANSWER}")
    tune(CASES, load_timings(tmp_path, "card"), tmp_path, 0)
    held = load_timings(tmp_path, "card")
    assert {key: held.get(key) for key in (case.key for case in CASES)} == dict(
        zip((case.key for case in CASES), (1e-6, 2e-6, 1e-6), strict=True)
    )
    script("sys.exit('nothing is to be timed')")
    assert tune(CASES, held, tmp_path, 0) is held
    assert load_timings(tmp_path, "another card").seconds == {}


def test_a_kernel_that_cannot_run_is_left_out(script: Script, tmp_path: Path) -> None:
    script(
        "print(json.dumps({'key': cases[0]['key'], 'error': 'OutOfResources: shared memory'}))\n"
        "print(json.dumps({'key': cases[1]['key'], 'seconds': 3e-6}))"
    )
    timings = tune(CASES[:2], load_timings(tmp_path, "card"), tmp_path, 0)
    assert timings.get(CASES[0].key) is None and timings.get(CASES[1].key) == 3e-6


def test_what_can_never_run_is_not_tried_again_but_what_may_pass_is(script: Script, tmp_path: Path) -> None:
    script(
        "for case, error in zip(cases, ('OutOfResources: shared memory', 'OutOfMemoryError: CUDA out of memory')):\n"
        "    print(json.dumps({'key': case['key'], 'error': error}))\n"
        "print(json.dumps({'key': cases[2]['key'], 'seconds': 3e-6}))"
    )
    said: list[str] = []
    tune(CASES, load_timings(tmp_path, "card"), tmp_path, 0, said.append)
    assert "1 of 3 kernels timed" in said[1] and "2 cannot run" in said[1]
    script(f"assert [c['key'] for c in cases] == ['{CASES[1].key}']\n{ANSWER}")
    again = tune(CASES, load_timings(tmp_path, "card"), tmp_path, 0)
    assert again.get(CASES[1].key) == 1e-6 and again.failed == {CASES[0].key: "OutOfResources: shared memory"}
    script("sys.exit('nothing is to be timed')")
    assert tune(CASES, load_timings(tmp_path, "card"), tmp_path, 0) == again


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit('CUDA error: no device')", r"failed \(CUDA error: no device\); run `dragoman doctor`"),
        ("for c in cases: print(json.dumps({'key': c['key'], 'error': 'no'}))", "none of 3 kernels could be timed"),
        ("import time; time.sleep(60)", "took over 0.2 s; another process"),
    ],
    ids=["crash", "all fail", "hang"],
)
def test_failures_say_what_to_do(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    monkeypatch.setattr(tuning, "_TIMEOUT_SECONDS", 0.2 if "sleep" in code else 20.0)
    script(code)
    with pytest.raises(TuningError, match=expected):
        tune(CASES, load_timings(tmp_path, "card"), tmp_path, 0)
    assert not list(tmp_path.glob("timings/*"))


def test_damaged_and_outdated_files_are_not_used(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(ANSWER)
    tune(CASES, load_timings(tmp_path, "card"), tmp_path, 0)
    (path,) = tmp_path.glob("timings/*.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    assert load_timings(tmp_path, "card").seconds == {}
    path.write_text(json.dumps({**json.loads(text), "fingerprint": "other"}))
    assert load_timings(tmp_path, "card").seconds == {}
    path.write_text(text)
    assert load_timings(tmp_path, "card").seconds
    monkeypatch.setattr(tuning, "kernel_hash", lambda: "newer kernels")
    assert load_timings(tmp_path, "card") == Timings("card", "newer kernels")


def test_the_hash_is_of_the_kernels() -> None:
    assert kernel_hash() == kernel_hash() and len(kernel_hash()) == 16
