"""Arrays that were packed into one buffer come out as they were."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dragoman_agent.engine.packed_copy import pack, send, views

ARRAYS = {
    "masks": np.arange(6, dtype=np.int32).reshape(2, 3),
    "rows": np.array([3, 1 << 40, -1]),
    "none": np.zeros(0, np.int64),
    "factors": np.array([1.5], np.float32),
    "uniforms": np.array([0.1, 0.9]),
    "strided": np.arange(10)[::3],
}


@pytest.mark.parametrize("names", [list(ARRAYS), list(ARRAYS)[::-1], ["none"], ["factors", "rows"], []])
def test_packed_arrays_come_out_as_they_were(names: list[str]) -> None:
    arrays = {name: ARRAYS[name] for name in names}
    host = torch.empty(sum(array.nbytes for array in arrays.values()), dtype=torch.uint8)
    pack(arrays, host)
    for tensors in (views(arrays, host), send(arrays, torch.device("cpu"))):
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            assert tensors[name].numpy().dtype == array.dtype
            assert np.array_equal(tensors[name].numpy(), array.ravel()), name
