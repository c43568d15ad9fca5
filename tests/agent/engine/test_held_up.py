"""Who is held up by the engine itself is not blamed for it, and who has run long does not come before all who are new."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman_agent.engine.messages import Credit, Delta, Failed, Finished

WINDOW = 256  # tokens of credit that a gateway keeps ahead of its reader; it grants in halves


def test_a_choice_at_the_end_of_its_credit_waits_for_one_that_waits_for_a_row(lab: Any, start: Any) -> None:
    """Credit counts from the choice furthest behind: while that one has no row the client can grant nothing."""
    engine = lab(num_blocks=800, page_size=64, max_num_seqs=2, max_context_tokens=16384, max_batch_tokens=128)
    engine.core.receive(start("first", [7] * 100, 9000, priority=0, seed=1))
    engine.turn(20)
    engine.core.receive(start("two", [9] * 20, 400, num_choices=2, credit=WINDOW, priority=2, seed=2))
    taken, granted, has_rival, ended = [0, 0], WINDOW, False, None
    began = engine.clock.now
    while ended is None and engine.clock.now < began + 400:
        for event in engine.turn():
            if event.request_id == "two" and isinstance(event, Delta):
                taken[event.choice] += len(event.token_ids)
            elif event.request_id == "two" and isinstance(event, Finished | Failed):
                ended = event
        if min(taken) + WINDOW >= granted + WINDOW // 2:
            granted = min(taken) + WINDOW
            engine.core.receive(Credit("two", granted))
        if taken[1] > 40 and not has_rival:
            has_rival = True
            engine.core.receive(start("rival", [8] * 20, 8000, priority=0, seed=3))
        engine.clock.now += 0.02
    assert isinstance(ended, Finished) and taken == [400, 400]
    assert engine.core.scheduler.num_preemptions and engine.clock.now - began > 70, "it was held up for over a minute"


def test_a_request_of_which_no_choice_has_credit_ends_after_a_minute(lab: Any, start: Any) -> None:
    engine = lab()
    engine.core.receive(start("idle", [9] * 20, 400, num_choices=2, credit=5, seed=2))
    began, failed = engine.clock.now, None
    while failed is None and engine.clock.now < began + 100:
        failed = next((event for event in engine.turn() if isinstance(event, Failed)), None)
        engine.clock.now += 0.5
    assert failed is not None and "credit" in failed.message and 59 < engine.clock.now - began < 66


@pytest.mark.parametrize("seconds", [2, 9, 11, 15])
def test_streams_of_the_lowest_class_give_way_however_long_they_ran(lab: Any, start: Any, seconds: float) -> None:
    engine = lab(num_blocks=46, page_size=64, max_num_seqs=16, max_context_tokens=2048, max_batch_tokens=128)
    for index in range(6):
        engine.core.receive(start(f"batch {index}", [index + 1] * 400, 900, priority=2, seed=index))
    began = engine.clock.now
    while engine.clock.now < began + seconds:
        engine.turn()
        engine.clock.now += 0.04
    asked = engine.clock.now
    engine.core.receive(start("new", [99] * 600, 30, priority=0, seed=1))
    while not any(isinstance(event, Delta) and event.request_id == "new" for event in engine.turn()):
        engine.clock.now += 0.04
        assert engine.clock.now < asked + 3, "it waits for streams of a lower class"
