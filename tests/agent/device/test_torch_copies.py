"""KV blocks between device and host through two buffers: the bytes, and that no buffer is filled or emptied too early.

Streams are logged and their work is done at once, so the bytes are right in any case; what orders the accesses of one buffer, the
order within a stream and events that others wait for, is followed from the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from dragoman_agent.device import torch_copies
from dragoman_agent.device.torch_copies import BlockCopier, Buffer
from dragoman_agent.model.layers import PagedCache

SHAPE = (2, 24, 1, 4, 8)  # layers, blocks, heads, tokens, dim
BLOCK_BYTES = 2 * 2 * 4 * 8 * 4


@dataclass(eq=False)
class LoggedStream:
    """What has happened before its next work: accesses, by their numbers."""

    seen: set[int] = field(default_factory=set)


class LoggedEvent:
    def __init__(self) -> None:
        self._seen: set[int] = set()

    def record(self, stream: LoggedStream) -> None:
        self._seen = set(stream.seen)

    def wait(self, stream: LoggedStream) -> None:
        stream.seen |= self._seen

    def synchronize(self) -> None:
        """It has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: LoggedEvent) -> float:
        return 1.0

    def is_behind(self, access: int) -> bool:
        return access in self._seen


class LoggedRuntime:
    device = torch.device("cpu")
    errors: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.current = LoggedStream()

    def new_stream(self) -> LoggedStream:
        return LoggedStream()

    def new_event(self) -> LoggedEvent:
        return LoggedEvent()

    @contextmanager
    def on(self, stream: LoggedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)


class CheckedCopier(BlockCopier):
    """Each access of a buffer must come behind the one before of that buffer, and each of the cache behind the steps."""

    def __init__(self, cache: PagedCache) -> None:
        self.runtime, self.steps = LoggedRuntime(), LoggedStream()
        super().__init__(self.runtime, cache, self.steps)  # type: ignore[arg-type]
        self._last: dict[int, int] = {}
        self.accesses: list[str] = []

    def step(self) -> None:
        """The steps' stream writes to the cache."""
        self.accesses.append("step")
        self._last[id(self._cache)] = len(self.accesses)
        self.steps.seen.add(len(self.accesses))

    def _access(self, name: str, thing: object, *, is_write: bool = True) -> None:
        seen = self.runtime.current.seen
        last = self._last.get(id(thing))
        assert last is None or last in seen, (
            f"{name} {len(self.accesses)} is not behind what was there before: {self.accesses}"
        )
        self.accesses.append(name)
        seen.add(len(self.accesses))
        if is_write:
            self._last[id(thing)] = len(self.accesses)

    def _gather(self, ids: torch.Tensor, buffer: Buffer) -> None:
        self._access("read cache", self._cache, is_write=False)
        self._access("gather", buffer)
        super()._gather(ids, buffer)

    def _leave(self, buffer: Buffer, rows: Any) -> None:
        self._access("leave", buffer)
        super()._leave(buffer, rows)

    def _come(self, rows: Any, buffer: Buffer) -> None:
        self._access("come", buffer)
        super()._come(rows, buffer)

    def _scatter(self, buffer: Buffer, ids: torch.Tensor) -> None:
        self._access("write cache", self._cache, is_write=False)
        self._access("scatter", buffer)
        super()._scatter(buffer, ids)


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> CheckedCopier:
    monkeypatch.setattr(torch_copies, "BUFFER_BYTES", 2 * BLOCK_BYTES)  # two blocks a buffer
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(SHAPE, generator=generator) for _ in "kv")
    return CheckedCopier(PagedCache(keys, values))


def contents(cache: PagedCache, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    pages = torch.stack((cache.keys[:, block], cache.values[:, block]), dim=1)
    return pages.contiguous().view(torch.uint8).numpy().reshape(-1)


def test_blocks_leave_and_come_back_through_two_buffers(copier: CheckedCopier) -> None:
    blocks = np.array([5, 3, 9, 1, 22, 7, 11], np.int32)  # four parts, the last not full
    rows = list(copier.new_rows(len(blocks)))
    copier.step()
    assert copier.copy_out(blocks, rows).is_done()
    for row, block in zip(rows, blocks, strict=True):
        np.testing.assert_array_equal(row, contents(copier._cache, block))
    copier.step()
    others = np.array([2, 4, 6, 8, 10, 12, 14], np.int32)
    expected = {block: contents(copier._cache, block) for block in range(SHAPE[1])}
    copier.copy_in(rows, others)
    for row, block in zip(rows, others, strict=True):
        expected[block] = row
    for block, wanted in expected.items():
        np.testing.assert_array_equal(contents(copier._cache, block), wanted)
    assert copier.accesses.count("gather") == copier.accesses.count("scatter") == 4


def test_the_seconds_of_a_copy_begin_behind_the_steps(copier: CheckedCopier) -> None:
    """Else they would tell of the steps, and what a token's KV takes to come back would be too much."""
    blocks = np.arange(1, 8, dtype=np.int32)
    rows = list(copier.new_rows(len(blocks)))
    copier.step()
    step = len(copier.accesses)
    for copy in (copier.copy_out(blocks, rows), copier.copy_in(rows, blocks)):
        begin: Any = copy.begin
        assert begin.is_behind(step)


def test_one_copy_behind_another_keeps_the_order_too(copier: CheckedCopier) -> None:
    blocks = np.arange(1, 8, dtype=np.int32)
    rows = list(copier.new_rows(len(blocks)))
    for count in (7, 1, 3, 2, 7):
        copier.step()
        copier.copy_out(blocks[:count], rows[:count])
        copier.copy_in(rows[:count], blocks[:count])
        copier.copy_in(rows[:count], blocks[:count])


@pytest.mark.parametrize("event", ["filled", "emptied"])
def test_what_is_not_waited_for_is_noticed(copier: CheckedCopier, event: str) -> None:
    for buffer in (*copier._out, *copier._in):
        monkey = LoggedEvent()
        monkey.wait = lambda stream: None  # type: ignore[method-assign]
        setattr(buffer, event, monkey)
    blocks = np.arange(1, 8, dtype=np.int32)
    rows = list(copier.new_rows(len(blocks)))
    with pytest.raises(AssertionError, match="not behind"):
        copier.copy_out(blocks, rows)
    with pytest.raises(AssertionError, match="not behind"):
        copier.copy_in(rows, blocks)
