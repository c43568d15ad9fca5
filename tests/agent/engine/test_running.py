"""What running sequences do next is the same whether each is asked before every step or account is kept of who is due."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dragoman_agent.device.base import StepBatch, StepHandle
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine import running
from dragoman_agent.engine.messages import Cancel, Credit, StartEmbed, Tune
from dragoman_agent.engine.running import Next, RunningSequences


class Kept(NullDevice):
    """Keeps what each step was."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []

    def submit(self, batch: StepBatch) -> StepHandle:
        arrays = (batch.token_ids, batch.context_lens, batch.slot_mapping, batch.block_tables, batch.query_starts)
        self.steps.append(tuple(array.tolist() for array in arrays))
        return super().submit(batch)


def play(lab: Any, start: Any, seed: int) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Requests that come, wait for credit, grow, preempt each other, end and are cancelled; steps and context tokens."""
    chance = random.Random(seed)
    device = Kept()
    engine = lab(device=device, page_size=16, num_blocks=chance.choice((24, 60)), max_batch_tokens=40, max_num_seqs=6)
    contexts: list[int] = []
    for turn in range(160):
        if turn < 120 and chance.random() < 0.08:
            name = f"r{turn}"
            prompt = [chance.randrange(200) for _ in range(chance.randrange(1, 90))]
            credit = chance.choice((12, 30, 1 << 20))
            engine.core.receive(start(name, prompt, chance.randrange(1, 70), credit=credit, key=turn * 4, seed=turn))
        if chance.random() < 0.1:
            for name in engine.core.requests:
                engine.core.receive(Credit(name, chance.randrange(20, 200)))
        if chance.random() < 0.03:
            engine.core.receive(StartEmbed(f"e{turn}", [7] * chance.randrange(1, 30)))
        if chance.random() < 0.03:
            engine.core.receive(Tune(chance.choice((3, 40)), 6, 60))
        if chance.random() < 0.03 and engine.core.requests:
            engine.core.receive(Cancel(next(iter(engine.core.requests))))
        engine.turn()
        contexts.append(engine.core.scheduler.running_context_tokens)
    return device.steps, contexts


@pytest.mark.parametrize("seed", range(6))
def test_account_changes_no_step(lab: Any, start: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    growing = RunningSequences._growing

    def noted(self: RunningSequences) -> Any:
        asked.append(len(self._due))
        return growing(self)

    monkeypatch.setattr(RunningSequences, "_growing", noted)
    found = []
    for calm in (1, 3, 1 << 30):
        monkeypatch.setattr(running, "CALM_STEPS", calm)
        asked.clear()
        found.append(play(lab, start, seed))
        assert len(asked) > 20 if calm == 1 else calm < 9 or not asked, "account is kept where it is meant to be"
    assert len(found[0][0]) > 40
    assert found[0] == found[1] == found[2]


def test_only_who_is_due_is_asked(lab: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lab(page_size=16, max_num_seqs=4)
    for index in range(4):
        engine.core.receive(start(f"r{index}", [index] * (3 + 4 * index), 200, key=index))
    engine.turn(12)
    asked: list[Next] = []
    next_of = running.next_of

    def noted(*given: Any) -> Next:
        asked.append(next_of(*given))
        return asked[-1]

    monkeypatch.setattr(running, "next_of", noted)
    engine.turn(64)
    # Each of four has four more blocks, and is asked again once it has one.
    assert asked.count(Next.GROW) == 16 and len(asked) <= 36
