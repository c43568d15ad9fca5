"""Every Triton op against float64, under the interpreter (float16 and float32: bf16 arithmetic is wrong there)."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("check_ops.py")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_ops_equal_float64_under_the_interpreter(dtype: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "cpu", dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") >= 11


def test_the_kernels_idea_of_greedy_is_the_samplers() -> None:
    from dragoman_agent.engine.sampling_terms import GREEDY_BELOW
    from dragoman_kernels.triton import sampling

    assert sampling.GREEDY_BELOW == GREEDY_BELOW
