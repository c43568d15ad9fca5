"""The account of the KV blocks: nothing is lost at any moment of a workload, and what is lost is told."""

from __future__ import annotations

from typing import Any

from dragoman_agent.engine.block_account import account
from dragoman_agent.engine.core import ACCOUNT_SECONDS
from dragoman_agent.engine.messages import Cancel, StartEmbed, Tune


def test_nothing_is_lost_while_requests_come_and_go(lab: Any, start: Any) -> None:
    engine = lab(num_blocks=20, page_size=16)
    scheduler = engine.core.scheduler
    waste = set()
    for index in range(12):
        engine.core.receive(start(f"r{index}", [1 + index % 3] * (20 + 5 * index), 60, num_choices=1 + index % 2))
        engine.core.receive(StartEmbed(f"e{index}", [9 + index] * 30))
        if index == 5:
            engine.core.receive(Tune(512, 16, 17, 0))
            engine.core.receive(Cancel("r4"))
        engine.turn(3)
        found = account(scheduler)
        assert found.num_lost == 0
        pages = sum(len(s.block_table) for s in scheduler.running)
        assert 0 <= found.num_waste_tokens <= 16 * pages
        waste.add(found.num_waste_tokens)
    assert len(waste) > 2
    engine.run()
    assert account(scheduler) == (0, 0)
    assert scheduler.num_preemptions, "the pool was large enough: nothing was tried"


def test_what_is_lost_is_told_within_a_second(lab: Any) -> None:
    engine = lab()
    assert engine.core.tick().load.lost_blocks == 0
    engine.core.scheduler.pool.allocate(3)
    assert engine.core.tick().load.lost_blocks == 0  # not counted at each frame
    engine.clock.now += ACCOUNT_SECONDS
    assert engine.core.tick().load.lost_blocks == 3
