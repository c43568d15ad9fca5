"""A device without memory for a step: smaller steps, the same tokens, and one request failed at most."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import DeviceMemoryError, Int32Array, StepBatch, StepHandle, UInt8Array
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine.memory_limit import MIN_TOKENS, NUM_FITTING, MemoryLimit
from dragoman_agent.engine.messages import CachedBlock, Embedded, ExportBlocks, Failed, ImportBlocks, Opened, StartEmbed


class SmallDevice(NullDevice):
    """Has memory for steps of at most `room` tokens, and none for those that hold the token `heavy`."""

    def __init__(self, room: int, heavy: int = 1 << 20) -> None:
        super().__init__()
        self.room, self.heavy, self.has_room_to_copy = room, heavy, True
        self.num_refused = self.largest = self.num_to_refuse = 0

    def submit(self, batch: StepBatch) -> StepHandle:
        if len(batch.token_ids) > self.room or self.heavy in batch.token_ids or self.num_to_refuse:
            self.num_to_refuse = max(self.num_to_refuse - 1, 0)
            self.num_refused += 1
            # What a kernel has written before the allocation failed.
            self._tokens[batch.slot_mapping] = 77
            raise DeviceMemoryError("out of memory")
        self.largest = max(self.largest, len(batch.token_ids))
        return super().submit(batch)

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        self._check_copy()
        return super().read_blocks(blocks)

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        self._check_copy()
        super().write_blocks(blocks, data)

    def _check_copy(self) -> None:
        if not self.has_room_to_copy:
            raise DeviceMemoryError("out of memory")


def prompts(start: Any) -> list[Any]:
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 5, "num_choices": 3},
        {"num_prompt_logprobs": 2},
        {},
    ]
    return [
        start(f"r{i}", [1 + (7 * i + k) % 90 for k in range(40 + 30 * i)], 20, **field)
        for i, field in enumerate(fields)
    ]


def tokens(answers: Any, events: list[Any]) -> dict[tuple[str, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers(e for e in events if not isinstance(e, Opened)).items()}


def test_smaller_steps_give_the_same_tokens(lab: Any, start: Any, answers: Any) -> None:
    expected = tokens(answers, lab().run(*prompts(start)))
    device = SmallDevice(50)
    engine = lab(device=device)
    found = tokens(answers, engine.run(*prompts(start)))
    assert found == expected
    assert device.num_refused and device.largest <= 50
    engine.assert_idle()


def test_a_step_that_fails_behind_another_one_loses_nothing(lab: Any, start: Any, answers: Any) -> None:
    """The memory goes while streams are under way, with a step in flight."""
    expected = tokens(answers, lab().run(*prompts(start)))
    device = SmallDevice(1 << 20)
    engine = lab(device=device)
    for command in prompts(start):
        engine.core.receive(command)
    engine.turn(6)
    device.num_to_refuse = 1
    engine.turn(3)
    assert device.num_refused == 1
    engine.run()
    found = tokens(answers, engine.events)
    assert found == expected
    engine.assert_idle()


def test_what_does_not_fit_at_all_fails_alone(lab: Any, start: Any, answers: Any, terminals: Any) -> None:
    expected = tokens(answers, lab().run(*prompts(start)))
    engine = lab(device=SmallDevice(1 << 20, heavy=200))
    events = engine.run(*prompts(start), start("heavy", [200] * 5, 4))
    (failed,) = terminals(events)["heavy"]
    assert isinstance(failed, Failed) and failed.reason == error_pb2.ERROR_REASON_DEVICE_MEMORY
    assert "no memory" in failed.message
    found = tokens(answers, [event for event in events if event.request_id != "heavy"])
    assert found == expected
    engine.assert_idle()


def test_embeddings_of_a_long_text_in_smaller_steps(lab: Any) -> None:
    def vectors(device: NullDevice) -> list[Any]:
        texts = [StartEmbed(str(i), [1 + (i + k) % 200 for k in range(300)]) for i in range(4)]
        events = {e.request_id: e for e in lab(device=device).run(*texts) if isinstance(e, Embedded)}
        return [events[str(i)].values for i in range(4)]

    assert vectors(SmallDevice(100)) == vectors(NullDevice())


def test_a_device_without_any_memory_fails_all_and_the_engine_lives(lab: Any, start: Any, terminals: Any) -> None:
    device = SmallDevice(0)
    engine = lab(device=device)
    ended = terminals(engine.run(*prompts(start)))
    assert len(ended) == 4
    assert {event.reason for events in ended.values() for event in events} == {error_pb2.ERROR_REASON_DEVICE_MEMORY}
    engine.assert_idle()
    device.room = 1 << 20
    (event,) = terminals(engine.run(start("later", "abc", 4)))["later"]
    assert not isinstance(event, Failed)


def test_blocks_that_cannot_be_copied_are_not_sent_and_not_taken(lab: Any, start: Any) -> None:
    device = SmallDevice(1 << 20)
    engine = lab(device=device, page_size=16)
    prompt = [1 + k % 200 for k in range(130)]
    engine.run(start("a", prompt, 1))
    exchange, pool = engine.core.exchange, engine.core.scheduler.pool
    pages = [page for block in pool._block_of.values() if (page := pool._page_of[block]) is not None]
    digests = [page.digest for page in pages]
    exchange.receive(ExportBlocks("x1", digests=digests, units=[], max_num_blocks=8))
    device.has_room_to_copy = False
    exchange.receive(ExportBlocks("x2", digests=digests, units=[], max_num_blocks=8))
    sent, refused = exchange.answers
    assert len(sent.blocks) == 8 and not refused.blocks
    exchange.answers.clear()

    other_device = SmallDevice(1 << 20)
    other = lab(device=other_device, page_size=16)
    other_device.has_room_to_copy = False
    blocks: list[CachedBlock] = sent.blocks
    other.core.exchange.receive(ImportBlocks("x3", blocks))
    assert other.core.exchange.answers[0].num_imported == 0
    assert other.core.scheduler.pool.num_cached == 0
    other.assert_idle()
    other_device.has_room_to_copy = True
    other.core.exchange.receive(ImportBlocks("x4", blocks))
    assert other.core.exchange.answers[1].num_imported == 8


def test_the_limit_comes_back_step_by_step() -> None:
    limit = MemoryLimit(512)
    assert limit.failed(400) and limit.max_step_tokens == 200
    assert limit.failed(200) and limit.max_step_tokens == 100
    for _ in range(NUM_FITTING - 1):
        limit.fitted()
    assert limit.max_step_tokens == 100
    found = []
    for _ in range(3 * NUM_FITTING):
        limit.fitted()
        found.append(limit.max_step_tokens)
    assert [value for value, _ in itertools.groupby(found)] == [200, 400, 512]


@pytest.mark.parametrize("num_tokens", [1, MIN_TOKENS])
def test_small_steps_are_tried_once_more_and_not_cut(num_tokens: int) -> None:
    limit = MemoryLimit(512)
    assert [limit.failed(num_tokens) for _ in range(3)] == [True, False, False]
    limit.fitted()
    assert not limit.failed(num_tokens)  # too soon: it would be tried for ever
    for _ in range(NUM_FITTING):
        limit.fitted()
    assert limit.failed(num_tokens) and limit.max_step_tokens == 512
    assert limit.failed(MIN_TOKENS + 1) and limit.max_step_tokens == MIN_TOKENS // 2
