"""The README's example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "clients" / "text" / "README.md"


def test_the_example_prints_the_text_before_the_stop() -> None:
    code = README.read_text().split("```python\n")[1].split("```")[0]
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "Hi"
