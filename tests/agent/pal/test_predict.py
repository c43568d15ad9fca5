"""What a user will see follows from the step model, the KV blocks and the limits of the plan."""

import dataclasses

import pytest

from dragoman.step_model import StepModel
from dragoman_agent.pal.limits import PlanError
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.predict import predict

STEP = StepModel((1, 64), (128, 1024), (0.01, 0.01, 0.02, 0.02), 1000.0, 0.05)
PLAN = Plan("cuda", "m", 64, 161, 8192, 2048, 64, 256, 1, "road", "bfloat16", (), STEP)


def test_alone_the_prompt_is_waited_for_and_then_each_token() -> None:
    prediction = predict(PLAN, 500, 1)
    assert prediction.ttft_seconds == pytest.approx(0.5)
    assert prediction.tpot_seconds == pytest.approx(0.01)
    assert prediction.tokens_per_second == pytest.approx(100)


def test_a_short_prompt_waits_for_the_base_of_a_step() -> None:
    assert predict(PLAN, 1, 1).ttft_seconds == pytest.approx(0.05)


def test_no_more_run_than_blocks_and_sequences_allow() -> None:
    assert predict(PLAN, 1024, 500).num_running == 10  # 160 blocks of 64 tokens
    assert predict(PLAN, 64, 500).num_running == 64
    assert predict(dataclasses.replace(PLAN, num_blocks=4), 8192, 2).num_running == 1


def test_prompts_that_arrive_together_are_computed_one_after_another() -> None:
    assert predict(PLAN, 500, 3).ttft_seconds == pytest.approx(1.0)
    assert predict(PLAN, 500, 3).tokens_per_second > predict(PLAN, 500, 1).tokens_per_second


@pytest.mark.parametrize(("context", "concurrency"), [(0, 1), (-5, 1), (8193, 1), (100, 0)])
def test_what_makes_no_sense_is_refused(context: int, concurrency: int) -> None:
    with pytest.raises(PlanError, match="ask for"):
        predict(PLAN, context, concurrency)
