"""Graphs of steps with prompts: where the device is surely quicker than the host, and memory allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman_agent.device.cuda_inputs import Room
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.plan import LibraryPrefill, Plan
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.planner_batch import GRAPH_NODE_BYTES
from dragoman_agent.pal.planner_mixed import mixed_graph_bytes
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of

Card, Shapes = Callable[..., Profile], Callable[[str], ModelConfig]


def planned(card: Profile, model: ModelConfig, **limits: int | bool) -> tuple[Plan, Decision]:
    plan, decisions = plan_for(card, model, Limits(**limits), Switches())  # type: ignore[arg-type]
    return plan, next(decision for decision in decisions if decision.subject == "mixed-graphs")


def test_up_to_the_step_that_the_host_hands_over_in_no_less(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    plan, decision = planned(card(), model)
    sizes = plan.mixed_graph_tokens
    assert sizes and list(sizes) == sorted(set(sizes))
    handover = step_cost.handover_seconds(rates_of(card()), model)
    predicted = {candidate.name: candidate.predicted for candidate in decision.candidates}
    assert sizes[-1] == max(int(name) for name, seconds in predicted.items() if seconds <= 0.9 * handover)
    for name, seconds in predicted.items():
        if int(name) < sizes[-1]:
            padded = predicted[str(next(size for size in sizes if size >= int(name)))]
            assert padded <= 1.1 * seconds or int(name) in sizes, name
    assert f"{1e3 * handover:.1f} ms" in decision.reason
    assert decision.predicted == predicted[str(next(size for size in sizes if size >= 64))]
    slow, _ = planned(card({"scheduling.host_launch": 34e-6}), model)
    quick, none = planned(card({"scheduling.host_launch": 0.1e-6}), model)
    assert len(slow.mixed_graph_tokens) > len(sizes) and quick.mixed_graph_tokens == ()
    assert none.chosen == "none" and none.predicted is None and "no step is" in none.reason
    assert quick.chunk_graph is False, "handing it over is nothing beside computing it"


def test_a_short_prompt_no_longer_waits_for_the_host(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    plan, decision = planned(card(), model)
    without, _ = plan_for(card(), model, Limits(), Switches(launch_tuning=False))
    assert decision.predicted is not None
    assert plan.step_model.prefill_base_seconds == decision.predicted < without.step_model.prefill_base_seconds / 2


def test_their_memory_is_in_the_budget_and_small_beside_kv(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    plan, _ = planned(card(), model)
    lines = {line.name: line.size_bytes for line in plan.memory}
    taken = mixed_graph_bytes(model, plan.mixed_graph_tokens, plan.max_num_seqs)
    assert lines["graphs"] > taken > 0
    small, decision = planned(card({"memory.free": 4 << 30}), model)
    left = mixed_graph_bytes(model, small.mixed_graph_tokens, small.max_num_seqs)
    assert 0 < left <= 0.02 * (4 << 30) and len(small.mixed_graph_tokens) < len(plan.mixed_graph_tokens)
    assert "takes more memory than it is worth" in {candidate.rejected_because for candidate in decision.candidates}


def test_none_is_longer_than_a_step_may_be(card: Card, shapes: Shapes) -> None:
    plan, decision = planned(card(), shapes("qwen3-0.6b"))
    assert plan.mixed_graph_tokens[-1] < plan.max_batch_tokens
    assert plan.chunk_graph and plan.captured_tokens == (*plan.mixed_graph_tokens, plan.max_batch_tokens)
    assert f"steps of {plan.max_batch_tokens:,} tokens, which fill a chunk" in decision.reason


def test_a_full_step_has_a_graph_unless_its_memory_is_worth_more_as_kv(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    small, _ = planned(card({"memory.free": 4 << 30}), model)
    assert small.mixed_graph_tokens and not small.chunk_graph
    plan, _ = planned(card(), model)
    whole = mixed_graph_bytes(model, plan.captured_tokens, plan.max_num_seqs)
    assert whole - mixed_graph_bytes(model, plan.mixed_graph_tokens, plan.max_num_seqs) > plan.max_batch_tokens * 1024
    assert whole < {line.name: line.size_bytes for line in plan.memory}["graphs"]


def test_a_graph_that_is_there_for_the_library_and_for_us_is_paid_for_twice(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    plan, _ = planned(card(), model)
    library = LibraryPrefill("cudnn", plan.captured_tokens[-2], 16)
    ops: Any = SimpleNamespace(library=object(), queries_an_item=64)
    theirs = [room for room in Room.all_of(replace(plan, library_prefill=library), ops) if not room.is_ours]
    assert len(theirs) == 4, "two sizes, each for few sequences and for many"
    each = step_cost.num_kernels(model, is_split=True) * GRAPH_NODE_BYTES
    expected = sum(each + 2 * room.num_tokens * model.hidden_size for room in theirs)
    with_library = mixed_graph_bytes(model, plan.captured_tokens, plan.max_num_seqs, library)
    assert with_library - mixed_graph_bytes(model, plan.captured_tokens, plan.max_num_seqs) == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_contexts_of_few_sequences_are_split_as_for_half_of_them_but_where_the_order_is_fixed(
    card: Card, shapes: Shapes, deterministic: bool
) -> None:
    plan, _ = planned(card(), shapes("qwen3-0.6b"), deterministic=deterministic)
    assert plan.mixed_graph_tokens
    assert plan.mixed_decode(64) == plan.decode_for(64 if deterministic else 32)
    assert plan.mixed_decode(1) == plan.decode_for(1)
    assert plan.mixed_decode(256) == plan.decode_for(256), "programs that find nothing to do take time too"
