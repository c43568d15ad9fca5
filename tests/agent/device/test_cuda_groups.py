"""Sequences of a decode step share programs as the engine asks, from one replay of a graph to the next, and get the same bits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.agent.device.apart import printed_by

from dragoman_agent.device.cuda_groups import GroupWords
from dragoman_agent.pal.plan import ShortGroups


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """In a process of its own: Triton's interpreter is chosen when its kernels are imported."""
    found: dict[str, Any] = json.loads(printed_by("grouped_steps", OMP_NUM_THREADS="1"))
    return found


def test_no_number_of_rows_a_program_changes_a_bit(shown: dict[str, Any]) -> None:
    assert shown["plain_words"] == ["None"]
    assert len(shown["grouped"]) == 5 and all(step == shown["plain"] for step in shown["grouped"])


def test_graphs_read_what_was_asked_for_up_to_what_the_plan_has_for_the_batch(shown: dict[str, Any]) -> None:
    """Three sequences run in the graph of four, with a row of padding. Beside prompts none share a program."""
    assert shown["words"] == [
        {"2": [two], "3": [four], "4": [four]} for two, four in ((1, 1), (2, 2), (2, 4), (2, 4), (1, 1))
    ]
    assert shown["beside prompts"] == []


def test_words_are_written_once_a_change_and_never_below_one() -> None:
    words = GroupWords(
        (ShortGroups(64, 100, 2, 128, 2e-6, 1e-6), ShortGroups(128, 200, 8, 128, 2e-6, 1e-6)), torch.device("cpu")
    )
    low, high = words.of(64), words.of(200)
    assert low is not None and high is not None and words.of(101) is None and words.of(63) is None
    assert (low.dtype, low.shape) == (torch.int32, (1,))
    words.want(4)
    assert (int(low), int(high)) == (1, 1), "steps under way are not touched"
    words.write()
    assert (int(low), int(high)) == (2, 4)
    high.fill_(7)
    words.want(4)
    words.write()
    assert int(high) == 7, "nothing is queued where nothing changed"
    words.want(0)
    words.write()
    assert (int(low), int(high)) == (1, 1)
    assert GroupWords((), torch.device("cpu")).of(64) is None
