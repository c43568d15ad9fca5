"""A module of tests in a process of its own, since how Triton runs kernels is chosen when they are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def printed_by(module: str, *arguments: str, timeout: float = 300, **environ: str) -> str:
    """What `tests.agent.device.<module>` prints; it chooses by itself whether kernels are interpreted."""
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.agent.device.{module}", *arguments], cwd=ROOT, text=True, capture_output=True,
        env={**inherited, "PYTHONPATH": str(ROOT), **environ}, check=False, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
