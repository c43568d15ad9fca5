"""The README's examples, taken out of it and run as they stand, against real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dragoman import Client

README = Path(__file__).parents[2] / "clients/python/README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def served(controller: str) -> str:
    with Client(controller) as client:
        deadline = time.monotonic() + 10
        while not client.agents():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return controller


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example: str, served: str) -> None:
    environ = {**os.environ, "DRAGOMAN_CONTROLLER": served}
    done = subprocess.run([sys.executable, "-c", example], env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
    assert done.stderr == ""


def test_the_first_example_streams_in_ten_lines() -> None:
    code = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(code) <= 10
    assert "async for token in" in EXAMPLES[0]
