"""A part of a GPU taken on purpose: some of its multiprocessors (a green context) and some of its memory.

DRAGOMAN_SM_LIMIT=24 DRAGOMAN_MEMORY_LIMIT=8000000000 make a large card a small one, for tests and for sharing. What runs on
the partition's streams runs on its multiprocessors only, whatever context is current.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SM_LIMIT = "DRAGOMAN_SM_LIMIT"
MEMORY_LIMIT = "DRAGOMAN_MEMORY_LIMIT"


class PartitionError(Exception):
    """A limit cannot be read or cannot be had. The message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """What was asked for; None: no limit."""

    num_multiprocessors: int | None = None
    memory_bytes: int | None = None

    def cap(self, num_bytes: int) -> int:
        """`num_bytes` of memory, or what the limit leaves of it."""
        return num_bytes if self.memory_bytes is None else min(num_bytes, self.memory_bytes)


def limits_from_environ(environ: Mapping[str, str] = os.environ) -> PartitionLimits:
    """The limits of DRAGOMAN_SM_LIMIT and DRAGOMAN_MEMORY_LIMIT (bytes). Raises PartitionError."""
    return PartitionLimits(_count(environ, SM_LIMIT), _count(environ, MEMORY_LIMIT))


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 1 << 63:
        raise PartitionError(f"{name} is {text[:40]!r}, a whole number above 0 was expected; unset it for no limit")
    return int(text)


@dataclass(frozen=True, slots=True)
class Partition:
    """A green context. It lasts until the process ends."""

    num_multiprocessors: int  # what the driver gave: a multiple of its granularity, no less than asked for
    context: Any

    def new_stream(self) -> int:
        """A new stream's handle (a CUstream, also a cudaStream_t). Raises PartitionError."""
        from cuda.bindings import driver

        return int(_call(driver, "cuGreenCtxStreamCreate", driver.cuGreenCtxStreamCreate(self.context, 1, 0)))


def open_partition(index: int, num_multiprocessors: int) -> Partition:
    """A green context of `num_multiprocessors` on the CUDA device `index`; its primary context is retained.

    The driver rounds up to its granularity (8 on compute capability 9.0). Raises PartitionError.
    """
    from cuda.bindings import driver

    _call(driver, "cuInit", driver.cuInit(0))
    device = _call(driver, "cuDeviceGet", driver.cuDeviceGet(index))
    _call(driver, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _call(driver, "cuDeviceGetDevResource", driver.cuDeviceGetDevResource(device, kind))
    available = int(whole.sm.smCount)
    if num_multiprocessors > available:
        raise PartitionError(
            f"{SM_LIMIT} is {num_multiprocessors}, but GPU {index} has {available} multiprocessors; lower it or unset it"
        )
    answer = driver.cuDevSmResourceSplitByCount(1, whole, 0, num_multiprocessors)
    groups = _call(driver, "cuDevSmResourceSplitByCount", answer)[0]
    description = _call(driver, "cuDevResourceGenerateDesc", driver.cuDevResourceGenerateDesc(list(groups[:1]), 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _call(driver, "cuGreenCtxCreate", driver.cuGreenCtxCreate(description, device, int(flags)))
    return Partition(int(groups[0].sm.smCount), context)


def _call(driver: Any, name: str, answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        _, error = driver.cuGetErrorName(answer[0])
        said = error.decode() if isinstance(error, bytes) else str(answer[0])
        raise PartitionError(
            f"the driver refused a partition of the GPU ({name}: {said}); it needs a driver of CUDA 12.4 or later; "
            f"unset {SM_LIMIT} to use the whole card"
        )
    values = answer[1:]
    return values[0] if len(values) == 1 else values
