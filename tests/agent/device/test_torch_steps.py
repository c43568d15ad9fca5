"""The slices of a step's buffers that are made once, and what is said of a step that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.torch_steps import Heads, StepSlot, TorchStepHandle
from dragoman_agent.engine.sampler import Sampled


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100])
def test_heads_hold_what_is_asked_for_and_little_more(size: int) -> None:
    whole = torch.arange(size)
    heads = Heads(whole)
    for num in range(1, size + 1):
        head = heads.of(num)
        assert num <= len(head) < 2 * num and torch.equal(head, whole[: len(head)])
        assert head.data_ptr() == whole.data_ptr() and heads.of(num) is head


class CurrentRuntime:
    """Implements Runtime as far as a slot needs it; knows the current stream, which is that of the steps at first."""

    def __init__(self) -> None:
        self.current: object = "steps"
        self.num_streams = 0

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def new_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None, elapsed_time=lambda end: 1.0)

    def new_stream(self) -> Any:
        self.num_streams += 1
        return SimpleNamespace()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Copied:
    """A tensor on a device that notes in which stream it is copied from there."""

    def __init__(self, runtime: CurrentRuntime) -> None:
        self.runtime = runtime
        self.streams: list[object] = []

    def int(self) -> Copied:
        return self

    def cpu(self) -> torch.Tensor:
        self.streams.append(self.runtime.current)
        return torch.zeros(1)


@pytest.mark.parametrize("part", ["sampled", "pooled", "scores"])
def test_no_result_waits_for_the_step_behind(part: str) -> None:
    """Which is in the stream of the steps already, where the thread stays: a copy in it would come after."""
    runtime: Any = CurrentRuntime()
    reading = runtime.new_stream()
    slot = StepSlot(runtime, reading, 8, 2)
    copied: Any = Copied(runtime)
    parts = {
        "sampled": {"pooled": None, "scores": None, "sampled": Sampled(copied, copied, copied, copied, copied)},
        "pooled": {"pooled": copied, "scores": None}, "scores": {"pooled": None, "scores": (copied, copied, copied)},
    }[part]  # fmt: skip
    for _ in range(2):
        result = TorchStepHandle(slot, (RuntimeError,), 2, **parts).result()
        assert result.token_ids.tolist() == [0, 0]
    assert len(copied.streams) == (2 if part == "pooled" else 6)
    assert all(stream is reading for stream in copied.streams)
    assert runtime.current == "steps" and runtime.num_streams == 1


def test_a_failed_step_says_what_went_wrong_and_not_how_to_debug_torch() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it in\nCompile with")

    slot: Any = SimpleNamespace(end=SimpleNamespace(synchronize=fail), hand_to=lambda handle: None)
    handle = TorchStepHandle(slot, (RuntimeError,), 1, None, None)
    with pytest.raises(DeviceError, match=r"during a step: CUDA error: an illegal memory access was encountered$"):
        handle.result()
