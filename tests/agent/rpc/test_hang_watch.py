"""An engine is given up after a minute that its agent looked on, not after one in which both stood still."""

from __future__ import annotations

from dragoman_agent.rpc.hang_watch import HangWatch


def looks(watch: HangWatch, last_step: float, begin: float, seconds: float) -> list[bool]:
    """Four times a second."""
    return [watch.is_hung(last_step, begin + 0.25 * nth) for nth in range(int(4 * seconds) + 1)]


def test_a_minute_without_a_step_is_enough() -> None:
    found = looks(HangWatch(), 100.0, 100.1, 61.0)
    assert found.index(True) == 240 and all(found[240:])


def test_each_step_begins_the_minute_anew() -> None:
    watch = HangWatch()
    assert not any(looks(watch, 100.0, 100.1, 59.0)) and not any(looks(watch, 159.3, 159.4, 59.0))


def test_who_was_frozen_with_its_engine_does_not_give_it_up() -> None:
    watch = HangWatch()
    assert not any(looks(watch, 100.0, 100.1, 2.0))
    assert not watch.is_hung(100.0, 3_700.0), "an hour in which nobody ran"
    assert not any(looks(watch, 100.0, 3_700.25, 5.0)), "and the engine is about to step"
    assert looks(watch, 100.0, 3_706.0, 60.0)[-1], "or it does hang"
