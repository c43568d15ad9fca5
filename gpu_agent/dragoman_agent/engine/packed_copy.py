"""Several host arrays to a torch device in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Arrays = Mapping[str, npt.NDArray[Any]]


def send(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """`arrays` of 4 or 8 bytes an element as tensors on `device`, flat, by the same names; in the current stream.

    A copy from pageable memory would wait until everything queued before it is done. The pinned buffer is kept by torch
    until the copy has been made. On the host itself the tensors are the arrays.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array.reshape(-1)) for name, array in arrays.items()}
    host = torch.empty(sum(array.nbytes for array in arrays.values()), dtype=torch.uint8, pin_memory=True)
    pack(arrays, host)
    return views(arrays, host.to(device, non_blocking=True))


def send_words(parts: Sequence[npt.NDArray[np.int32]], device: torch.device) -> Tensor:
    """Arrays of int32, one after another, as one tensor [num_words] on `device`; as `send`."""
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(parts))
    host = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, pin_memory=True)
    pack({str(number): part for number, part in enumerate(parts)}, host)
    return host.to(device, non_blocking=True).view(torch.int32)


def pack(arrays: Arrays, host: Tensor) -> None:
    """Fill `host` uint8 [num_bytes] with the arrays, one type after the other, the wider types first."""
    ordered = [np.ascontiguousarray(arrays[name]) for names in _by_type(arrays).values() for name in names]
    parts = [array.reshape(-1).view(np.uint8) for array in ordered]
    if parts:
        np.concatenate(parts, out=host.numpy())


def views(arrays: Arrays, packed: Tensor) -> dict[str, Tensor]:
    """The tensors in `packed` uint8 [num_bytes]; three torch calls a type, however many arrays there are."""
    found: dict[str, Tensor] = {}
    start = 0
    for kind, names in _by_type(arrays).items():
        sizes = [arrays[name].size for name in names]
        end = start + sum(sizes) * kind.itemsize
        dtype = torch.from_numpy(np.empty(0, kind)).dtype
        found.update(zip(names, torch.split(packed[start:end].view(dtype), sizes), strict=True))
        start = end
    return found


def _by_type(arrays: Arrays) -> dict[np.dtype[Any], list[str]]:
    """Names by type; wider types first, so that each lies at a multiple of its own size."""
    kinds: dict[np.dtype[Any], list[str]] = {}
    for name, array in arrays.items():
        kinds.setdefault(array.dtype, []).append(name)
    return dict(sorted(kinds.items(), key=lambda item: -item[0].itemsize))
