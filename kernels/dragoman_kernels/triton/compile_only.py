"""Launchers that compile and launch nothing: for a device that is not there or not yet open, and without PyTorch's import.

What a launcher asks of PyTorch is a tensor's shape, type and address; the name of a binary in Triton's cache follows from
types, alignment and constants alone, so what is compiled here is what a launch on the device finds.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

_DTYPES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip


class TargetDriver:
    """Stands for a device that is not there: what a compilation asks of Triton's driver, and no more."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> str:
        """Any name: compiled kernels are kept by it."""
        return f"{self._target.backend} {self._target.arch}"

    def get_current_stream(self, device: str) -> int:
        """Nothing is queued."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self._target


@contextmanager
def compiling(
    target: GPUTarget,
    note: Callable[[JITFunction[Any], Any, dict[str, Any]], None],
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Launches inside compile for `target` and run nothing; `note` gets each function, its binary and its options.

    `is_wanted` is asked at each launch. One that is not wanted compiles nothing, but its source is read all the same: a binary's
    name depends on which of the functions that kernels share were read before.
    """
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not is_wanted():
            return self.cache_key
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        note(self, compiled, options)
        return compiled

    previous = driver._active
    JITFunction.run = compile_only
    driver.set_active(TargetDriver(target))
    try:
        yield
    finally:
        JITFunction.run = launch
        driver._active = previous


class DType:
    """A type by its name in PyTorch, which is what Triton reads."""

    def __init__(self, name: str) -> None:
        self.name, self.itemsize = name, _DTYPES[name]

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__


class Tensor:
    """Shape, type and an address that is a multiple of 16, as the device's allocator gives; no contents."""

    def __init__(self, shape: Sequence[int], dtype: DType) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, "none"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: Any) -> Tensor:
        """Whatever part is meant: a launcher reads none."""
        return self

    def __setitem__(self, place: Any, value: Any) -> None:
        """There are no contents."""

    def contiguous(self) -> Tensor:
        """It is."""
        return self

    def data_ptr(self) -> int:
        """None that exists."""
        return 0

    def stride(self, dim: int) -> int:
        """Of a contiguous tensor."""
        return math.prod(self.shape[dim + 1 :])


def without_torch() -> types.ModuleType:
    """A module `torch` that has what the launchers use and nothing behind it, for a process that only compiles.

    Raises RuntimeError where PyTorch is imported already: one process cannot have both.
    """
    if "torch" in sys.modules:
        raise RuntimeError("PyTorch is imported in this process; compile with it, or in a process of its own")
    module = types.ModuleType("torch")

    def empty(*size: Any, dtype: DType | None = None, device: Any = None) -> Tensor:
        shape = size[0] if size and not isinstance(size[0], int) else size
        return Tensor(shape, dtype or module.float32)

    for name in _DTYPES:
        setattr(module, name, DType(name))
    module.Tensor = Tensor  # type: ignore[attr-defined]
    module.device = str  # type: ignore[attr-defined]
    module.empty = module.zeros = empty  # type: ignore[attr-defined]
    module.arange = lambda count, **options: empty(count, **options)  # type: ignore[attr-defined]
    module.empty_like = lambda one: Tensor(one.shape, one.dtype)  # type: ignore[attr-defined]
    sys.modules["torch"] = module
    return module
