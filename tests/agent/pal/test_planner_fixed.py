"""Deterministic plans: what is fixed, what it says, who refuses, and that no switch or timing breaks the promise."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import FIXED_GEMM_ROWS, tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.gemm_cost import fixed_gemm_seconds
from dragoman_agent.pal.kernel_calls import parse_key
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, PlanError, Road, Switches, plan_for
from dragoman_agent.pal.planner_fixed import choose_fixed_attention, choose_fixed_gemm
from dragoman_agent.pal.profile import DeviceFacts, Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_agent.pal.step_cost import fixed_gemm_call, matrices
from dragoman_agent.pal.timings import Timings
from dragoman_kernels.triton.launches import FIXED_GEMM_LAUNCHES, FIXED_PART_TOKENS, FixedGemmLaunch

Card = Callable[..., Profile]
Shapes = Callable[[str], ModelConfig]
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")


def planned(profile: Profile, model: ModelConfig, switches: Switches | None = None, **limits: int) -> tuple[Plan, dict[str, Decision]]:  # fmt: skip
    plan, decisions = plan_for(profile, model, Limits(deterministic=True, **limits), switches or Switches())
    return plan, {decision.subject: decision for decision in decisions}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("switches", [Switches(), Switches.off(), Switches(launch_tuning=False)])
def test_every_step_is_in_one_order_whatever_is_switched_off(
    name: str, switches: Switches, card: Card, shapes: Shapes
) -> None:
    model = shapes(name)
    plan, _ = planned(card(), model, switches)
    assert plan.deterministic and plan.prefill_attention is not None
    assert plan.prefill_attention.variant == "fixed" and plan.attention_part_tokens == FIXED_PART_TOKENS
    assert FIXED_PART_TOKENS % plan.prefill_attention.block_n == 0
    tile = (plan.prefill_attention.block_n, plan.prefill_attention.num_warps, plan.prefill_attention.num_stages)
    assert {(one.block_n, one.num_warps, one.num_stages) for one in plan.decode_attention} == {tile}
    # Nothing that looks at the number of rows is left.
    assert (plan.gemm_decode, plan.min_gemm_rows, plan.dependent_max_batch, plan.burst) == ((), 1, 0, False)
    wanted = {*matrices(model), (model.vocab_size, model.hidden_size)}
    assert {(one.n, one.k) for one in plan.gemm_fixed} == wanted
    last = {(one.n, one.k): one for one in plan.gemm_fixed}
    assert all(one.max_rows == 0 for one in last.values()), "the last tile of each matrix takes any number of rows"
    if not switches.launch_tuning:
        assert len(plan.gemm_fixed) == len(wanted), "tiles are chosen by rows although nothing is tuned"


def test_it_is_another_plan_and_says_why(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    usual, _ = plan_for(card(), model, Limits(), Switches())
    plan, decisions = planned(card(), model)
    assert not usual.deterministic and usual.gemm_fixed == () and usual.attention_part_tokens == 0
    assert plan.digest() != usual.digest()
    assert plan.digest() != dataclasses.replace(plan, attention_part_tokens=512).digest()
    fields = {field.name: field for field in plan_fields(plan)}
    assert fields["deterministic"].value is True and fields["gemm_fixed"].labels[0].startswith("4096x1024-m")
    assert "deterministic" not in {field.name for field in plan_fields(usual)}
    assert "asked for" in decisions["deterministic"].reason
    for subject in ("gemm-decode", "prefill-attention", "decode-attention", "dependent-launch", "burst", "gemm-rows"):
        assert "deterministic" in decisions[subject].reason, subject
    assert decisions["gemm-decode"].predicted is not None and decisions["gemm-decode"].predicted > 0


def test_few_sequences_share_a_context_among_programs_and_their_parts_have_memory(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    buckets, _, _ = choose_fixed_attention(card(), model, 64, 256, 8192)
    programs = [one.num_splits for one in buckets]
    assert programs == sorted(programs, reverse=True) and programs[0] == 32 and programs[-1] == 1
    assert choose_fixed_attention(card(), model, 64, 256, 300)[0][0].num_splits == 2  # it has no more parts
    usual, _ = plan_for(card(), model, Limits(max_num_seqs=16), Switches())
    plan, _ = planned(card(), model, max_num_seqs=16)
    size = {line.name: line.size_bytes for line in plan.memory}["workspace"]
    shared = max(one.max_batch for one in plan.decode_attention if one.num_splits > 1)
    parts = shared * -(-plan.max_context_tokens // FIXED_PART_TOKENS) * 4 * model.num_heads * (model.head_dim + 2)
    assert size >= parts + model.vocab_size * 16 * 2 and usual.max_context_tokens == plan.max_context_tokens


def test_tiles_follow_the_rows_and_say_what_makes_that_sound(card: Card, shapes: Shapes) -> None:
    chosen, decision = choose_fixed_gemm(KernelTimes(rates_of(card())), card(), shapes("qwen3-8b"))
    mine = [one for one in chosen if (one.n, one.k) == (4096, 12288)]
    assert [one.max_rows for one in mine] == sorted((one.max_rows for one in mine), key=lambda rows: rows or 1 << 30)
    few, many = mine[0], mine[-1]
    assert few.block_n < many.block_n and few.block_m <= many.block_m
    assert all(one != replace(other, max_rows=one.max_rows) for one, other in itertools.pairwise(mine))
    assert "equal bits, checked at load" in decision.reason
    one_each, decision = choose_fixed_gemm(KernelTimes(rates_of(card())), card(), shapes("qwen3-8b"), "switched off")
    assert [one.max_rows for one in one_each] == [0] * len(one_each) and "one tile for any rows" in decision.reason


def test_what_was_timed_decides_and_the_step_model_counts_it(card: Card, shapes: Shapes) -> None:
    model, profile = shapes("qwen3-0.6b"), card()
    plan, _ = planned(profile, model)
    cases = [case for case in tuning_cases(profile, model, plan) if case.kind == "gemm-fixed"]
    tiles = [tile for tile in FIXED_GEMM_LAUNCHES if tile.shared_bytes <= rates_of(profile).shared_per_block]
    assert len(cases) == len(tiles) * len(FIXED_GEMM_ROWS) * 5
    assert all(parse_key(case.key) is not None and parse_key(case.key).key == case.key for case in cases)  # type: ignore[union-attr]
    usual, _ = plan_for(profile, model, Limits(), Switches())
    assert not [case for case in tuning_cases(profile, model, usual) if case.kind == "gemm-fixed"]
    # One tile is quick, all others are slow: it is chosen everywhere.
    quick = tiles[2]
    seconds = {case.key: 1e-6 if case.config == quick else 1e-3 for case in cases}
    times = KernelTimes(rates_of(profile), Timings(profile.fingerprint, "").with_seconds(seconds))
    chosen, decision = choose_fixed_gemm(times, profile, model)
    assert {(one.block_n, one.block_k, one.max_rows) for one in chosen} == {(quick.block_n, quick.block_k, 0)}
    assert "measured on the device" in decision.reason
    assert times.seconds(fixed_gemm_call(1, 4096, 1024, quick)) == 1e-6
    # The price of the mode shows in what is predicted.
    assert plan.step_model.decode_step_seconds(1, 200) > usual.step_model.decode_step_seconds(1, 200)
    assert plan.step_model.prefill_tokens_per_second < usual.step_model.prefill_tokens_per_second


def test_a_tile_is_judged_by_memory_tensor_cores_and_what_programs_have_under_way(card: Card) -> None:
    rates = rates_of(card())
    small, large = FixedGemmLaunch(64, 32, 128, 4, 4), FixedGemmLaunch(128, 128, 64, 3, 8)
    assert fixed_gemm_seconds(rates, small, 1, 1024, 3072) < fixed_gemm_seconds(rates, large, 1, 1024, 3072)
    assert fixed_gemm_seconds(rates, large, 8192, 6144, 4096) < fixed_gemm_seconds(rates, small, 8192, 6144, 4096)
    weights = 2 * 151936 * 4096
    assert fixed_gemm_seconds(rates, large, 1, 151936, 4096) >= weights / rates.read_bandwidth


def test_a_card_with_little_shared_memory_gets_smaller_tiles_or_a_sentence(card: Card, shapes: Shapes) -> None:
    little = card({"memory.shared_per_block": 72 << 10})
    chosen, _ = choose_fixed_gemm(KernelTimes(rates_of(little)), little, shapes("qwen3-0.6b"))
    fitting = [tile for tile in FIXED_GEMM_LAUNCHES if tile.shared_bytes <= 72 << 10]
    assert fitting and {(one.block_m, one.block_n, one.block_k) for one in chosen} <= {
        (tile.block_m, tile.block_n, tile.block_k) for tile in fitting
    }
    with pytest.raises(PlanError, match=r"memory.shared_per_block.*leave --deterministic out"):
        tiny = card({"memory.shared_per_block": 1 << 10})
        choose_fixed_gemm(KernelTimes(rates_of(tiny)), tiny, shapes("qwen3-0.6b"))


def test_the_compiled_roads_of_a_cpu_keep_the_promise_and_torch_refuses() -> None:
    from tests.agent.pal.test_planner import MODEL, profile

    limits = Limits(deterministic=True)
    for name in ("native-int8", "native-float32"):
        road = Road(name, "a compiler is there", 97 << 20, "float16", 2.0)
        plan, decisions = plan_for(profile(), MODEL, limits, Switches(), road=road)
        assert plan.deterministic and decisions[-1].subject == "deterministic" and name in decisions[-1].reason
        assert plan.digest() != plan_for(profile(), MODEL, Limits(), Switches(), road=road)[0].digest()
    with pytest.raises(PlanError, match="cannot be kept on the road torch-float32"):
        plan_for(profile(), MODEL, limits, Switches(), road=Road("torch-float32", "", 97 << 20, "float32", 1.0))


def test_a_kind_whose_kernels_were_never_compiled_for_it_refuses(card: Card, shapes: Shapes) -> None:
    other = dataclasses.replace(card(), device=DeviceFacts("hip", 0, "a card", "gfx942", 64 << 30, "id"))
    with pytest.raises(PlanError, match="never compiled for hip devices"):
        plan_for(other, shapes("qwen3-0.6b"), Limits(deterministic=True), Switches())
