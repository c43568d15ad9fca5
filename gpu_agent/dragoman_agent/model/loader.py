"""Weights from files to a device by several threads, each with buffers of its own: it fills one while its last is copied."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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

    def stored_name(self, name: str) -> str:
        """The name of a tensor in the files."""


class Sink(Protocol):
    """One thread's way to the device; only that thread calls it."""

    def buffer(self) -> Bytes:
        """The next flat uint8 buffer to fill, waited for until its last contents are copied."""

    def send(self, name: str, offset: int, data: Bytes) -> None:
        """Start to copy `data`, the first bytes of the buffer handed out last, to byte `offset` of tensor `name`."""


def scatter(
    source: TensorReader,
    names: Sequence[str],
    sinks: Sequence[Sink],
    *,
    progress: Callable[[int], None] = lambda _: None,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
) -> None:
    """Send every byte of the tensors `names` once, one thread a sink; chunks of different threads come in any order.

    Give `source.file_order()` for sequential reads. No memory is used but the sinks' buffers, and one tensor's where a
    source has to make it. `progress` gets the bytes of each chunk, from one thread at a time. On an error all threads
    stop, and ModelFileError names the tensor. Threads and files are gone when this returns.
    """
    if not sinks:
        raise ValueError("no sink: at least one is needed")
    with ExitStack() as stack:
        work = _Work(source, names, _Files(stack), read_ahead_bytes, progress)
        threads = [threading.Thread(target=work.run, args=(sink,), name="weights", daemon=True) for sink in sinks[1:]]
        for thread in threads:
            thread.start()
        try:
            work.run(sinks[0])
        finally:
            work.stop()
            for thread in threads:
                thread.join()
    if work.error is not None:
        raise work.error


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of one tensor: from a file, or the whole of a tensor that has to be made."""

    name: str
    offset: int
    num_bytes: int
    file: int  # descriptor, -1 for a tensor to be made
    file_offset: int


class _Work:
    """What is left to do, shared by the threads."""

    def __init__(
        self,
        source: TensorReader,
        names: Sequence[str],
        files: _Files,
        read_ahead_bytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self.error: Exception | None = None
        self._source = source
        self._progress = progress
        self._lock = threading.Lock()
        self._making = threading.Lock()  # one made tensor at a time bounds the memory
        self._tensors = _with_hints(source, names, files, read_ahead_bytes)
        self._current: _Piece | None = None  # what is left of the tensor being handed out

    def stop(self) -> None:
        """No thread begins another piece."""
        with self._lock:
            self._tensors = iter(())
            self._current = None

    def run(self, sink: Sink) -> None:
        """Do pieces until there are no more."""
        piece = None
        try:
            buffer = sink.buffer()
            while (piece := self._next(len(buffer))) is not None:
                if piece.file < 0:
                    buffer = self._send_made(piece.name, sink, buffer)
                    continue
                view = buffer[: piece.num_bytes]
                _read(piece.file, view, piece.file_offset)
                self._send(sink, piece.name, piece.offset, view)
                buffer = sink.buffer()
        except Exception as error:  # the first is raised where scatter was called
            with self._lock:
                self.error = self.error or _named(self._source, piece.name if piece is not None else "", error)
            self.stop()

    def _next(self, max_bytes: int) -> _Piece | None:
        with self._lock:
            whole = self._current
            if whole is None:
                try:
                    whole = next(self._tensors, None)
                except (OSError, MemoryError) as error:
                    raise _named(self._source, "", error) from None
            if whole is None or whole.file < 0:
                self._current = None
                return whole
            size = min(max_bytes, whole.num_bytes)
            rest = whole.num_bytes - size
            self._current = (
                _Piece(whole.name, whole.offset + size, rest, whole.file, whole.file_offset + size) if rest else None
            )
            return _Piece(whole.name, whole.offset, size, whole.file, whole.file_offset)

    def _send_made(self, name: str, sink: Sink, buffer: Bytes) -> Bytes:
        with self._making:
            made = self._source.tensor(name).data.reshape(-1)
            for offset in range(0, len(made), len(buffer)):
                view = buffer[: len(made) - offset]
                view[:] = made[offset : offset + len(view)]
                self._send(sink, name, offset, view)
                buffer = sink.buffer()
        return buffer

    def _send(self, sink: Sink, name: str, offset: int, data: Bytes) -> None:
        sink.send(name, offset, data)
        with self._lock:
            self._progress(len(data))


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


def _with_hints(source: TensorReader, names: Sequence[str], files: _Files, read_ahead_bytes: int) -> Iterator[_Piece]:
    """Each tensor as one piece; hints to the system run ahead by up to `read_ahead_bytes`."""
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
        except OSError as error:
            raise _named(source, names[next_hint], error) from None
        extent = ahead.popleft()
        if extent is None:
            yield _Piece(name, 0, 0, -1, 0)
        elif extent.num_bytes:
            yield _Piece(name, 0, extent.num_bytes, files.descriptor(extent.path), extent.offset)
            ahead_bytes -= extent.num_bytes


def _read(file: int, target: Bytes, position: int) -> None:
    view = target.data
    while view:
        count = os.preadv(file, [view], position)
        if count == 0:
            size = os.fstat(file).st_size  # another thread's piece may lie before the end, this one behind it
            raise EOFError(f"the file ends at byte {min(size, position)}")
        view, position = view[count:], position + count


def _named(source: TensorReader, name: str, error: Exception) -> Exception:
    """The error of a tensor for a person; what is no fault of the file stays what it is."""
    if isinstance(error, ModelFileError) or not isinstance(error, OSError | EOFError | MemoryError):
        return error
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    stored = source.stored_name(name) if name else ""
    shown = repr(stored) if stored == name else f"{stored!r} ({name})"
    return ModelFileError(f"tensor {shown}", f"could not be read ({reason})", "check the disk, fetch the model again")
