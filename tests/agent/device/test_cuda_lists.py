"""A decode step's contexts are cut by a list of its own, made once for all layers, in graphs and beside prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.agent.device.apart import printed_by
from tests.agent.device.conformance.subjects import gpu_plan
from tests.agent.device.conformance.tiny_model import CONFIG

from dragoman_agent.device.cuda_make import make_ops
from dragoman_agent.device.kernel_forms import forms_of
from dragoman_agent.pal.plan import DecodeList, Plan
from dragoman_agent.pal.planner_memory import workspace_bytes
from dragoman_kernels.triton.attention_list import Cut, DecodeItems

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


# What is made for a plan's lists.

LISTS = (DecodeList(5, 20, 50, 4), DecodeList(33, 40, 100, 4))


def items_of(plan: Plan) -> DecodeItems:
    """As a device makes them."""
    angles = torch.zeros(4, CONFIG.head_dim // 2)
    items = make_ops(CONFIG, plan, angles, angles, 8, SimpleNamespace())._items  # type: ignore[arg-type]
    assert items is not None
    return items


def test_the_kernel_that_makes_lists_is_as_wide_as_they_are_long_however_many_sequences_may_run() -> None:
    """Past 1024 sequences, which no list has, it would keep what it computes in memory."""
    plan = replace(gpu_plan("cuda"), max_num_seqs=4096, decode_lists=LISTS)
    assert items_of(plan).padded_seqs == 64
    assert {form.sizes[0] for form in forms_of(CONFIG, plan) if form.kind == "list"} == {40}


def test_the_plan_counts_what_a_device_takes_for_its_lists() -> None:
    plan = replace(gpu_plan("cuda"), decode_lists=LISTS)
    items = items_of(plan)
    taken = sum(held.numel() * held.element_size() for held in (items.rows, items.arrived))
    sizes = CONFIG, plan.decode_attention, plan.max_batch_tokens, 4, plan.max_context_tokens, plan.page_size, ()
    planned = [workspace_bytes(*sizes, lists, deterministic=False) for lists in ((), LISTS)]
    parts = max(min(one.max_batch, 4) * one.num_splits for one in plan.decode_attention)
    more_parts = 4 * (100 - parts) * CONFIG.num_heads * (CONFIG.head_dim + 1)
    assert planned[1] - planned[0] == taken + more_parts


def test_a_list_of_more_sequences_than_its_kernel_reads_is_refused() -> None:
    items = DecodeItems(100, 16, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="a list of 17 sequences is longer than the 16"):
        items.make(torch.ones(17, dtype=torch.int32), Cut(40, 4, 64))
