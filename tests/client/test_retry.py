"""What a failure asks for, and after how long."""

from __future__ import annotations

import random

import pytest

from dragoman.errors import DragomanError, traits
from dragoman.retry import RetryBudget, RetryPolicy, Step, step_after
from dragoman.v1 import error_pb2


def error(name: str, retry_delay: float | None = None) -> DragomanError:
    return DragomanError(error_pb2.ErrorReason.Value(f"ERROR_REASON_{name}"), "x", retry_delay=retry_delay)


@pytest.mark.parametrize("reason", error_pb2.ErrorReason.values())
def test_only_reasons_that_the_catalogue_calls_retryable_are_tried_again(reason: error_pb2.ErrorReason) -> None:
    failure = DragomanError(reason, "x")
    if not traits(reason).retryable:
        assert step_after(failure, accepted=False) is Step.GIVE_UP
        assert step_after(failure, accepted=True) is Step.GIVE_UP
    else:
        assert step_after(failure, accepted=False) is not Step.GIVE_UP


@pytest.mark.parametrize(
    ("name", "refused", "cut"),
    [
        ("AGENT_LOST", Step.RESUME, Step.RESUME),
        ("DEVICE_FAULT", Step.RESUME, Step.RESUME),
        ("AGENT_DRAINING", Step.ASK_AGAIN, Step.RESUME),
        ("CREDIT_TIMEOUT", Step.ASK_AGAIN, Step.RESUME),
        ("QUEUE_FULL", Step.ASK_AGAIN, Step.GIVE_UP),
        ("TICKET_EXPIRED", Step.ASK_AGAIN, Step.GIVE_UP),
        ("INTERNAL", Step.GIVE_UP, Step.GIVE_UP),
        ("CANCELLED", Step.GIVE_UP, Step.GIVE_UP),
        ("PROMPT_QUARANTINED", Step.GIVE_UP, Step.GIVE_UP),
    ],
)
def test_steps(name: str, refused: Step, cut: Step) -> None:
    assert step_after(error(name), accepted=False) is refused
    assert step_after(error(name), accepted=True) is cut


def test_a_resume_may_meet_its_old_self() -> None:
    duplicate = error("DUPLICATE_REQUEST")
    assert step_after(duplicate, accepted=False) is Step.GIVE_UP
    assert step_after(duplicate, accepted=False, resuming=True) is Step.ASK_AGAIN


def test_delays_double_within_their_jitter_and_heed_the_server() -> None:
    policy, rng = RetryPolicy(base_seconds=0.1, max_delay_seconds=1.0), random.Random(1)
    for number, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (60, 1.0)):
        delays = [policy.delay(number, error("QUEUE_FULL"), rng) for _ in range(200)]
        assert longest / 2 <= min(delays) < longest * 0.6
        assert longest * 0.9 < max(delays) <= longest
    assert policy.delay(1, error("QUEUE_FULL", retry_delay=3.0), rng) == 3.0


def test_budget() -> None:
    budget = RetryBudget(2)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(10):
        budget.succeeded()
    assert budget.spend() is True
    assert budget.spend() is False


def test_a_policy_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="max_attempts"):
        RetryPolicy(max_attempts=0)
