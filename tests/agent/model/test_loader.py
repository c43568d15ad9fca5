"""Bytes through the threads' buffers: all of them, each once, in bounded memory, with errors that name the tensor."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.agent.model.checkpoints import save_checkpoint

from dragoman_agent.model import loader
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.layout import TensorExtent
from dragoman_agent.model.loader import scatter
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_kernels.tensor import QuantTensor

Bytes = npt.NDArray[np.uint8]


class CopySink:
    """Copies late, as a device does: what was sent is taken only when its buffer is wanted again, or at the end."""

    def __init__(self, num_bytes: int) -> None:
        self.buffers = [np.full(num_bytes, 0xEE, np.uint8) for _ in range(2)]
        self.received: list[tuple[str, int, bytes]] = []
        self.threads: set[int] = set()
        self._pending: list[tuple[str, int, Bytes] | None] = [None, None]
        self._at = 0

    def buffer(self) -> Bytes:
        self._at ^= 1
        self._take(self._at)
        return self.buffers[self._at]

    def send(self, name: str, offset: int, data: Bytes) -> None:
        assert np.shares_memory(data, self.buffers[self._at])
        self.threads.add(threading.get_ident())
        self._pending[self._at] = (name, offset, data)

    def finish(self) -> None:
        for at in (0, 1):
            self._take(at)

    def _take(self, at: int) -> None:
        pending, self._pending[at] = self._pending[at], None
        if pending is not None:
            name, offset, data = pending
            self.received.append((name, offset, data.tobytes()))


def run(source: ModelSource, names: list[str], num_threads: int, num_bytes: int) -> dict[str, bytes]:
    """The tensors' bytes, put together; that every byte came once is checked on the way."""
    sinks = [CopySink(num_bytes) for _ in range(num_threads)]
    reported: list[int] = []
    scatter(source, names, sinks, progress=reported.append)
    for sink in sinks:
        sink.finish()
        assert len(sink.threads) <= 1
    pieces = sorted(piece for sink in sinks for piece in sink.received)
    assert sum(reported) == sum(len(data) for _, _, data in pieces)
    found: dict[str, bytes] = {}
    for name, offset, data in pieces:
        assert offset == len(found.get(name, b""))
        found[name] = found.get(name, b"") + data
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("sharded")
    save_checkpoint(directory, "qwen2", max_shard_size="60KB", dtype=torch.bfloat16)
    return open_model(str(directory), directory)


@pytest.mark.parametrize("num_bytes", [100, 4096, 1 << 20])
@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_every_byte_arrives_once(sharded: ModelSource, num_bytes: int, num_threads: int) -> None:
    names = sharded.file_order()
    found = run(sharded, names, num_threads, num_bytes)
    assert found == {name: sharded.tensor(name).data.tobytes() for name in names}


def test_reordered_and_generated_tensors_arrive_too(make_model: Callable[..., Path]) -> None:
    """A GGUF's interleaved q and k rows, and weights without a file."""
    gguf = open_model(str(make_model()), Path())
    assert gguf.extent("layers.0.q_proj") is None
    assert gguf.extent("layers.0.v_proj") is not None
    names = gguf.file_order()
    assert run(gguf, names, 2, 1000) == {name: gguf.tensor(name).data.tobytes() for name in names}
    made = RandomSource("smollm2-135m")
    names = ["layers.0.k_proj", "norm"]
    assert run(made, names, 2, 1 << 16) == {name: made.tensor(name).data.tobytes() for name in names}


def test_no_tensors_and_no_sinks(sharded: ModelSource) -> None:
    assert run(sharded, [], 2, 100) == {}
    with pytest.raises(ValueError, match="at least one is needed"):
        scatter(sharded, ["norm"], [])


class OneFile:
    """A source of equal tensors in one file, named by their position."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes

    def extent(self, name: str) -> TensorExtent | None:
        return TensorExtent(self.path, int(name) * self.num_bytes, self.num_bytes)

    def tensor(self, name: str) -> QuantTensor:
        raise AssertionError("read from the file instead")

    def stored_name(self, name: str) -> str:
        return f"blk.{name}"


def nothing_is_left(path: Path) -> None:
    """Neither a thread nor a descriptor of the file."""
    assert not any(thread.name == "weights" for thread in threading.enumerate())
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    assert str(path) not in {os.readlink(link) for link in links if os.path.islink(link)}


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_file_that_got_shorter_names_the_tensor(tmp_path: Path, num_threads: int) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2500))
    with pytest.raises(ModelFileError, match=r"tensor 'blk.2' \(2\): could not be read \(the file ends at byte 2500\)"):
        scatter(OneFile(path, 1000), ["0", "1", "2"], [CopySink(600) for _ in range(num_threads)])
    nothing_is_left(path)


def test_a_piece_behind_the_end_names_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1500))
    with pytest.raises(ModelFileError, match=r"the file ends at byte 1500\)"):
        scatter(OneFile(path, 1000), ["2"], [CopySink(600)])
    nothing_is_left(path)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_failing_disk_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(3000))
    real = os.preadv

    def failing(file: int, views: list[memoryview], position: int) -> int:
        if position >= 1000:
            raise OSError(5, "Input/output error")
        return real(file, views, position)

    monkeypatch.setattr(loader.os, "preadv", failing)
    with pytest.raises(ModelFileError, match=r"tensor 'blk.1' \(1\): could not be read \(Input/output error\)"):
        scatter(OneFile(path, 1000), ["0", "1"], [CopySink(500) for _ in range(num_threads)])
    nothing_is_left(path)


def test_a_missing_file_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor 'blk.0' \(0\): could not be read \(No such file or directory\)"):
        scatter(OneFile(tmp_path / "gone", 10), ["0"], [CopySink(10)])


def test_a_device_that_fails_stops_every_thread_and_keeps_its_error(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100_000))

    class Broken(CopySink):
        def send(self, name: str, offset: int, data: Bytes) -> None:
            if offset >= 5000:
                raise RuntimeError("the device is gone")
            super().send(name, offset, data)

    sinks = [Broken(100) for _ in range(3)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        scatter(OneFile(path, 100_000), ["0"], sinks)
    nothing_is_left(path)
    assert sum(len(data) for sink in sinks for _, _, data in sink.received) < 6000


def test_memory_is_the_sinks_buffers(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 << 20))

    class Dropping(CopySink):
        def send(self, name: str, offset: int, data: Bytes) -> None:
            pass

    sinks = [Dropping(1 << 20) for _ in range(2)]
    tracemalloc.start()
    scatter(OneFile(path, 16 << 20), ["0", "1", "2", "3"], sinks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_hints_run_ahead_but_not_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(10_000))
    hinted: list[int] = []
    seen: list[int] = []
    monkeypatch.setattr(loader.os, "posix_fadvise", lambda file, offset, length, advice: hinted.append(offset))
    scatter(
        OneFile(path, 1000), [str(i) for i in range(10)], [CopySink(1000)],
        progress=lambda _: seen.append(len(hinted)), read_ahead_bytes=3000,
    )  # fmt: skip
    assert hinted == [1000 * i for i in range(10)]
    assert seen == [min(10, index + 3) for index in range(10)]
