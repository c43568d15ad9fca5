"""KV blocks that pass from one device to another give the tokens that computing them would have given."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman_agent.device.base import BlockFormat
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import default_null_plan, open_null_model


def null_device() -> NullDevice:
    device = NullDevice()
    model = open_null_model("null")
    device.load(model, default_null_plan(model, max_num_seqs=4, max_num_waiting=4), lambda progress: None)
    return device


def test_what_is_written_is_read_and_nothing_else_changes() -> None:
    device = null_device()
    size = device.block_format.block_bytes
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (3, size), dtype=np.uint8)
    device.write_blocks(np.array([5, 2, 9], np.int32), data)
    read = device.read_blocks(np.array([9, 5, 1, 2], np.int32))
    assert (read[[1, 3, 0]] == data).all() and not read[2].any()


def test_blocks_of_another_size_are_refused() -> None:
    from dragoman_agent.device.base import DeviceError

    device = null_device()
    with pytest.raises(DeviceError, match="do not fit"):
        device.write_blocks(np.array([1], np.int32), np.zeros((1, 3), np.uint8))


def test_blocks_of_a_torch_cache() -> None:
    torch = pytest.importorskip("torch")
    from dragoman_agent.device import torch_blocks
    from dragoman_agent.model.layers import PagedCache

    shape = (2, 6, 3, 4, 8)  # layers, blocks, heads, tokens, dim
    one = PagedCache(torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape, dtype=torch.bfloat16))
    other = PagedCache(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
    assert torch_blocks.block_format(one) == BlockFormat(
        "bfloat16", "layer, k[head, token, dim] v[head, token, dim]", 2 * 2 * 3 * 4 * 8 * 2
    )
    data = torch_blocks.read_blocks(one, np.array([4, 1], np.int32))
    torch_blocks.write_blocks(other, np.array([2, 3], np.int32), data)
    for cache, expected in ((other.keys, one.keys), (other.values, one.values)):
        assert torch.equal(cache[:, 2], expected[:, 4]) and torch.equal(cache[:, 3], expected[:, 1])
        assert not cache[:, [0, 1, 4, 5]].any()
    with pytest.raises(ValueError, match="do not fit"):
        torch_blocks.write_blocks(other, np.array([2], np.int32), data)
