"""The parts of a start add up to the time since the process began."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
time.sleep(0.3)
from dragoman_agent.engine.start_times import StartTimes
times = StartTimes()
times.mark("imports")
time.sleep(0.05)
times.mark("work")
times.moment("beside")
times.mark("imports")
print(times.seconds["imports"], times.seconds["work"], times.moments["beside"], times, sep="|")
"""


def test_the_first_part_begins_with_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    imports, work, beside, text = done.stdout.strip().split("|")
    assert 0.3 <= float(imports) < 30 and 0.05 <= float(work) < 5
    assert 0.35 <= float(beside) <= float(imports) + float(work) + 0.002, "a moment is no part: it ends none"
    assert text == f"imports {float(imports):.2f} s, work {float(work):.2f} s"
