"""The decision log: numbered, bounded, watched, completed by what was measured."""

import asyncio

import pytest

from dragoman_agent.pal.decisions import Decision, DecisionLog


def test_ring_is_bounded_and_ids_go_on() -> None:
    log = DecisionLog(capacity=2)
    for _ in range(3):
        log.record(Decision("page-size", "64", "because"))
    assert [decision.decision_id for decision in log.all()] == ["page-size-2", "page-size-3"]


def test_measured_completes_the_newest_of_its_subject() -> None:
    log = DecisionLog()
    log.record(Decision("step-model", "a", "r", predicted=1.0))
    log.record(Decision("other", "b", "r"))
    assert log.measured("step-model", 1.5) is not None
    assert log.all()[0].measured == 1.5
    assert log.measured("never", 1.0) is None


async def test_watchers_get_what_is_held_and_what_comes() -> None:
    log = DecisionLog()
    log.record(Decision("a", "1", "r"))
    seen: list[str] = []

    async def watch() -> None:
        async for decision in log.watch():
            seen.append(decision.chosen)
            if len(seen) == 2:
                return

    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    log.record(Decision("a", "2", "r"))
    await asyncio.wait_for(task, 2)
    assert seen == ["1", "2"]


def test_the_newest_of_each_subject_outlives_the_ring() -> None:
    log = DecisionLog(capacity=3)
    for subject in ("page-size", "road", "page-size"):
        log.record(Decision(subject, subject, "r", predicted=1.0))
    for _ in range(100):
        log.record(Decision("index", "x", "r"))
    assert [decision.decision_id for decision in log.all()] == [
        "road-2", "page-size-3", "index-101", "index-102", "index-103"
    ]  # fmt: skip
    completed = log.measured("page-size", 2.0)
    assert completed is not None and completed.decision_id == "page-size-3"
    assert log.all()[1].measured == 2.0
    log.record(Decision("road", "new", "r"))
    assert [decision.chosen for decision in log.all() if decision.subject == "road"] == ["new"]


def test_a_log_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="a log of 0 decisions"):
        DecisionLog(capacity=0)
