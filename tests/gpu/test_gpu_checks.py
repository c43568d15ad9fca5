"""The runner of the GPU checks: what fails, hangs or breaks does not cost the others."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu_checks import FIRST, LAST, MODELS, ROOT, Check, Runner, all_checks, main


def python(name: str, code: str, **settings: object) -> Check:
    return Check(name, (sys.executable, "-S", "-c", code), **settings)  # type: ignore[arg-type]


def test_each_check_gets_its_verdict_and_its_log(tmp_path: Path) -> None:
    hang = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); print(p.pid, flush=True); time.sleep(60)"  # fmt: skip
    runner = Runner(tmp_path, 30.0)
    runner.run([
        python("good", "print('ok all')"),
        python("bad", "print('OFF the figures'); raise SystemExit(1)"),
        python("hangs", hang, limit_seconds=0.5),
        python("alone", "print('ok')", alone=True),
    ])  # fmt: skip
    assert {name: one["verdict"] for name, one in runner.verdicts.items()} == {
        "alone": "ok", "good": "ok", "bad": "failed", "hangs": "failed",
    }  # fmt: skip
    assert runner.verdicts["bad"]["problem"] == "exit 1"
    assert "its limit is 0.5 s" in runner.verdicts["hangs"]["problem"]
    assert json.loads((tmp_path / "checks.json").read_text()) == runner.verdicts
    assert (tmp_path / "bad.log").read_text() == "OFF the figures\n"
    child = int((tmp_path / "hangs.log").read_text())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "what a hanging check started lives on"
        time.sleep(0.02)


def test_checks_share_the_card_but_not_more_of_it_than_there_is(tmp_path: Path) -> None:
    note = "import time, sys; from pathlib import Path; p = Path(sys.argv[0]); a = time.monotonic(); time.sleep(0.3); print(a, time.monotonic())"
    runner = Runner(tmp_path, 30.0)
    runner.run([python(f"{size}-{number}", note, gigabytes=size) for number, size in enumerate((60, 60, 50))])
    spans = {name: [float(part) for part in (tmp_path / f"{name}.log").read_text().split()] for name in runner.verdicts}

    def overlap(one: str, other: str) -> bool:
        return spans[one][0] < spans[other][1] and spans[other][0] < spans[one][1]

    assert not overlap("60-0", "60-1")
    assert overlap("60-0", "50-2") or overlap("60-1", "50-2")


def test_what_the_end_of_all_time_stops_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tmp_path, 0.5)
    runner.run([python("long", "import time; time.sleep(60)"), python("next", "print('ok')", alone=True)])
    assert runner.named("no time") == ["long", "next"] and not runner.named("failed")
    assert runner.verdicts["next"]["seconds"] == 0.0
    assert "the time for all checks was over" in runner.verdicts["long"]["problem"]

    for code, seconds, wanted in (("pass", "30", 0), ("pass", "-1", 3), ("raise SystemExit(1)", "30", 1)):
        monkeypatch.setattr("benchmarks.gpu_checks.all_checks", lambda *_, code=code: [python("one", code)])
        monkeypatch.setattr("benchmarks.gpu_checks.PROFILE", "pass")
        monkeypatch.setattr(sys, "argv", ["gpu_checks", str(tmp_path), "--seconds", seconds])
        assert main() == wanted


def test_what_never_ran_comes_first_and_what_always_passed_last(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 30.0)
    settings: dict[str, dict[str, object]] = {
        "counts": {"alone": True}, "long": {"rank": LAST, "gigabytes": 100}, "usual": {"gigabytes": 60},
        "large": {"gigabytes": 90}, "new": {"rank": FIRST, "gigabytes": 60}, "breaks": {"alone": True, "rank": FIRST},
    }  # fmt: skip
    runner.run([python(name, "pass", **fields) for name, fields in settings.items()])
    assert list(runner.verdicts) == ["breaks", "new", "large", "usual", "long", "counts"]


def test_every_check_of_the_folder_is_run_and_each_file_exists(tmp_path: Path) -> None:
    checks = all_checks(MODELS, tmp_path, embedded="model.gguf")
    names = {Path(check.command[1]).stem for check in checks}
    assert names == {path.stem for path in (ROOT / "tests/gpu").glob("check_*.py")} - {"check_probe"} | {"check_ops"}
    assert all((ROOT / check.command[1]).is_file() for check in checks)
    assert len({check.name for check in checks}) == len(checks)
    assert [check.name for check in checks if check.rank == FIRST] == [
        "sticky-random:qwen3-0.6b", "tiers-qwen3-0.6b", "overlap-qwen3-0.6b", "mixed_graphs-qwen3-0.6b", "embedding", "grouping",
    ]  # fmt: skip
