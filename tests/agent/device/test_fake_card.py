"""No step of the GPU backend makes the host wait for the card, and none mixes what lies on the card with what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.agent.device.apart import printed_by


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own: kernels are replaced there, and not interpreted."""
    shown: dict[str, Any] = json.loads(printed_by("fake_card", OMP_NUM_THREADS="1"))
    return shown


@pytest.mark.parametrize("plan", ["planned", "dependent", "deterministic", "grouped", "listed"])
def test_a_step_is_handed_over_without_waiting(found: dict[str, Any], plan: str) -> None:
    waits = found[plan]
    assert len(waits) == 3 * 6 + 3 and "long sampled late" in waits and "blocks" in waits
    assert {name: calls for name, calls in waits.items() if calls} == {}


@pytest.mark.parametrize(
    ("fault", "step", "call"),
    [
        ("pageable", "decode", "copy_"),
        ("index", "mixed", "index"),
        ("item", "mixed", "aten._local_scalar_dense.default"),
    ],
)
def test_what_waits_is_named(found: dict[str, Any], fault: str, step: str, call: str) -> None:
    assert found[fault][step] == [call]


def test_a_tensor_that_lies_elsewhere_is_refused(found: dict[str, Any]) -> None:
    assert found["elsewhere"] == "_resolve_kernel is given a tensor on cpu"
