"""The decisions that client and gateway share: when to resume, when to ask again, how long, and when it is enough."""

from __future__ import annotations

import random

import pytest

from dragoman.controllers import TRANSPORT
from dragoman.errors import DragomanError
from dragoman.pursuit import Pursuit
from dragoman.retry import REFUSED, RetryPolicy, Step
from dragoman.v1 import error_pb2

POLICY = RetryPolicy(max_attempts=3, base_seconds=0.1, max_delay_seconds=1.0, resume_patience_seconds=10.0)
LOST = DragomanError(error_pb2.ERROR_REASON_AGENT_LOST, "lost")
FULL = DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_delay=4.0)
NOBODY = DragomanError(error_pb2.ERROR_REASON_NO_AGENT, "away", metadata={TRANSPORT: REFUSED})
BAD = DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, "bad")
STALE = DragomanError(error_pb2.ERROR_REASON_TICKET_INVALID, "stale")


def pursuit(**options: object) -> Pursuit:
    return Pursuit(POLICY, random.Random(3), **options)  # type: ignore[arg-type]


def test_the_first_cut_is_answered_at_once_and_three_are_the_most() -> None:
    one = pursuit()
    for number in range(1, 4):
        one.started()
        decision = one.failed(LOST, accepted=True, has_origin=True, now=float(number))
        assert (decision.step, decision.delay_seconds, one.num_resumes) == (Step.RESUME, 0.0, number)
        one.flowed()
    assert not one.may_resume(LOST)
    assert one.failed(LOST, accepted=True, has_origin=True, now=9.0).step is Step.GIVE_UP


def test_a_stream_that_is_cut_again_before_it_flows_waits_longer_each_time() -> None:
    one = pursuit()
    one.started()
    one.failed(LOST, accepted=True, has_origin=True, now=0.0)
    one.started()
    second = one.failed(LOST, accepted=True, has_origin=True, now=0.0)
    assert second.step is Step.RESUME and 0.05 <= second.delay_seconds <= 0.1
    delays = [one.failed(NOBODY, accepted=False, has_origin=False, now=0.0).delay_seconds for _ in range(6)]
    assert delays[0] > second.delay_seconds and max(delays) <= 1.0
    one.flowed()
    assert one.cut is None
    assert one.failed(LOST, accepted=True, has_origin=True, now=0.0).delay_seconds == 0.0


def test_patience_ends_by_time_and_sooner_where_nobody_listens() -> None:
    def seconds_until_given_up(error: DragomanError) -> float:
        one = pursuit()
        one.started()
        one.failed(LOST, accepted=True, has_origin=True, now=100.0)
        now = 100.0
        while (d := one.failed(error, accepted=False, has_origin=False, now=now)).step is not Step.GIVE_UP:
            now += d.delay_seconds
        return now - 100.0

    away = DragomanError(error_pb2.ERROR_REASON_NO_AGENT, "none")
    assert 9.0 < seconds_until_given_up(away) <= 10.0
    assert 4.0 < seconds_until_given_up(NOBODY) <= 5.0


def test_what_was_never_accepted_is_asked_for_so_many_times() -> None:
    one = pursuit()
    steps = [one.failed(LOST, accepted=False, has_origin=False, now=0.0).step for _ in range(3)]
    assert steps == [Step.ASK_AGAIN, Step.ASK_AGAIN, Step.GIVE_UP] and one.num_resumes == 0


def test_a_lost_agent_that_had_a_ticket_is_an_origin() -> None:
    one = pursuit()
    assert one.failed(LOST, accepted=False, has_origin=True, now=0.0).step is Step.RESUME and one.num_resumes == 1


def test_a_servers_delay_is_the_least_for_who_heeds_it() -> None:
    assert pursuit().failed(FULL, accepted=False, has_origin=False, now=0.0).delay_seconds == 4.0
    own = pursuit(heeds_retry_delay=False).failed(FULL, accepted=False, has_origin=False, now=0.0)
    assert own.delay_seconds <= 0.1


def test_no_try_begins_after_the_deadline() -> None:
    one = pursuit(deadline=3.0)
    assert one.failed(FULL, accepted=False, has_origin=False, now=0.0).step is Step.GIVE_UP


@pytest.mark.parametrize("accepted", [True, False])
def test_what_would_only_repeat_itself_is_the_end(accepted: bool) -> None:
    assert pursuit().failed(BAD, accepted=accepted, has_origin=True, now=0.0).step is Step.GIVE_UP
    assert pursuit().failed(STALE, accepted=accepted, has_origin=True, now=0.0).step is Step.GIVE_UP
    stale = frozenset({error_pb2.ERROR_REASON_TICKET_INVALID})
    step = pursuit(also_retried=stale).failed(STALE, accepted=accepted, has_origin=True, now=0.0).step
    assert step is (Step.GIVE_UP if accepted else Step.ASK_AGAIN)
    assert not pursuit().may_resume(BAD) and not pursuit().may_resume(ValueError()) and not pursuit().may_resume(None)
