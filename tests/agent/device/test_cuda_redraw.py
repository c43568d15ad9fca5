"""Rows with filters and edits, as a GPU's kernels draw them, against the host's sampler: equal ids, to the last one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.agent.device.apart import printed_by
from tests.agent.engine.sampling_cases import make_batch

from dragoman_agent.device.base import Penalties
from dragoman_agent.engine import sampling_words
from dragoman_agent.engine.sampling_words import edited_rows, rows_to_draw, words_of


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """In a process of its own, where kernels are interpreted."""
    shown: dict[str, Any] = json.loads(printed_by("redraw_interpreted", OMP_NUM_THREADS="1"))
    return shown


@pytest.mark.parametrize(
    "check", ["any_batch", "many_candidates", "both_zeros", "alone_and_among_others", "steps_that_go_on"]
)
def test_the_kernels_draw_what_the_host_draws(found: dict[str, Any], check: str) -> None:
    assert found[check] == []


def test_what_is_kept_for_it_is_in_the_plan(found: dict[str, Any]) -> None:
    assert found["memory"] == []


def test_what_cannot_be_drawn_is_refused(found: dict[str, Any]) -> None:
    said = found["refusals"]
    assert all("token 10, but the vocabulary has 10" in one for one in said[:4])
    assert "banned names token -10" in said[4] and "0 bits a row, but the vocabulary has 10" in said[5]


def test_the_words_are_read_as_they_are_written() -> None:
    """Without importing Triton into this process, which chooses then how kernels run."""
    from pathlib import Path

    root = Path(sampling_words.__file__).parents[3] / "kernels" / "dragoman_kernels" / "triton"
    assert f"\nNUM_WORDS = {sampling_words.NUM_WORDS} " in (root / "filters.py").read_text()
    assert f"\nNUM_FIELDS = {sampling_words.NUM_FIELDS}\n" in (root / "edits.py").read_text()


def test_rows_that_temperature_alone_draws_are_left_to_it() -> None:
    batch = make_batch(
        7, temperature=[1, 1, 0, 0, 1, 1, 1], top_k=[0, 3, 3, 0, 0, 0, 0], top_p=[1, 1, 0.5, 1, 0.9, 1, 1], num_logprobs=2,
        min_p=[0, 0, 0, 0, 0, 0.1, 0], banned={3: np.array([1], np.int32)},
    )  # fmt: skip
    edited = edited_rows(batch)
    assert edited == {3}
    assert rows_to_draw(batch, edited).tolist() == [1, 3, 4, 5]


def test_the_words_name_the_kernels_that_are_needed() -> None:
    ids = np.array([1, 1, 2], np.int32)
    batch = make_batch(
        4, temperature=[0, 1, 1, 1], top_k=[7, 0, 500, 0], min_p=[0, 0.1, 0, 0],
        penalties={0: Penalties(1.2, 0, 0, ids, ids)}, masked_rows=np.array([2], np.int32), masks=np.full((1, 4), 5, np.int32),
    )  # fmt: skip
    edited = edited_rows(batch)

    def needs(rows: list[int]) -> tuple[int, bool, bool, bool]:
        made = words_of(batch, np.array(rows), edited, 100)
        return made.num_edited, made.has_filters, made.has_random, made.has_lists

    assert needs([0]) == (1, False, False, True), "a greedy row has no filters"
    assert needs([1]) == (0, False, True, False), "min-p alone needs no search"
    assert needs([2]) == (1, False, True, False), "top-k of more than there are keeps all"
    assert needs([0, 1, 2]) == (2, False, True, True)
    batch.top_ps[1] = 0.9
    assert needs([1]) == (0, True, True, False)
    made = words_of(batch, np.array([1, 2]), edited, 100)
    words = np.concatenate(made.parts)
    mask = words[made.base + 12]
    assert words[:2].tolist() == [1, 2] and words[mask : mask + 4].tolist() == [5] * 4
