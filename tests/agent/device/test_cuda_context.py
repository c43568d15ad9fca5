"""A CUDA device's context beside PyTorch's import: the device's own, once, and nothing in the way is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dragoman_agent.device.cuda_context import open_context
from dragoman_agent.pal.host import Host


def driver(seen: list[Any], **codes: int) -> Any:
    def answer(name: str, *values: Any) -> Any:
        def call(*given: Any) -> tuple[Any, ...]:
            seen.append((name, *given))
            return (codes.get(name, 0), *(values if name not in codes else (None,) * len(values)))

        return call

    names = {"cuInit": (), "cuDeviceGet": ("device 3",), "cuDevicePrimaryCtxRetain": ("context",)}
    return SimpleNamespace(**{name: answer(name, *values) for name, values in names.items()})


def test_the_primary_context_of_the_device_is_retained() -> None:
    seen: list[Any] = []
    assert open_context(3, Host(load_driver=lambda: driver(seen)))
    assert seen == [("cuInit", 0), ("cuDeviceGet", 3), ("cuDevicePrimaryCtxRetain", "device 3")]


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_what_fails_is_left_to_pytorch_and_nothing_is_tried_behind_it(fails: str) -> None:
    seen: list[Any] = []
    assert not open_context(3, Host(load_driver=lambda: driver(seen, **{fails: 100})))
    assert seen[-1][0] == fails


@pytest.mark.parametrize("error", [ImportError("no cuda.bindings"), RuntimeError("no libcuda.so.1")])
def test_without_a_driver_there_is_none(error: Exception) -> None:
    def load() -> Any:
        raise error

    assert not open_context(0, Host(load_driver=load))
