"""The script of the GPU groups: what a part has written is packed while it runs, and when it has failed."""

from __future__ import annotations

import os
import subprocess
import tarfile
import time
from pathlib import Path

from benchmarks import gpu_checks, pal_gpu

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.sh"
# Stands in for the benchmark: writes to its last argument, and ends when it is told to.
PYTHON = """#!/bin/sh
for last in "$@"; do :; done
echo {{}} > "$last"
while [ ! -e "{stop}" ]; do sleep 0.05; done
exit 3
"""


def names(archive: Path) -> list[str]:
    try:
        with tarfile.open(archive) as held:
            return held.getnames()
    except OSError:
        return []


def start(tmp_path: Path, seconds: str) -> subprocess.Popen[str]:
    """The group of quotes, which pack every `seconds`; it has begun."""
    python = tmp_path / "python3"
    python.write_text(PYTHON.format(stop=tmp_path / "stop"))
    python.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PACK_SECONDS": seconds,
        "TMPDIR": str(tmp_path),
    }
    command = ["bash", str(SCRIPT), str(tmp_path / "out"), "quote"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def commands(tmp_path: Path, group: str, *models: str, then: str = "") -> list[list[str]]:
    """What a group runs: `python3` says how it is called and under which limits, and does what is in `then`."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho "ran $DRAGOMAN_SM_LIMIT $@ ${{OUT:+out=$OUT}}"\n{then}\n')
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "PACK_SECONDS": "60"}
    for name in ("DRAGOMAN_SM_LIMIT", "OUT"):
        environ.pop(name, None)
    command = ["bash", str(SCRIPT), str(tmp_path / "out"), group, *models]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=40, check=True)
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran ")]


def test_every_part_of_the_hardware_layers_figures_is_in_a_group(tmp_path: Path) -> None:
    """And each file that is run is there."""
    pal, plan, probe = (commands(tmp_path, group) for group in ("pal", "plan", "probe"))
    parts = ",".join(run[run.index("--only") + 1] for run in (pal[0], plan[0]))
    assert sorted(parts.split(",")) == sorted(pal_gpu.PARTS), "each once"
    assert pal[0][:5] == ["-m", "benchmarks.pal_gpu", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"] and len(pal) == 1
    small = plan[1]
    assert small[:4] == ["24", "-m", "benchmarks.small_card", "qwen3-0.6b"]
    out = plan[0][plan[0].index("--out") + 1]
    assert small[small.index("--whole-timings") + 1] == f"{out}/timings.json", "as pal_gpu writes them"
    assert (SCRIPT.parents[1] / probe[0][0]).is_file()
    only = probe[1][probe[1].index("--only") + 1].split(",")
    known = {check.name for check in gpu_checks.all_checks(gpu_checks.MODELS, tmp_path)}
    assert set(only) <= known and only, "each by its whole name"
    assert probe[1][-1] == f"out={probe[1][2]}", "where a check leaves its figures is what is packed"


def test_the_peer_is_run_right_behind_each_model_of_ours(tmp_path: Path) -> None:
    """With our results where there are any, and within the nine minutes."""
    ran = commands(
        tmp_path, "peer", then='case "$2 $3" in *engine_gpu*qwen*) for last; do :; done; echo {} > "$last";; esac'
    )
    assert [run[1:3] for run in ran] == [
        [f"benchmarks.{name}", model]
        for model in ("qwen3-0.6b", "llama-3.2-1b")
        for name in ("engine_gpu", "peer_transformers")
    ]
    ours, theirs, _, alone = ran
    assert ours[ours.index("--benches") + 1] == "decode,prefill"
    assert theirs[theirs.index("--ours") + 1] == ours[-1] and "--ours" not in alone
    assert len({run[-1] for run in ran}) == 4, "a file each"
    seconds = [int(run[run.index("--seconds") + 1]) for run in (theirs, alone)]
    assert 230 < seconds[0] < 260 and 500 < seconds[1] < 530
    (_, one) = commands(tmp_path, "peer", "qwen3-8b")
    assert one[2] == "qwen3-8b" and 500 < int(one[one.index("--seconds") + 1]) < 530


def test_checks_and_figures_are_all_checks_between_them_each_once(tmp_path: Path) -> None:
    (checks,), (figures,) = (commands(tmp_path, group) for group in ("checks", "figures"))
    left_out, chosen = checks[checks.index("--skip") + 1], figures[figures.index("--only") + 1]
    assert left_out == chosen
    assert all(run[-1] == f"out={run[2]}" and "--models" in run for run in (checks, figures))
    known = gpu_checks.all_checks(gpu_checks.MODELS, tmp_path)
    with_figures = {check.name for check in known if "--out" in check.command}
    assert {check.name for check in known if check.name.startswith(tuple(chosen.split(",")))} == with_figures
    assert all(any(name.startswith(one) for name in with_figures) for one in chosen.split(","))


def test_figures_of_the_other_groups_are_kept(tmp_path: Path) -> None:
    runs = {
        run[1] if run[0] == "-m" else run[0]: run for group in ("tiers", "rows") for run in commands(tmp_path, group)
    }
    for name in ("tests/gpu/check_tiers.py", "benchmarks.sampling_gpu", "benchmarks.submit_gpu", "benchmarks.tiers"):
        out = Path(runs[name][runs[name].index("--out") + 1])
        assert out.suffix == ".json" and out.parent.parent == tmp_path, "in what is packed"


def test_results_leave_while_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(tmp_path, "0.1") as script:
        try:
            deadline = time.monotonic() + 20
            while "./quote.json" not in names(out / "quote.tar") and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "./quote.json" in names(out / "quote.tar") and script.poll() is None
        finally:
            (tmp_path / "stop").touch()
        script.communicate(timeout=20)


def test_the_end_packs_once_more_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """And holds up nobody who reads what it says, though the packer sleeps on."""
    (tmp_path / "stop").touch()
    begun = time.monotonic()
    with start(tmp_path, "60") as script:
        said, _ = script.communicate(timeout=40)
    assert time.monotonic() - begun < 40
    assert script.returncode == 1 and "FAILED (3): python3 -m benchmarks.quote" in said
    assert names(tmp_path / "out" / "quote.tar") == [".", "./quote.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["quote.tar"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "python3", "stop"]
