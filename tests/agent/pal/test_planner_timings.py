"""What was timed decides over what was predicted, and the decision says so."""

from collections.abc import Callable

import pytest

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.kernel_calls import parse_key
from dragoman_agent.pal.kernel_times import step_key
from dragoman_agent.pal.plan import DecodeAttention, Plan, PrefillAttention
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, PlanError, Switches, plan_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.timings import Timings
from dragoman_kernels.triton.launches import GemmLaunch

MODEL = "qwen3-0.6b"
Planner = Callable[[Callable[[str], float]], tuple[Plan, dict[str, Decision]]]


@pytest.fixture
def planned(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> Planner:
    """Plans with every case timed at its prediction times `factor(key)`."""
    model = shapes(MODEL)
    first, _ = plan_for(card(), model, Limits(), Switches())
    cases = tuning_cases(card(), model, first)

    def make(factor: Callable[[str], float]) -> tuple[Plan, dict[str, Decision]]:
        seconds = {case.key: case.predicted_seconds * factor(case.key) for case in cases}
        plan, decisions = plan_for(card(), model, Limits(), Switches(), Timings("print", "hash", seconds))
        return plan, {decision.subject: decision for decision in decisions}

    return make


def test_times_as_predicted_change_nothing_but_the_words(
    planned: Planner, card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    plan, decisions = planned(lambda key: 1.0)
    before, _ = plan_for(card(), shapes(MODEL), Limits(), Switches())
    assert plan.step_model.decode_step_seconds(8, 1024) == pytest.approx(
        before.step_model.decode_step_seconds(8, 1024), rel=0.02
    )
    assert "times measured on the device" in decisions["decode-attention"].reason
    assert "measured on the device" in decisions["prefill-attention"].reason
    assert "measured on the device" in decisions["gemm-rows"].reason
    assert "as timed on the device" in decisions["step-model"].reason


def many_parts(key: str) -> bool:
    """Whether a context of decode attention is cut into 16 parts or more."""
    call = parse_key(key)
    return call is not None and isinstance(call.config, DecodeAttention) and call.config.num_splits >= 16


def test_a_burst_wins_where_more_parts_were_timed_as_quick(planned: Planner) -> None:
    """Then one long sequence among usual ones ends sooner, and usual steps lose nothing."""
    plan, decisions = planned(lambda key: 1.0)
    burst = decisions["burst"]
    assert plan.burst and burst.chosen == "yes"
    assert "one of them 16384 long at one step in 16: more parts win within 1%" in burst.reason
    no, yes = burst.candidates
    assert yes.predicted is not None and no.predicted is not None and yes.predicted < no.predicted
    assert (no.rejected_because, yes.rejected_because) == ("the long sequence ends last", "")
    assert plan.decode_for(4).num_splits >= 16 and plan.decode_for(64).num_splits == 1
    assert next(field for field in plan_fields(plan) if field.name == "burst").value is True


def test_no_burst_where_more_parts_were_timed_a_tenth_slower(planned: Planner) -> None:
    plan, decisions = planned(lambda key: 1.1 if many_parts(key) else 1.0)
    burst = decisions["burst"]
    assert not plan.burst and burst.chosen == "no" and "more parts do not win within 1%" in burst.reason
    assert [one.rejected_because for one in burst.candidates] == [
        "",
        "more parts cost usual steps too much, or gain nothing",
    ]
    assert max(bucket.num_splits for bucket in plan.decode_attention) < 16
    assert next(field for field in plan_fields(plan) if field.name == "burst").value is False


def test_a_burst_that_nobody_timed_is_not_taken_where_its_plain_launch_was(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    model = shapes(MODEL)
    cases = tuning_cases(card(), model, plan_for(card(), model, Limits(), Switches())[0])
    seconds = {case.key: case.predicted_seconds for case in cases if not many_parts(case.key)}
    plan, _ = plan_for(card(), model, Limits(), Switches(), Timings("print", "hash", seconds))
    assert not plan.burst and max(bucket.num_splits for bucket in plan.decode_attention) < 16


def test_the_launch_measured_quickest_wins_for_its_batch(planned: Planner) -> None:
    def factor(key: str) -> float:
        call = parse_key(key)
        assert call is not None
        quick = isinstance(call.config, DecodeAttention) and call.shape["batch"] == 64 and call.config.num_warps == 2
        return 0.5 if quick else 1.0

    plan, _ = planned(factor)
    assert plan.decode_for(64).num_warps == 2
    assert plan.decode_for(1).num_warps == 4


def test_the_prefill_launch_measured_quickest_wins(planned: Planner) -> None:
    def factor(key: str) -> float:
        call = parse_key(key)
        return 0.5 if call and isinstance(call.config, PrefillAttention) and call.config.block_m == 128 else 1.0

    plan, decisions = planned(factor)
    assert plan.prefill_attention is not None and plan.prefill_attention.block_m == 128
    assert decisions["prefill-attention"].chosen.startswith("m128")


def test_one_row_is_padded_only_where_that_was_measured_quicker(planned: Planner) -> None:
    for slow, rows in (("gemm/m1/", 8), ("gemm/m8/", 1)):
        plan, _ = planned(lambda key, slow=slow: 2.0 if key.startswith(slow) else 1.0)
        assert plan.min_gemm_rows == rows


def test_the_product_of_few_rows_takes_the_matrices_where_it_was_quicker(planned: Planner) -> None:
    def factor(key: str) -> float:
        call = parse_key(key)
        if call is None or not isinstance(call.config, GemmLaunch):
            return 1.0
        wins = call.shape["n"] == 6144 and call.shape["m"] <= 16 and call.config.block_n == 32
        return 0.7 if wins else 1.3

    plan, decisions = planned(factor)
    assert [(one.n, one.k, one.max_rows, one.block_n) for one in plan.gemm_decode] == [
        (6144, 1024, 8, 32),
        (6144, 1024, 16, 32),
    ]
    assert "6144x1024 to 16 rows" in decisions["gemm-decode"].chosen
    assert plan.step_model.decode_step_seconds(8, 256) < planned(lambda key: 1.3 if "-k" in key and key.startswith("gemm") else 1.0)[0].step_model.decode_step_seconds(8, 256)  # fmt: skip


def test_a_few_row_product_that_loses_at_fewer_rows_is_not_taken(planned: Planner) -> None:
    """An entry serves every smaller number of rows too."""

    def factor(key: str) -> float:
        call = parse_key(key)
        if call is None or not isinstance(call.config, GemmLaunch):
            return 1.0
        return 0.7 if call.shape["m"] == 64 else 1.3

    assert planned(factor)[0].gemm_decode == ()


def test_the_page_measured_quicker_by_more_than_they_can_be_told_apart_wins(planned: Planner) -> None:
    plan, _ = planned(lambda key: 0.5 if key.startswith("decode-attention/") and "-p128/" in key else 1.0)
    assert plan.page_size == 128
    plan, _ = planned(lambda key: 0.99 if key.startswith("decode-attention/") and "-p128/" in key else 1.0)
    assert plan.page_size == 64


def test_measured_steps_correct_the_step_model(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    model = shapes(MODEL)
    plain, _ = plan_for(card(), model, Limits(), Switches())
    batches, contexts = (plain.graph_batch_sizes[0], 64, 256), (128, 4096)
    seconds = {
        step_key(MODEL, batch, context): 1.3 * plain.step_model.decode_step_seconds(batch, context)
        for batch in batches
        for context in contexts
    }
    plan, _ = plan_for(card(), model, Limits(), Switches(), Timings("print", "hash", seconds))
    for batch in (1, 8, 64, 256):
        for context in (128, 1024, 4096):
            expected = 1.3 * plain.step_model.decode_step_seconds(batch, context)
            assert plan.step_model.decode_step_seconds(batch, context) == pytest.approx(expected, rel=0.02)


def test_timings_of_another_device_are_refused(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    with pytest.raises(PlanError, match="another device"):
        plan_for(card(), shapes(MODEL), Limits(), Switches(), Timings("other", "hash", {}))


def test_slower_products_make_longer_steps(planned: Planner) -> None:
    slow, _ = planned(lambda key: 2.0 if key.startswith("gemm/") else 1.0)
    fast, _ = planned(lambda key: 1.0)
    assert slow.step_model.decode_step_seconds(8, 256) > 1.4 * fast.step_model.decode_step_seconds(8, 256)
    assert slow.step_model.prefill_tokens_per_second < fast.step_model.prefill_tokens_per_second
