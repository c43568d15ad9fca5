"""Weights from files into buffers that a device copies from, so that disk, host copy and device copy overlap."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.layout import TensorExtent
from dragoman_kernels.tensor import QuantTensor

Bytes = npt.NDArray[np.uint8]

# How far the system is asked to read ahead of the copies: enough for any disk's queue, small beside a model.
READ_AHEAD_BYTES: Final = 256 << 20


class TensorReader(Protocol):
    """What of a ModelSource is needed here."""

    def extent(self, name: str) -> TensorExtent | None:
        """Where a tensor's bytes can be read from, None when `tensor` has to make them."""

    def tensor(self, name: str) -> QuantTensor:
        """A tensor as stored."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of one tensor, in one of the caller's buffers.

    `data` is valid until `release` is called, and its buffer is not used again before. A device calls it when its copy
    from the buffer has finished, not when it was merely submitted.
    """

    name: str
    offset: int  # bytes from the start of the tensor
    data: Bytes  # [num_bytes], a view of the buffer
    is_last: bool  # of this tensor
    release: Callable[[], None]


@dataclass(slots=True)
class _Task:
    """Fill `buffer` with the bytes of a tensor from `offset` on: from a file, or from `made`."""

    name: str
    offset: int
    is_last: bool
    buffer: Bytes  # cut to what is wanted
    file: int  # descriptor, -1 for made tensors
    file_offset: int
    made: Bytes | None
    whole_buffer: Bytes = field(repr=False)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def run(self) -> None:
        """The copy; both ways give up the interpreter lock, so several run at once."""
        try:
            if self.made is not None:
                self.buffer[:] = self.made[self.offset : self.offset + len(self.buffer)]
            else:
                self._read()
        except Exception as error:  # handed to the caller, who names the tensor
            self.error = error
        self.done.set()

    def _read(self) -> None:
        view, position = self.buffer.data, self.file_offset
        while view:
            count = os.preadv(self.file, [view], position)
            if count == 0:
                raise EOFError(f"the file ends at byte {position}")
            view, position = view[count:], position + count


def read_ahead(
    source: TensorReader,
    names: Sequence[str],
    buffers: Sequence[Bytes],
    *,
    num_threads: int,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
) -> Iterator[Chunk]:
    """Every byte of the tensors `names`, in that order, in chunks of the buffers' size.

    Give `source.file_order()` for sequential reads. `buffers` are flat uint8 arrays of one size (views of pinned memory
    for a GPU); `num_threads` threads fill them at once, straight from the page cache. No other memory is used, except
    one tensor's where a source has to make it.

    Run the iterator to its end or close it: both stop the threads and close the files. Raises ModelFileError naming the
    tensor when a read fails or a file got shorter; ValueError for buffers that cannot be used, or when the caller asks
    for another chunk while holding all of them.
    """
    _check(buffers, num_threads)
    free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_work, args=(tasks,), name="read-ahead", daemon=True) for _ in range(num_threads)
    ]
    pending: deque[_Task] = deque()
    with ExitStack() as stack:
        wanted = _tasks(source, names, free, _Files(stack), read_ahead_bytes)
        stack.callback(_stop, tasks, threads)
        for thread in threads:
            thread.start()
        more = True
        while more or pending:
            while more and not free.empty():
                task = next(wanted, None)
                if task is None:
                    more = False
                else:
                    pending.append(task)
                    tasks.put(task)
            if pending:
                yield _finished(pending.popleft(), free)
            elif more:
                raise ValueError(f"all {len(buffers)} buffers are held by the caller; release chunks before the next")


def _check(buffers: Sequence[Bytes], num_threads: int) -> None:
    if num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}, at least 1 is needed")
    if len({buffer.size for buffer in buffers}) != 1 or not buffers[0].size:
        raise ValueError("the buffers must be one or more arrays of one size above 0")
    for buffer in buffers:
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError("a buffer must be a flat, contiguous, writeable uint8 array")


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()


def _stop(tasks: queue.SimpleQueue[_Task | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        if thread.ident is not None:
            thread.join()


class _Files:
    """Descriptors of the files, opened when first needed and closed with the stack."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._open[path])
        return self._open[path]

    def hint(self, extent: TensorExtent) -> None:
        """Ask the system to read ahead, where it can be asked."""
        file = self.descriptor(extent.path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, extent.offset, extent.num_bytes, os.POSIX_FADV_WILLNEED)


def _tasks(
    source: TensorReader,
    names: Sequence[str],
    free: queue.SimpleQueue[Bytes],
    files: _Files,
    read_ahead_bytes: int,
) -> Iterator[_Task]:
    """A task for every chunk, each with a free buffer; hints run ahead by up to `read_ahead_bytes`."""
    ahead: deque[TensorExtent | None] = deque()
    ahead_bytes = next_hint = 0
    for index, name in enumerate(names):
        try:
            while next_hint < len(names) and (next_hint <= index or ahead_bytes < read_ahead_bytes):
                extent = source.extent(names[next_hint])
                if extent is not None:
                    files.hint(extent)
                    ahead_bytes += extent.num_bytes
                ahead.append(extent)
                next_hint += 1
            extent = ahead.popleft()
            made = source.tensor(name).data.reshape(-1) if extent is None else None
            file = -1 if extent is None else files.descriptor(extent.path)
        except (OSError, MemoryError) as error:
            raise _failed(name, error) from None
        total = len(made) if made is not None else extent.num_bytes if extent is not None else 0
        start = extent.offset if extent is not None else 0
        offset = 0
        while offset < total:
            buffer = free.get()
            end = min(offset + len(buffer), total)
            yield _Task(name, offset, end == total, buffer[: end - offset], file, start + offset, made, buffer)
            offset = end
        ahead_bytes -= extent.num_bytes if extent is not None else 0


def _finished(task: _Task, free: queue.SimpleQueue[Bytes]) -> Chunk:
    """The chunk of a task, waited for."""
    task.done.wait()
    if task.error is not None:
        raise _failed(task.name, task.error) from None
    held = [task.whole_buffer]

    def release() -> None:
        if held:
            free.put(held.pop())

    return Chunk(task.name, task.offset, task.buffer, task.is_last, release)


def _failed(name: str, error: BaseException) -> ModelFileError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ModelFileError(f"tensor {name!r}", f"could not be read ({reason})", "check the disk, fetch the model again")
