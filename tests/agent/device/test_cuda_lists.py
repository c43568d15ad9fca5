"""A decode step's contexts are cut by a list of its own, made once for all layers, in graphs and beside prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.agent.device.apart import printed_by

STEPS = ("two", "three", "four", "beside a short prompt", "beside a long prompt")


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """In a process of its own: Triton's interpreter is chosen when its kernels are imported."""
    found: dict[str, Any] = json.loads(printed_by("listed_steps", OMP_NUM_THREADS="1"))
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_list_is_made_once_a_step_and_read_by_every_layer(shown: dict[str, Any], name: str) -> None:
    step = shown[name]
    assert len(step["made"]) == 1 and step["reads"] == shown["num_layers"] > 1 and step["same"]
    assert step["off"] < 1e-4, "whichever way contexts are cut, they are attended whole"


def test_graphs_cut_the_lengths_of_the_step_that_they_replay(shown: dict[str, Any]) -> None:
    """Rows are (sequence, first and last tile, its first item, its number of items, its length), tiles of 16 keys."""
    assert shown["two"]["rows"] == [
        [0, 0, 1, 0, 1, 4], [1, 0, 1, 1, 3, 41], [1, 1, 2, 1, 3, 41], [1, 2, 3, 1, 3, 41]
    ]  # fmt: skip
    assert shown["three"]["made"] == [4], "the graph of four sequences"
    assert shown["three"]["rows"][-1] == [3, 0, 0, 5, 1, 0], "padding has an item, which writes its zeros"
    assert [row[0] for row in shown["four"]["rows"]] == [0, 1, 2, 2, 3]
    assert [row[5] for row in shown["four"]["rows"]] == [11, 12, 18, 18, 3]


def test_sequences_beside_prompts_are_cut_too(shown: dict[str, Any]) -> None:
    assert shown["beside a long prompt"]["made"] == [1], "kernel by kernel, for the sequences that there are"
    assert shown["beside a short prompt"]["made"] == [4], "in a graph, for those that there may be"
    for name in ("beside a short prompt", "beside a long prompt"):
        assert [row[:3] for row in shown[name]["rows"] if row[5]] == [[0, 0, 1], [0, 1, 2], [0, 2, 3]]
