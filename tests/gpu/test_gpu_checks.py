"""The runner of the GPU checks: what fails, hangs or breaks does not cost the others."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
from benchmarks.gpu_checks import MODELS, ROOT, Check, Runner, all_checks


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
    assert {name: verdict["ok"] for name, verdict in runner.verdicts.items()} == {
        "alone": True, "good": True, "bad": False, "hangs": False,
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


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    runner = Runner(tmp_path, -1.0)
    runner.run([python("late", "print('ok')")])
    assert runner.verdicts["late"] == {"ok": False, "seconds": 0.0, "problem": "no time was left"}


def test_every_check_of_the_folder_is_run_and_each_file_exists() -> None:
    checks = all_checks(MODELS, embedded="model.gguf")
    names = {Path(check.command[1]).stem for check in checks}
    assert names == {path.stem for path in (ROOT / "tests/gpu").glob("check_*.py")} - {"check_probe"} | {"check_ops"}
    assert all((ROOT / check.command[1]).is_file() for check in checks)
    assert len({check.name for check in checks}) == len(checks)
    assert [check.name for check in checks if check.last] == ["sticky-random:qwen3-0.6b"]
