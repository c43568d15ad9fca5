"""The CUDA planner: from a profile alone, so it runs anywhere."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.layer_timing import plan_layer_cases
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, PlanError, Switches, plan_for
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value, load_profile, now
from dragoman_agent.pal.timings import Timings

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-8b", "qwen3-embedding-0.6b")
LIBRARY = Path(__file__).parents[3] / "gpu_agent" / "dragoman_agent" / "pal" / "library"
Card = Callable[..., Profile]
Shapes = Callable[[str], ModelConfig]


def plan_of(profile: Profile, model: ModelConfig, **limits: int) -> Plan:
    return plan_for(profile, model, Limits(**limits), Switches())[0]


def by_subject(decisions: list[Decision]) -> dict[str, Decision]:
    return {decision.subject: decision for decision in decisions}


@pytest.mark.parametrize("name", MODELS)
def test_the_budget_adds_up_to_free_memory(name: str, card: Card, shapes: Shapes) -> None:
    plan = plan_of(card(), shapes(name))
    assert [line.name for line in plan.memory] == ["weights", "kv", "graphs", "workspace", "context", "margin"]
    assert sum(line.size_bytes for line in plan.memory) == 139 << 30
    assert all(line.size_bytes > 0 for line in plan.memory)
    # A full batch of decodes must leave room for prefill in the same step.
    assert plan.max_batch_tokens >= 2 * plan.max_num_seqs


def test_every_field_of_the_plan_has_a_reasoned_decision(card: Card, shapes: Shapes) -> None:
    plan, decisions = plan_for(card(), shapes("qwen3-8b"), Limits(), Switches())
    subjects = by_subject(decisions)
    assert len(subjects) == len(decisions)
    made_elsewhere = {"device", "max-waiting"}  # by the selection, and by the agent's start
    assert {field.subject for field in plan_fields(plan)} - made_elsewhere <= set(subjects)
    assert all(decision.reason and decision.chosen for decision in decisions)
    for subject in ("page-size", "decode-attention", "prefill-attention", "max-seqs", "step-tokens", "graphs"):
        candidates = subjects[subject].candidates
        assert len(candidates) >= 3, subject
        assert sum(not one.rejected_because for one in candidates) == 1, subject


def test_what_was_measured_on_an_h200_is_predicted(card: Card, shapes: Shapes) -> None:
    """Device times of steps at a context of about 256, recorded with launches much like the planned ones."""
    measured = {
        "qwen3-0.6b": {1: 1.55e-3, 32: 1.735e-3, 256: 3.83e-3},
        "llama-3.2-1b": {1: 1.38e-3, 32: 1.45e-3, 256: 2.51e-3},
        "qwen3-8b": {1: 5.6e-3, 32: 5.7e-3, 256: 10.15e-3},
    }
    for name, steps in measured.items():
        model = plan_of(card(), shapes(name)).step_model
        for batch, seconds in steps.items():
            assert model.decode_step_seconds(batch, 256) == pytest.approx(seconds, rel=0.25), (name, batch)
    rate = plan_of(card(), shapes("qwen3-8b")).step_model.prefill_tokens_per_second
    assert rate == pytest.approx(39_300, rel=0.3)


def test_small_models_get_larger_steps(card: Card, shapes: Shapes) -> None:
    small, large = (plan_of(card(), shapes(name)) for name in ("qwen3-0.6b", "qwen3-8b"))
    assert small.max_batch_tokens == small.max_company_tokens >= 4 * large.max_company_tokens
    assert large.max_company_tokens == 2048  # the guidance of the public tables for 8B


def test_prompts_alone_get_larger_steps_than_beside_streams_where_those_would_wait(card: Card, shapes: Shapes) -> None:
    plan, decisions = plan_for(card(), shapes("qwen3-8b"), Limits(), Switches())
    told = {decision.subject: decision for decision in decisions}
    assert plan.full_tokens == (plan.company_tokens, plan.max_batch_tokens) and plan.max_batch_tokens > 2048
    alone, beside = told["step-tokens"], told["company-tokens"]
    assert alone.predicted <= 0.15 and beside.predicted <= 0.05 and "within 50 ms" in beside.reason
    assert plan.captured_tokens[-2:] == plan.full_tokens, "both kinds of full steps spare the host their hand-over"
    plan, decisions = plan_for(card(), shapes("qwen3-0.6b"), Limits(), Switches())
    beside = next(decision for decision in decisions if decision.subject == "company-tokens")
    assert (
        plan.max_company_tokens == int(beside.chosen) <= plan.max_batch_tokens
        and "within 1.0% of the best" in beside.reason
    )


def test_a_tighter_latency_target_makes_smaller_steps(card: Card, shapes: Shapes) -> None:
    limits = Limits(latency_target_seconds=0.02)
    tight = plan_for(card(), shapes("qwen3-8b"), limits, Switches())[0]
    assert tight.max_batch_tokens < plan_of(card(), shapes("qwen3-8b")).max_batch_tokens


def test_another_cards_profile_makes_another_plan(card: Card, shapes: Shapes) -> None:
    laptop = load_profile(LIBRARY / "rtx4060-laptop.json")
    for name in ("qwen3-0.6b", "llama-3.2-1b"):
        ours, theirs = plan_of(card(), shapes(name)), plan_of(laptop, shapes(name))
        assert [one.num_splits for one in ours.decode_attention] != [one.num_splits for one in theirs.decode_attention]
        for field in ("max_batch_tokens", "graph_batch_sizes", "num_blocks", "shared_memory_bytes"):
            assert getattr(ours, field) != getattr(theirs, field), field
        assert ours.digest() != theirs.digest()


def test_fewer_multiprocessors_get_fewer_splits(card: Card, shapes: Shapes) -> None:
    """A green context of 24 of the 132: what its figures were when measured so."""
    small = card({"compute.multiprocessors": 24, "memory.read_bandwidth": 1.76e12, "compute.matmul_bfloat16": 1.65e14})
    whole, part = (plan_of(profile, shapes("qwen3-0.6b")) for profile in (card(), small))
    assert part.decode_for(1).num_splits < whole.decode_for(1).num_splits
    assert part.max_batch_tokens < whole.max_batch_tokens


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b", "qwen3-8b"])
def test_more_multiprocessors_never_get_fewer_splits(name: str, card: Card, shapes: Shapes) -> None:
    counts = (1, 4, 8, 16, 24, 48, 96, 132, 200, 400)
    splits = [plan_of(card({"compute.multiprocessors": n}), shapes(name)).decode_for(1).num_splits for n in counts]
    # A doubling may tip back where two numbers of parts are as good as each other, never by more.
    assert all(after >= before / 2 for before, after in itertools.pairwise(splits)), splits
    assert splits[0] == 1 and splits[-1] >= 8


def test_splits_shrink_with_the_batch(card: Card, shapes: Shapes) -> None:
    plan = plan_of(card(), shapes("qwen3-8b"))
    splits = [plan.decode_for(batch).num_splits for batch in (1, 8, 64, 256)]
    assert splits == sorted(splits, reverse=True)
    assert splits[0] >= 8 and splits[-1] == 1
    assert [one.max_batch for one in plan.decode_attention] == sorted({one.max_batch for one in plan.decode_attention})
    assert plan.decode_attention[-1].max_batch >= plan.max_num_seqs == plan.graph_batch_sizes[-1]


def test_dependent_launch_needs_whole_layers_that_were_timed_and_gain(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    here = card({"scheduling.dependent_launch_gain": 8e-8})
    alone, decisions = plan_for(here, model, Limits(), Switches())
    assert (
        not alone.dependent_launch
        and "0.08 us each between empty ones" in by_subject(decisions)["dependent-launch"].reason
    )

    def with_gains(*gains: float) -> int:
        cases = plan_layer_cases(model, alone)
        plain = {case.key: 1e-3 for case in cases if case.key.endswith("/plain")}
        keys = [case.key for case in cases if case.key.endswith("/dependent")]
        early = {key: 1e-3 * (1 - gain) for key, gain in zip(keys, gains, strict=True)}
        timings = Timings(here.fingerprint, "k", {**plain, **early})
        return plan_for(here, model, Limits(), Switches(), timings)[0].dependent_max_batch

    batches = [case.shape["batch"] for case in plan_layer_cases(model, alone) if case.key.endswith("/plain")]
    assert with_gains(*[0.05] * len(batches)) == batches[-1]
    assert with_gains(0.07, 0.05, *[-0.1] * (len(batches) - 2)) == batches[1]
    assert with_gains(*[0.005] * len(batches)) == 0, "less than measurements scatter"
    assert not plan_of(card({"compute.capability": "8.9"}), model).dependent_launch
    assert not plan_of(card({"compute.dependent_launch": False}), model).dependent_launch


def test_offload_weighs_the_link_against_computing_again(card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-8b")
    assert plan_of(card(), model).prefetch
    slow, decisions = plan_for(card({"link.h2d_pinned": 1e9}), model, Limits(), Switches())
    assert not slow.prefetch
    assert "crosses the link in 147.46 us" in by_subject(decisions)["offload"].reason
    unmeasured, decisions = plan_for(card({"link.h2d_pinned": None}), model, Limits(), Switches())
    assert not unmeasured.prefetch
    assert "no link.h2d_pinned" in by_subject(decisions)["prefetch"].reason


def test_pal_off_is_the_fixed_configuration_on_every_card(card: Card, shapes: Shapes) -> None:
    model = shapes("llama-3.2-1b")
    plan, decisions = plan_for(card(), model, Limits(), Switches.off())
    assert plan.page_size == 16
    assert {one.num_warps for one in plan.decode_attention} == {4}
    assert (plan.max_batch_tokens, plan.max_num_seqs, plan.min_gemm_rows) == (2048, 256, 1)
    assert plan.graph_batch_sizes == (1, 2, 4, *range(8, 257, 8))
    assert not plan.dependent_launch and not plan.burst and not plan.prefetch and plan.gemm_decode == ()
    assert [plan.decode_for(batch).num_splits for batch in (1, 8, 16, 64)] == [4, 2, 1, 1]
    assert sum(decision.reason == "switched off by --pal off" for decision in decisions) >= 12
    laptop, _ = plan_for(load_profile(LIBRARY / "rtx4060-laptop.json"), model, Limits(), Switches.off())
    for field in ("page_size", "max_batch_tokens", "graph_batch_sizes", "prefill_attention", "min_gemm_rows"):
        assert getattr(laptop, field) == getattr(plan, field)


@pytest.mark.parametrize(
    ("switch", "subjects"),
    [
        ("arena", {"kv-blocks"}),
        ("launch_tuning", {"decode-attention", "prefill-attention", "long-prefill", "library-prefill", "gemm-rows", "gemm-decode", "gemm-library", "graphs", "mixed-graphs", "dependent-launch", "burst", "reduction", "attention-grouping", "decode-work-list"}),
        ("async_copy", {"offload", "prefetch", "host-tier"}),
        ("link_policy", {"offload", "prefetch", "host-tier"}),
    ],
)  # fmt: skip
def test_a_part_is_switched_off_alone(switch: str, subjects: set[str], card: Card, shapes: Shapes) -> None:
    model = shapes("qwen3-0.6b")
    on, _ = plan_for(card(), model, Limits(), Switches())
    off, decisions = plan_for(card(), model, Limits(), Switches(**{switch: False}))
    reason = f"switched off by --pal-{switch.replace('_', '-')} off"
    assert {decision.subject for decision in decisions if decision.reason == reason} == subjects
    assert off.page_size == on.page_size and off.max_batch_tokens == on.max_batch_tokens
    assert off.digest() != on.digest()


def test_a_plan_survives_the_way_to_the_engine_process(card: Card, shapes: Shapes) -> None:
    config = EngineConfig("cuda", "random:qwen3-0.6b", plan_of(card(), shapes("qwen3-0.6b")))
    again = EngineConfig.from_json(json.dumps(json.loads(config.to_json())))
    assert again == config
    assert again.plan.digest() == config.plan.digest()


# What cannot be.


def test_too_little_memory_is_refused_line_by_line_with_the_cheapest_changes(card: Card, shapes: Shapes) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(card({"memory.free": 8 << 30}), shapes("qwen3-8b"))
    text = str(caught.value)
    for part in (
        "weights 15.26 GiB",
        "graphs",
        "workspace",
        "context",
        "7.20 GiB (90% of 8.00 GiB free)",
        "are missing",
    ):
        assert part in text
    assert len(caught.value.changes) == 3
    assert all(change.text in text for change in caught.value.changes)


def test_an_asked_for_context_that_does_not_fit_is_refused_and_not_cut(card: Card, shapes: Shapes) -> None:
    tight = card({"memory.free": 20 << 30})
    derived = plan_of(tight, shapes("qwen3-8b"))
    assert derived.max_context_tokens < 40960
    with pytest.raises(PlanError, match=r"--max-context \d+ instead of 40960"):
        plan_of(tight, shapes("qwen3-8b"), max_context_tokens=40960)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0, 1e-300, "text", True])
@pytest.mark.parametrize(
    "name", ["memory.free", "memory.read_bandwidth", "compute.matmul_bfloat16", "scheduling.phase"]
)
def test_a_value_that_cannot_be_used_is_named(name: str, bad: float | str, card: Card, shapes: Shapes) -> None:
    with pytest.raises(PlanError, match=name.replace(".", r"\.")):
        plan_of(card({name: bad}), shapes("qwen3-0.6b"))


@pytest.mark.parametrize("name", ["compute.multiprocessors", "partition.multiprocessors", "memory.shared_per_block"])
def test_a_count_below_one_is_named(name: str, card: Card, shapes: Shapes) -> None:
    with pytest.raises(PlanError, match=f"{name} = 0.5, .* must be 1 or more"):
        plan_of(card({name: 0.5}), shapes("qwen3-0.6b"))


@pytest.mark.parametrize("switches", [Switches(), Switches(pal=False), Switches(launch_tuning=False)])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.shared_per_multiprocessor", 23_000),
        ("compute.registers_per_multiprocessor", 6_000),
        ("compute.max_threads_per_multiprocessor", 64),
        ("compute.max_blocks_per_multiprocessor", 0.5),
    ],
)
def test_a_card_on_which_no_launch_of_attention_fits_is_refused_with_fixed_launches_too(
    name: str, value: float, switches: Switches, card: Card, shapes: Shapes
) -> None:
    with pytest.raises(PlanError, match=r"no launch of (decode|prefill) attention for head size 128 fits the profile"):
        plan_for(card({name: value}), shapes("qwen3-8b"), Limits(), switches)


REQUIRED = (
    "compute.capability", "compute.multiprocessors", "compute.matmul_bfloat16", "memory.free", "memory.read_bandwidth",
    "memory.shared_per_block", "scheduling.graph_node",
)  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_value_that_is_missing_is_named(name: str, card: Card, shapes: Shapes) -> None:
    with pytest.raises(PlanError, match=name.replace(".", r"\.")):
        plan_of(card({name: None}), shapes("qwen3-0.6b"))


def test_everything_else_may_be_missing(card: Card, shapes: Shapes) -> None:
    whole = card()
    bare = dataclasses.replace(whole, values={name: whole.values[name] for name in REQUIRED})
    plan, decisions = plan_for(bare, shapes("qwen3-0.6b"), Limits(), Switches())
    assert plan.num_blocks > 1000
    assert all(one.provenance for decision in decisions for one in decision.inputs)


def test_an_l2_that_is_not_reported_is_none(card: Card, shapes: Shapes) -> None:
    assert plan_of(card({"memory.l2_size": 0}), shapes("qwen3-0.6b")).num_blocks > 1000


def test_a_card_without_room_for_one_block_of_attention_is_refused(card: Card, shapes: Shapes) -> None:
    for switches in (Switches(), Switches.off()):
        with pytest.raises(PlanError, match=r"memory\.shared_per_block"):
            plan_for(card({"memory.shared_per_block": 16 << 10}), shapes("qwen3-8b"), Limits(), switches)


def test_a_capability_that_is_no_version_is_refused(card: Card, shapes: Shapes) -> None:
    with pytest.raises(PlanError, match=r"compute\.capability = 'nine'"):
        plan_of(card({"compute.capability": "nine"}), shapes("qwen3-0.6b"))


# Whatever card and model.

_CONFIGS = {name: open_model(f"random:{name}", Path()).config for name in MODELS}


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Cards between a small laptop's and several times the largest of today."""
    shared = draw(st.sampled_from((48, 64, 99, 163, 227))) << 10
    values: dict[str, float | str] = {
        "compute.capability": draw(st.sampled_from(("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"))),
        "compute.multiprocessors": draw(st.integers(1, 400)),
        "compute.matmul_bfloat16": draw(st.floats(1e12, 1e16)),
        "memory.free": draw(st.integers(1 << 28, 1 << 39)),
        "memory.l2_size": draw(st.integers(0, 1 << 28)),
        "memory.read_bandwidth": draw(st.floats(5e10, 2e13)),
        "memory.shared_per_block": shared,
        "memory.shared_per_multiprocessor": shared + draw(st.sampled_from((1024, 40 << 10))),
        "scheduling.graph_node": draw(st.floats(1e-7, 1e-5)),
    }
    if draw(st.booleans()):
        values |= {"scheduling.phase": draw(st.floats(3e-7, 2e-5)), "link.h2d_pinned": draw(st.floats(1e9, 1e11))}
    kept = {name: Value(value, "", "measured") for name, value in values.items()}
    return Profile("any", DeviceFacts("cuda", 0, "any", "sm", 0, "id"), "print", now(), kept)


any_card = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@any_card
@given(profiles(), st.sampled_from(MODELS), st.sampled_from((None, 1, 7, 100, 300)), st.booleans())
def test_a_plan_keeps_every_limit_of_its_card(profile: Profile, name: str, num_seqs: int | None, pal: bool) -> None:
    switches = Switches() if pal else Switches.off()
    limits = Limits(max_num_seqs=num_seqs)
    try:
        plan, decisions = plan_for(profile, _CONFIGS[name], limits, switches)
    except PlanError as error:
        assert any(word in str(error) for word in ("does not fit", "shared_per_block"))
        return
    assert plan.shared_memory_bytes <= profile.number("memory.shared_per_block")
    sizes = {line.name: line.size_bytes for line in plan.memory}
    assert sum(sizes.values()) == profile.number("memory.free")
    assert sizes["kv"] == plan.num_blocks * plan.page_size * _CONFIGS[name].kv_bytes_per_token
    assert min(sizes.values()) >= 0
    assert plan.max_context_tokens <= (plan.num_blocks - 1) * plan.page_size
    assert plan.max_batch_tokens >= 2 * plan.max_num_seqs
    assert plan.graph_batch_sizes[-1] == plan.max_num_seqs
    assert list(plan.graph_batch_sizes) == sorted(set(plan.graph_batch_sizes))
    # Nothing compiles in a request: every launch is one that a graph has.
    assert {one.max_batch for one in plan.decode_attention} <= set(plan.graph_batch_sizes)
    grid = plan.step_model.decode_seconds_grid
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in grid)
    assert len({decision.subject for decision in decisions}) == len(decisions)
    assert (plan, decisions) == plan_for(profile, _CONFIGS[name], limits, switches)


@any_card
@given(profiles(), st.sampled_from(MODELS), st.floats(1.01, 8))
def test_more_memory_never_gives_fewer_blocks(profile: Profile, name: str, factor: float) -> None:
    """In tokens: pages may differ, and with a larger page half a page more is lost."""
    more = profile.with_values({"memory.free": Value(int(profile.number("memory.free") * factor), "bytes", "reported")})
    try:
        less = plan_for(profile, _CONFIGS[name], Limits(max_num_seqs=64), Switches())[0]
    except PlanError:
        return
    plan = plan_for(more, _CONFIGS[name], Limits(max_num_seqs=64), Switches())[0]
    slack = 1 + 0.01 * (plan.page_size != less.page_size)
    assert plan.num_blocks * plan.page_size * slack >= less.num_blocks * less.page_size - less.page_size


@any_card
@given(profiles(), st.sampled_from(MODELS), st.floats(1.1, 4))
def test_a_faster_memory_is_never_predicted_slower(profile: Profile, name: str, factor: float) -> None:
    rate = Value(profile.number("memory.read_bandwidth") * factor, "bytes/s", "measured")
    limits = Limits(max_num_seqs=64)
    try:
        slow = plan_for(profile, _CONFIGS[name], limits, Switches.off())[0].step_model
        fast = plan_for(profile.with_values({"memory.read_bandwidth": rate}), _CONFIGS[name], limits, Switches.off())[0]
    except PlanError:
        return
    for batch in (1, 8, 64):
        assert fast.step_model.decode_step_seconds(batch, 1024) <= slow.decode_step_seconds(batch, 1024) * (1 + 1e-9)
