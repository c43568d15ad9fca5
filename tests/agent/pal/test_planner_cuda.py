"""The CUDA planner: from a profile alone, so it runs anywhere."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, PlanError
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value, now

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b", "qwen3-embedding-0.6b")


def card(bandwidth: float = 4.3e12, rate: float = 7.6e14, free: int = 139 << 30) -> Profile:
    """A card with the given figures; the defaults are those of an H200."""
    values = {
        "memory.free": Value(free, "bytes", "reported"),
        "memory.read_bandwidth": Value(bandwidth, "bytes/s", "measured", spread=0.1),
        "compute.matmul_bfloat16": Value(rate, "flop/s", "measured", spread=0.1),
        "scheduling.graph_node": Value(1.4e-6, "s", "measured", spread=0.1),
    }
    return Profile("test", DeviceFacts("cuda", 0, "card", "sm_90", free, "id"), "print", now(), values)


def plan_of(model: str, profile: Profile, **limits: int) -> Plan:
    return plan_cuda(profile, open_model(f"random:{model}", Path()).config, Limits(**limits))[0]


@pytest.mark.parametrize("model", MODELS)
def test_the_budget_adds_up_to_free_memory(model: str) -> None:
    plan = plan_of(model, card())
    assert sum(line.size_bytes for line in plan.memory) == 139 << 30
    assert all(line.size_bytes >= 0 for line in plan.memory)
    # A full batch of decodes must leave room for prefill in the same step.
    assert plan.max_batch_tokens >= 2 * plan.max_num_seqs


def test_small_models_get_larger_steps() -> None:
    assert plan_of("qwen3-0.6b", card()).max_batch_tokens > plan_of("qwen3-8b", card()).max_batch_tokens


@given(st.integers(1 << 30, 140 << 30))
def test_either_it_fits_or_it_says_why(free: int) -> None:
    try:
        plan = plan_of("qwen3-8b", card(free=free))
    except PlanError as error:
        assert "qwen3-8b does not fit" in str(error)
        assert "What to do" in str(error)
        assert free < 24 << 30
        return
    assert plan.max_context_tokens <= (plan.num_blocks - 1) * plan.page_size
    assert sum(line.size_bytes for line in plan.memory[:-1]) <= free


def test_every_field_has_a_reasoned_decision() -> None:
    _, decisions = plan_cuda(card(), open_model("random:qwen3-8b", Path()).config, Limits())
    assert {"road", "page-size", "max-context", "step-tokens", "max-seqs", "graphs", "kv-blocks", "step-model"} == {
        decision.subject for decision in decisions
    }
    assert all(decision.reason for decision in decisions)


def test_a_plan_survives_the_way_to_the_engine_process() -> None:
    config = EngineConfig("cuda", "random:qwen3-0.6b", plan_of("qwen3-0.6b", card()))
    again = EngineConfig.from_json(json.dumps(json.loads(config.to_json())))
    assert again == config
    assert again.plan.digest() == config.plan.digest()
