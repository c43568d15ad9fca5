"""KV blocks carried from one loaded model to another decode bit for bit as those computed there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Make = Callable[..., Any]


@pytest.mark.parametrize("activation", ["float32", "int8"])
def test_carried_blocks_give_the_same_logits(activation: str, random_model: Make, load: Make) -> None:
    model = random_model(dtype="Q8_0", embedding="Q8_0")
    source, target = load(model, activation=activation), load(model, activation=activation, num_blocks=40)
    tokens = np.random.default_rng(4).integers(0, model.shape.vocab_size, 33).tolist()
    source.run([(0, tokens[:32])])
    expected, _ = source.run([(0, tokens[32:])])
    blocks = np.array(source.tables[0][:2], np.int32)
    data = source.step.read_blocks(blocks)
    assert data.shape == (2, source.step.block_bytes) and data.any()
    # In other places and the other order, so that a mix-up shows.
    target.tables[0] = [23, 7]
    target.lengths[0] = 32
    target.step.write_blocks(np.array([7, 23], np.int32), data[::-1])
    got, _ = target.run([(0, tokens[32:])])
    assert (got == expected).all()


def test_wrong_blocks_and_sizes_are_refused(random_model: Make, load: Make) -> None:
    step = load(random_model()).step
    for blocks in ([0], [64], [-1]):
        with pytest.raises(ValueError, match=r"block lies in \[1, 64\)"):
            step.read_blocks(np.array(blocks, np.int32))
    with pytest.raises(ValueError, match="data has shape"):
        step.write_blocks(np.array([1], np.int32), np.zeros((1, 5), np.uint8))
    step.close()
    with pytest.raises(ValueError, match="closed"):
        step.read_blocks(np.array([1], np.int32))
