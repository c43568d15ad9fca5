"""The script of the GPU groups: what a part has written is packed while it runs, and when it has failed."""

from __future__ import annotations

import os
import subprocess
import tarfile
import time
from pathlib import Path

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
