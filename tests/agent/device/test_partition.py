"""Limits of a part of a GPU: read from the environment, and given to the driver as a green context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dragoman_agent.device.partition import PartitionError, PartitionLimits, limits_from_environ, open_partition


def test_limits_are_read_and_cap() -> None:
    assert limits_from_environ({}) == PartitionLimits()
    limits = limits_from_environ({"DRAGOMAN_SM_LIMIT": " 24 ", "DRAGOMAN_MEMORY_LIMIT": "8000000000"})
    assert limits == PartitionLimits(24, 8_000_000_000)
    assert limits.cap(10**12) == 8_000_000_000 and limits.cap(5) == 5
    assert PartitionLimits().cap(10**12) == 10**12


@pytest.mark.parametrize("text", ["x", "0", "-3", "1.5", "8G", "١٢", "9" * 40])
@pytest.mark.parametrize("name", ["DRAGOMAN_SM_LIMIT", "DRAGOMAN_MEMORY_LIMIT"])
def test_a_bad_limit_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(PartitionError, match=f"{name} is .*a whole number above 0.*unset it"):
        limits_from_environ({name: text})


class Driver:
    """The calls that make a green context, on a card of 132 multiprocessors that gives them by eight."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
        self.CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "cuInit": lambda flags: (0,),
            "cuDeviceGet": lambda index: (0, index),
            "cuDevicePrimaryCtxRetain": lambda device: (0, 1),
            "cuDeviceGetDevResource": lambda device, kind: (0, SimpleNamespace(sm=SimpleNamespace(smCount=132))),
            "cuDevSmResourceSplitByCount": lambda groups, whole, flags, least: (
                0, [SimpleNamespace(sm=SimpleNamespace(smCount=-(-least // 8) * 8))], 1, None,
            ),
            "cuDevResourceGenerateDesc": lambda groups, count: (0, groups),
            "cuGreenCtxCreate": lambda description, device, flags: (0, "context"),
            "cuGreenCtxStreamCreate": lambda context, flags, priority: (0, 4096),
            "cuGetErrorName": lambda status: (0, b"CUDA_ERROR_NOT_SUPPORTED"),
        }  # fmt: skip
        return (lambda *_: (801,)) if name == self.refuses else answers[name]


def test_the_driver_rounds_up_and_streams_belong_to_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", Driver(), raising=False)
    partition = open_partition(0, 20)
    assert partition.num_multiprocessors == 24
    assert partition.new_stream() == 4096
    with pytest.raises(PartitionError, match="DRAGOMAN_SM_LIMIT is 200, but GPU 0 has 132 multiprocessors; lower it"):
        open_partition(0, 200)


@pytest.mark.parametrize("name", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxCreate"])
def test_a_driver_without_partitions_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(bindings, "driver", Driver(refuses=name), raising=False)
    with pytest.raises(PartitionError, match=f"{name}: CUDA_ERROR_NOT_SUPPORTED.*unset DRAGOMAN_SM_LIMIT"):
        open_partition(0, 24)
