"""The runner of the GPU checks: what fails, hangs or breaks does not cost the others."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from benchmarks.gpu_checks import FIRST, LAST, MODELS, ROOT, Check, Runner, all_checks, figure_checks, file_of, main


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
    names = {file_of(check).stem for check in checks}
    scripts = {path.stem for path in (ROOT / "tests/gpu").glob("check_*.py")} - {"check_probe"}
    assert names == scripts | {"check_ops", "sampling_gpu", "submit_gpu"}
    assert all((ROOT / file_of(check)).is_file() for check in checks)
    assert len({check.name for check in checks}) == len(checks)
    assert [check.name for check in checks if check.rank == FIRST] == [
        "sticky-random:qwen3-0.6b", "tiers-qwen3-0.6b", "overlap-qwen3-0.6b", "mixed_graphs-qwen3-0.6b", "embedding", "grouping",
    ]  # fmt: skip


def test_figures_go_to_a_file_named_as_the_check_and_their_scripts_take_the_options(tmp_path: Path) -> None:
    checks = all_checks(MODELS, tmp_path)
    out = {one.name: Path(one.command[one.command.index("--out") + 1]) for one in checks if "--out" in one.command}
    assert {name: path.name for name, path in out.items()} == {name: f"{name}.json" for name in out}
    assert all(path.parent == tmp_path for path in out.values())
    assert set(out) == {
        "tiers-qwen3-0.6b", "overlap-qwen3-0.6b", "determinism", "determinism-cost", "kv_fp8", "embedding", "sampling_gpu",
        "submit_gpu",
    }  # fmt: skip
    assert all(one.alone for one in figure_checks("m", tmp_path)), "what is timed has the card to itself"
    commands = {one.name: one.command for one in checks}
    assert "--cost" in commands["determinism-cost"] and "--no-rows" not in commands["determinism"]
    assert "--speed" in commands["kv_fp8"]
    for name in out:
        text = (ROOT / file_of(next(one for one in checks if one.name == name))).read_text()
        asked = [word for word in commands[name] if word.startswith("--")]
        assert [word for word in asked if f'"{word}"' not in text] == [], name


def test_a_check_is_told_where_its_files_go(tmp_path: Path) -> None:
    runner = Runner(tmp_path, 30.0)
    runner.run([python("where", "import os; print('ok', os.environ['OUT'])")])
    assert (tmp_path / "where.log").read_text() == f"ok {tmp_path}\n"


def test_checks_are_chosen_and_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("figures-a", "figures-b", "other")
    monkeypatch.setattr("benchmarks.gpu_checks.all_checks", lambda *_: [python(name, "pass") for name in names])
    monkeypatch.setattr("benchmarks.gpu_checks.PROFILE", "pass")
    for arguments, left in ((["--only", "figures"], names[:2]), (["--skip", "figures"], names[2:]), (["--only", "figures", "--skip", "figures-a"], names[1:2])):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["gpu_checks", str(tmp_path), *arguments])
        assert main() == 0
        assert set(json.loads((tmp_path / "checks.json").read_text())) == {"profile", *left}


@pytest.mark.parametrize(
    ("flag", "names"), [("--only", "nonsense"), ("--only", "facts,"), ("--skip", "facts,nonsense")]
)
def test_a_name_that_no_check_has_is_refused_before_any_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, names: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_checks", str(tmp_path), flag, names])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and f"{flag}: no check's name begins with" in capsys.readouterr().err
    assert not (tmp_path / "checks.json").exists()
