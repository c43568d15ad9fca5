"""64 requests of mixed length at once, through the engine: each gets exactly what it gets alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dragoman_agent.device.cpu_road import NATIVE_FLOAT32, NATIVE_INT8

NUM_REQUESTS = 64


@pytest.mark.parametrize("road", [NATIVE_FLOAT32, NATIVE_INT8])
def test_64_at_once_equal_each_alone(
    road: str, generate: Callable[..., list[list[int]]], embedded_model_path: Path
) -> None:
    rng = np.random.default_rng(8)
    lengths = [int(n) for n in rng.integers(1, 64, NUM_REQUESTS)]
    prompts = [rng.integers(20, 49152, length).tolist() for length in lengths]
    counts = [int(n) for n in rng.integers(2, 9, NUM_REQUESTS)]
    together = generate(road, prompts, counts)
    assert [len(tokens) for tokens in together] == counts
    alone = generate(road, prompts, counts, one_at_a_time=True)
    assert together == alone
