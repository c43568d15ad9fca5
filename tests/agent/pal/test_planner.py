"""The CPU planner: the plan follows the measurement, and what does not fit says so with numbers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.planner import Limits, PlanError, Road, plan_cpu, predict_cpu
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value, now

MODEL = ModelConfig("smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, True)
ROAD = Road("native-int8", "a compiler is there", 97 << 20, "float16", 2.0)


def profile(bandwidth: float = 20e9, rate: float = 100e9, free: int = 8 << 30, cores: int = 2) -> Profile:
    values = {
        "compute.cores": Value(cores, "", "reported"),
        "compute.instruction_set": Value("avx2", "", "reported"),
        "memory.free": Value(free, "bytes", "reported"),
        "memory.read_bandwidth": Value(bandwidth, "bytes/s", "measured", spread=0.1),
        "compute.matmul_float32": Value(rate, "flop/s", "measured", spread=0.1),
        "scheduling.thread_handover": Value(5e-6, "s", "measured", spread=0.1),
    }
    return Profile("test", DeviceFacts("cpu", 0, "test CPU", "x86_64-avx2", free, "id"), "print", now(), values)


def test_prediction_is_bytes_over_bandwidth_when_memory_bound() -> None:
    model = predict_cpu(profile(bandwidth=10e9, rate=1e15), MODEL, ROAD, kv_token_bytes=23040)
    phases = (6 * MODEL.num_layers + 2) * 5e-6
    expected = (ROAD.weight_bytes + 64 * 23040) / 10e9 + phases
    assert model.decode_step_seconds(1, 64) == pytest.approx(expected)


def test_prediction_is_operations_over_rate_when_compute_bound() -> None:
    model = predict_cpu(profile(bandwidth=1e15, rate=1e9), MODEL, ROAD, kv_token_bytes=23040)
    assert model.prefill_tokens_per_second == pytest.approx(2e9 / (2 * MODEL.num_parameters))


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e14))
def test_a_faster_card_is_never_predicted_slower(bandwidth: float, rate: float) -> None:
    slow = predict_cpu(profile(bandwidth, rate), MODEL, ROAD, 23040)
    quick = predict_cpu(profile(2 * bandwidth, 2 * rate), MODEL, ROAD, 23040)
    for batch in (1, 7, 64):
        assert quick.decode_step_seconds(batch, 500) <= slow.decode_step_seconds(batch, 500)


def test_every_choice_has_a_decision_with_a_reason() -> None:
    plan, decisions = plan_cpu(profile(), MODEL, ROAD, Limits())
    subjects = {decision.subject for decision in decisions}
    assert {
        "road",
        "threads",
        "page-size",
        "max-context",
        "step-tokens",
        "max-seqs",
        "kv-blocks",
        "step-model",
        "attention-grouping",
        "decode-work-list",
    } <= subjects
    assert all(decision.reason and decision.chosen for decision in decisions)
    assert plan.page_size == 64
    assert plan.max_context_tokens == 8192


@given(st.integers(600 << 20, 64 << 30), st.sampled_from(["float16", "float32"]))
def test_the_budget_adds_up_and_stays_inside_free_memory(free: int, kv_dtype: str) -> None:
    try:
        plan, _ = plan_cpu(profile(free=free), MODEL, dataclasses.replace(ROAD, kv_dtype=kv_dtype), Limits())
    except PlanError:
        return
    assert sum(line.size_bytes for line in plan.memory) <= free * 0.5 + 1
    assert plan.max_context_tokens <= (plan.num_blocks - 1) * plan.page_size


def test_too_little_memory_is_refused_with_numbers_and_remedies() -> None:
    with pytest.raises(PlanError, match=r"does not fit on .*: weights 97.* MiB \+ kv .* are missing") as refused:
        plan_cpu(profile(free=600 << 20), MODEL, ROAD, Limits())
    changes = refused.value.changes
    assert changes[0].text.startswith("--memory-utilization 0.")
    assert all(change.need_bytes <= change.budget_bytes for change in changes)
    with pytest.raises(PlanError, match=r"What to do: a device with .* free"):
        plan_cpu(profile(free=300 << 20), MODEL, ROAD, Limits())


def test_more_context_than_the_model_knows_is_refused() -> None:
    with pytest.raises(PlanError, match="8192 tokens"):
        plan_cpu(profile(), MODEL, ROAD, Limits(max_context_tokens=9000))


def test_digest_tells_choices_apart_but_not_free_memory() -> None:
    plan, _ = plan_cpu(profile(), MODEL, ROAD, Limits())
    other, _ = plan_cpu(profile(free=4 << 30), MODEL, ROAD, Limits())
    threads, _ = plan_cpu(profile(cores=4), MODEL, ROAD, Limits())
    assert plan.digest() == other.digest()
    assert plan.digest() != threads.digest()
