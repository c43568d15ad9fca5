"""Bytes through the caller's buffers: all of them, in order, in bounded memory, with errors that name the tensor."""

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
from dragoman_agent.model.loader import Chunk, read_ahead
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_kernels.tensor import QuantTensor

Bytes = npt.NDArray[np.uint8]


def make_buffers(count: int, num_bytes: int) -> list[Bytes]:
    return [np.full(num_bytes, 0xEE, np.uint8) for _ in range(count)]


def collected(chunks: list[tuple[str, int, bytes, bool]]) -> dict[str, bytes]:
    """The tensors' bytes, put together; offsets and last marks are checked on the way."""
    found: dict[str, bytes] = {}
    finished: set[str] = set()
    for name, offset, data, is_last in chunks:
        assert name not in finished
        assert offset == len(found.get(name, b""))
        found[name] = found.get(name, b"") + data
        if is_last:
            finished.add(name)
    assert finished == found.keys()
    return found


def run(
    source: ModelSource, names: list[str], buffers: list[Bytes], num_threads: int, held: int = 0
) -> dict[str, bytes]:
    """Reads all; keeps `held` chunks before it releases them, as copies under way do."""
    seen: list[tuple[str, int, bytes, bool]] = []
    waiting: list[Chunk] = []
    for chunk in read_ahead(source, names, buffers, num_threads=num_threads):
        assert any(np.shares_memory(chunk.data, buffer) for buffer in buffers)
        waiting.append(chunk)
        if len(waiting) > held:
            oldest = waiting.pop(0)  # by now later chunks are being read into other buffers
            seen.append((oldest.name, oldest.offset, oldest.data.tobytes(), oldest.is_last))
            oldest.release()
    seen += [(chunk.name, chunk.offset, chunk.data.tobytes(), chunk.is_last) for chunk in waiting]
    assert list(dict.fromkeys(name for name, *_ in seen)) == names
    return collected(seen)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp("sharded")
    save_checkpoint(directory, "qwen2", max_shard_size="60KB", dtype=torch.bfloat16)
    return open_model(str(directory), directory)


@pytest.mark.parametrize("chunk_bytes", [100, 4096, 1 << 20])
@pytest.mark.parametrize(("num_threads", "num_buffers", "held"), [(1, 1, 0), (1, 4, 3), (3, 4, 2), (8, 5, 4)])
def test_every_byte_arrives_in_order(
    sharded: ModelSource, chunk_bytes: int, num_threads: int, num_buffers: int, held: int
) -> None:
    names = sharded.file_order()
    found = run(sharded, names, make_buffers(num_buffers, chunk_bytes), num_threads, held)
    assert found == {name: sharded.tensor(name).data.tobytes() for name in names}


def test_reordered_and_generated_tensors_arrive_too(make_model: Callable[..., Path]) -> None:
    """A GGUF's interleaved q and k rows, and weights without a file."""
    gguf = open_model(str(make_model()), Path())
    assert gguf.extent("layers.0.q_proj") is None
    assert gguf.extent("layers.0.v_proj") is not None
    names = gguf.file_order()
    assert run(gguf, names, make_buffers(3, 1000), 2) == {name: gguf.tensor(name).data.tobytes() for name in names}
    made = RandomSource("smollm2-135m")
    names = ["layers.0.k_proj", "norm"]
    assert run(made, names, make_buffers(3, 1 << 16), 2) == {name: made.tensor(name).data.tobytes() for name in names}


def test_a_held_chunk_is_not_overwritten(sharded: ModelSource) -> None:
    buffers = make_buffers(3, 512)
    names = sharded.file_order()
    chunks = read_ahead(sharded, names, buffers, num_threads=2)
    first = next(chunks)
    before = first.data.tobytes()
    for _, chunk in zip(range(20), chunks, strict=False):
        chunk.release()
    assert first.data.tobytes() == before
    chunks.close()


def test_releasing_twice_gives_the_buffer_once(sharded: ModelSource) -> None:
    chunks = read_ahead(sharded, sharded.file_order(), make_buffers(2, 512), num_threads=1)
    first = next(chunks)
    first.release()
    first.release()
    held = [next(chunks), next(chunks)]
    assert not np.shares_memory(held[0].data, held[1].data)
    with pytest.raises(ValueError, match="all 2 buffers are held"):
        next(chunks)


def test_holding_every_buffer_is_an_error_and_not_a_hang(sharded: ModelSource) -> None:
    chunks = read_ahead(sharded, sharded.file_order(), make_buffers(2, 64), num_threads=1)
    held = [next(chunks), next(chunks)]
    with pytest.raises(ValueError, match="all 2 buffers are held by the caller; release chunks before the next"):
        next(chunks)
    assert len(held) == 2


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("ending", ["end", "close", "error"])
def test_threads_and_files_are_gone_afterwards(sharded: ModelSource, ending: str) -> None:
    chunks = read_ahead(sharded, sharded.file_order(), make_buffers(2, 4096), num_threads=3)
    next(chunks).release()
    assert sum(thread.name == "read-ahead" for thread in threading.enumerate()) == 3
    if ending == "end":
        for chunk in chunks:
            chunk.release()
    elif ending == "close":
        chunks.close()
    else:
        with pytest.raises(RuntimeError):
            chunks.throw(RuntimeError())
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())
    # The mapping of each file keeps a descriptor of its own; none of the loader's is left beside it.
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert max(descriptors.count(str(path)) for path in sharded.files) <= 1


class OneFile:
    """A source of equal tensors in one file, named by their position."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes

    def extent(self, name: str) -> TensorExtent | None:
        return TensorExtent(self.path, int(name) * self.num_bytes, self.num_bytes)

    def tensor(self, name: str) -> QuantTensor:
        raise AssertionError("read from the file instead")


def test_a_file_that_got_shorter_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2500))
    chunks = read_ahead(OneFile(path, 1000), ["0", "1", "2"], make_buffers(1, 600), num_threads=2)
    with pytest.raises(ModelFileError, match=r"tensor '2': could not be read \(the file ends at byte 2500\)"):
        for chunk in chunks:
            chunk.release()
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


def test_a_failing_disk_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(3000))
    real = os.preadv

    def failing(file: int, views: list[memoryview], position: int) -> int:
        if position >= 1000:
            raise OSError(5, "Input/output error")
        return real(file, views, position)

    monkeypatch.setattr(loader.os, "preadv", failing)
    chunks = read_ahead(OneFile(path, 1000), ["0", "1"], make_buffers(4, 500), num_threads=2)
    with pytest.raises(ModelFileError, match=r"tensor '1': could not be read \(Input/output error\)"):
        for chunk in chunks:
            chunk.release()


def test_a_missing_file_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor '0': could not be read \(No such file or directory\)"):
        list(read_ahead(OneFile(tmp_path / "gone", 10), ["0"], make_buffers(1, 10), num_threads=1))


def test_memory_is_the_callers_buffers(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 << 20))
    buffers = make_buffers(4, 1 << 20)
    tracemalloc.start()
    for chunk in read_ahead(OneFile(path, 16 << 20), ["0", "1", "2", "3"], buffers, num_threads=2):
        chunk.release()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_hints_run_ahead_but_not_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(10_000))
    hinted: list[int] = []
    monkeypatch.setattr(loader.os, "posix_fadvise", lambda file, offset, length, advice: hinted.append(offset))
    chunks = read_ahead(
        OneFile(path, 1000), [str(i) for i in range(10)], make_buffers(1, 1000), num_threads=1, read_ahead_bytes=3000
    )
    for index, chunk in enumerate(chunks):
        assert hinted == [1000 * i for i in range(min(10, index + 3))]
        chunk.release()


@pytest.mark.parametrize(
    ("buffers", "num_threads", "message"),
    [
        ([], 1, "one or more arrays of one size above 0"),
        ([np.zeros(0, np.uint8)], 1, "of one size above 0"),
        ([np.zeros(4, np.uint8), np.zeros(5, np.uint8)], 1, "of one size above 0"),
        ([np.zeros(4, np.int8)], 1, "a flat, contiguous, writeable uint8 array"),
        ([np.zeros((2, 2), np.uint8)], 1, "a flat, contiguous"),
        ([np.zeros(8, np.uint8)[::2]], 1, "a flat, contiguous"),
        ([np.frombuffer(b"1234", np.uint8)], 1, "writeable"),
        ([np.zeros(4, np.uint8)], 0, "num_threads is 0"),
    ],
)
def test_buffers_that_cannot_be_used(tmp_path: Path, buffers: list[Bytes], num_threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(read_ahead(OneFile(tmp_path, 1), ["0"], buffers, num_threads=num_threads))
