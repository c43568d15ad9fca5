"""The one suite that every backend passes. What needs a GPU is run there by tests/gpu/check_device.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.agent.device.conformance.bench import Bench
from tests.agent.device.conformance.cases import CASES
from tests.agent.device.conformance.subjects import cpu_subject, null_subject
from tests.needs import need_cpu_kernels

from dragoman_agent.device.cpu_road import KV_DTYPES, TORCH_ROADS

# Cases that compare work which was cut otherwise, and one that compares with float64.
CUT_OTHERWISE = (
    "prefill_in_parts_is_prefill_as_a_whole", "decode_is_prefill", "a_row_is_the_same_alone_and_in_company",
    "hidden_states_are_pooled", "given_tokens_are_scored", "numbers_are_those_of_a_float64_model",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module", params=["null", *KV_DTYPES])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param not in ("null", *TORCH_ROADS):
        need_cpu_kernels()
    opened = Bench(null_subject() if request.param == "null" else cpu_subject(request.param))
    yield opened
    opened.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_backend(bench: Bench, case: Callable[[Bench], None]) -> None:
    case(bench)


def under_the_interpreter(*arguments: str) -> dict[str, str]:
    """What became of each case on the GPU backend's code under Triton's interpreter: a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.agent.device.conformance.run", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    lines = {match[2]: match[0] for match in re.finditer(r"^(ok|OFF) (\w+) .*$", done.stdout, re.MULTILINE)}
    assert lines, done.stderr
    return lines


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return under_the_interpreter("interpreted")


@pytest.fixture(scope="module")
def listed() -> dict[str, str]:
    return under_the_interpreter("listed", *CUT_OTHERWISE)


@pytest.fixture(scope="module")
def deterministic() -> dict[str, str]:
    return under_the_interpreter("deterministic", *CUT_OTHERWISE)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_gpu_code_under_the_interpreter(interpreted: dict[str, str], case: str) -> None:
    assert interpreted[case].startswith("ok "), interpreted[case]


@pytest.mark.parametrize("case", CUT_OTHERWISE)
def test_contexts_cut_by_work_lists_are_attended_as_a_whole(listed: dict[str, str], case: str) -> None:
    assert listed[case].startswith("ok "), listed[case]


@pytest.mark.parametrize("case", CUT_OTHERWISE)
def test_a_deterministic_plan_gives_the_same_bits(deterministic: dict[str, str], case: str) -> None:
    assert deterministic[case].startswith("ok "), deterministic[case]
