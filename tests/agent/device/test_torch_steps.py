"""The slices of a step's buffers that are made once."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from dragoman_agent.device.torch_steps import Heads


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100])
def test_heads_hold_what_is_asked_for_and_little_more(size: int) -> None:
    whole = torch.arange(size)
    heads = Heads(whole)
    for num in range(1, size + 1):
        head = heads.of(num)
        assert num <= len(head) < 2 * num and torch.equal(head, whole[: len(head)])
        assert head.data_ptr() == whole.data_ptr() and heads.of(num) is head
