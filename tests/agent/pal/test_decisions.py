"""The decision log: numbered, bounded, watched, completed by what was measured."""

import asyncio

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
