"""The check of memory that others take: it passes an engine that gives way, and catches one that loses a request or text."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gpu import check_memory

from dragoman_agent.device.base import DeviceMemoryError, StepBatch
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core

LENGTHS = (40, 7, 90, 64)


class FullDevice(NullDevice):
    """Has room for steps of so many tokens."""

    most: int = 1 << 30

    def submit(self, batch: StepBatch) -> Any:
        if len(batch.token_ids) > self.most:
            raise DeviceMemoryError("no room")
        return super().submit(batch)


class Neighbour:
    """Leaves a token's room for each MiB."""

    def __init__(self, device: FullDevice) -> None:
        self.device = device

    def take(self, leave_bytes: int) -> None:
        self.device.most = leave_bytes >> 20

    def give_back(self) -> None:
        self.device.most = 1 << 30


@pytest.fixture
def engine() -> tuple[EngineCore, FullDevice]:
    device, model = FullDevice(), NullModel()
    plan = default_null_plan(model, num_blocks=256, max_num_seqs=8, max_batch_tokens=256)
    device.load(model, plan, lambda _: None)
    return build_core(device, model, plan), device


def test_an_engine_that_gives_way_passes(
    engine: tuple[EngineCore, FullDevice], capsys: pytest.CaptureFixture[str]
) -> None:
    core, device = engine
    assert check_memory.check(core, Neighbour(device), 40 << 20, LENGTHS) == 0
    said = capsys.readouterr().out
    assert said.count("ok ") == 5 and "4 requests failed for want of device memory" in said


def test_memory_that_was_never_short_proves_nothing(engine: tuple[EngineCore, FullDevice]) -> None:
    core, device = engine
    assert check_memory.check(core, Neighbour(device), 4096 << 20, LENGTHS) == 1


def test_other_text_is_caught(engine: tuple[EngineCore, FullDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    core, device = engine
    whole = check_memory.ask

    def other(core: EngineCore, salt: str, lengths: Any) -> Any:
        answers, failed, least = whole(core, salt, lengths)
        return {name: [0, *ids[1:]] if salt == "s" else ids for name, ids in answers.items()}, failed, least

    monkeypatch.setattr(check_memory, "ask", other)
    assert check_memory.check(core, Neighbour(device), 40 << 20, LENGTHS) == 1
