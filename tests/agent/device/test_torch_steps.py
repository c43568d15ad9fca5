"""The slices of a step's buffers that are made once, and what is said of a step that failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.torch_steps import Heads, TorchStepHandle


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100])
def test_heads_hold_what_is_asked_for_and_little_more(size: int) -> None:
    whole = torch.arange(size)
    heads = Heads(whole)
    for num in range(1, size + 1):
        head = heads.of(num)
        assert num <= len(head) < 2 * num and torch.equal(head, whole[: len(head)])
        assert head.data_ptr() == whole.data_ptr() and heads.of(num) is head


def test_a_failed_step_says_what_went_wrong_and_not_how_to_debug_torch() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it in\nCompile with")

    slot: Any = SimpleNamespace(end=SimpleNamespace(synchronize=fail), hand_to=lambda handle: None)
    handle = TorchStepHandle(slot, (RuntimeError,), 1, None, None)
    with pytest.raises(DeviceError, match=r"during a step: CUDA error: an illegal memory access was encountered$"):
        handle.result()
