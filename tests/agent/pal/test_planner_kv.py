"""The choice of bits for K and V: what was asked for, what fits, what the device can convert, and what follows from it."""

from collections.abc import Callable
from typing import Any

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.plan import KV_FLOAT8, Plan
from dragoman_agent.pal.planner import Limits, PlanError, Road, Switches, plan_for
from dragoman_agent.pal.planner_kv import KV_BFLOAT16, kv_model
from dragoman_agent.pal.profile import Profile

Card = Callable[..., Profile]
Shapes = Callable[[str], ModelConfig]


def planned(profile: Profile, model: ModelConfig, **limits: Any) -> tuple[Plan, Decision]:
    plan, decisions = plan_for(profile, model, Limits(**limits), Switches())
    return plan, next(one for one in decisions if one.subject == "kv-dtype")


def test_sixteen_bits_unless_asked_for(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    plan, decision = planned(card(), model)
    assert plan.kv_dtype == KV_BFLOAT16 and "--kv-dtype fp8" in decision.reason
    assert planned(card(), model, max_num_seqs=64, max_context_tokens=4096)[0].kv_dtype == KV_BFLOAT16
    asked, decision = planned(card(), model, kv_dtype="fp8")
    assert asked.kv_dtype == KV_FLOAT8 and "asked for" in decision.reason and decision.inputs
    assert asked.digest() != plan.digest()


def test_eight_bits_halve_a_tokens_memory_and_shorten_long_steps(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    wide, _ = planned(card(), model, max_num_seqs=256)
    narrow, _ = planned(card(), model, max_num_seqs=256, kv_dtype="fp8")
    kv = {line.name: line.size_bytes for line in narrow.memory}["kv"]
    assert kv == narrow.num_blocks * narrow.page_size * model.kv_bytes_per_token // 2
    assert narrow.num_blocks == pytest.approx(2 * wide.num_blocks, rel=0.02)
    long, short = (plan.step_model.decode_step_seconds(256, 4096) for plan in (wide, narrow))
    assert 0.5 < short / long < 0.8
    assert narrow.library_prefill is None  # it reads sixteen bits


def test_what_is_asked_for_decides_where_it_fits_in_eight_bits_only(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-8b")  # 144 KiB a token: a sequence of 32,768 takes 4.5 GiB
    free = 2 * model.num_parameters / 0.9 + (5 << 30)
    plan, decision = planned(card({"memory.free": int(free)}), model, max_context_tokens=32768, max_num_seqs=1)
    assert plan.kv_dtype == KV_FLOAT8 and "1 x 32,768 tokens take 4.50 GiB in bfloat16" in decision.reason
    assert [candidate.name for candidate in decision.candidates] == [KV_BFLOAT16, KV_FLOAT8]
    many = {"max_context_tokens": 32768, "max_num_seqs": 40}
    assert planned(card(), model, **many)[0].kv_dtype == KV_BFLOAT16  # blocks are taken as contexts grow
    together, decision = planned(card(), model, **many, all_at_once=True)
    assert together.kv_dtype == KV_FLOAT8 and "40 x 32,768" in decision.reason and "--kv-dtype fp8" in decision.reason
    roomy, decision = planned(card(), model, max_context_tokens=32768, max_num_seqs=1)
    assert roomy.kv_dtype == KV_BFLOAT16 and "fit as they are" in decision.reason
    with pytest.raises(PlanError):  # too much for eight bits too: the memory's own sentence
        planned(card({"memory.free": int(free) - (3 << 30)}), model, max_context_tokens=32768, max_num_seqs=1)


def test_a_device_that_cannot_convert_keeps_sixteen_and_refuses_eight(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    old = card({"compute.capability": "8.6"})
    with pytest.raises(PlanError, match=r"needs compute capability 8\.9.*has 8\.6"):
        planned(old, model, kv_dtype="fp8")
    assert planned(card({"compute.capability": "8.9"}), model, kv_dtype="fp8")[0].kv_dtype == KV_FLOAT8
    assert planned(old, model)[0].kv_dtype == KV_BFLOAT16


def test_other_words_and_other_kinds_are_refused(card: Card, shapes: Shapes) -> None:
    from tests.agent.pal.test_planner import MODEL, profile

    with pytest.raises(PlanError, match="--kv-dtype int4 is not one of auto, bf16, fp8"):
        planned(card(), shapes("qwen3-0.6b"), kv_dtype="int4")
    road = Road("native-int8", "", 97 << 20, "float16", 2.0)
    with pytest.raises(PlanError, match="a choice on CUDA devices"):
        plan_for(profile(), MODEL, Limits(kv_dtype="fp8"), Switches(), road=road)


def test_only_what_a_plan_counts_changes_with_the_bits(shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    assert kv_model(model, KV_BFLOAT16) is model
    assert kv_model(model, KV_FLOAT8).kv_bytes_per_token * 2 == model.kv_bytes_per_token
    assert kv_model(model, KV_FLOAT8).num_parameters == model.num_parameters
