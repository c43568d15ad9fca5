"""Directories and files that are damaged, incomplete or hostile: one clear error each, nothing allocated, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.agent.model.checkpoints import save_checkpoint

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.safetensors_file import SafetensorsFile
from dragoman_agent.model.source import open_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several shards."""
    directory = tmp_path_factory.mktemp("sharded")
    save_checkpoint(directory, "llama", max_shard_size="100KB")
    return directory


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / INDEX
    value = json.loads(path.read_text())
    change(value["weight_map"])
    path.write_text(json.dumps(value))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_model(str(directory), directory).check()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_undamaged_copy_opens(copy: Path) -> None:
    assert len(shards(copy)) > 2
    open_model(str(copy), copy).check()


def test_a_missing_shard(copy: Path) -> None:
    second = shards(copy)[1]
    names = list(load_file(second))
    second.unlink()
    message = refusal(copy)
    assert f"{second}: is missing, 1 of {len(shards(copy)) + 1} files are" in message
    assert f"puts {len(names)} tensors there, the first is '{sorted(names)[0]}'; download incomplete?" in message


def test_a_pipe_in_place_of_a_shard(copy: Path) -> None:
    second = shards(copy)[1]
    second.unlink()
    os.mkfifo(second)
    assert f"{second}: is not a regular file; put the safetensors file itself there" in refusal(copy)


def test_a_listed_tensor_that_is_in_no_shard(copy: Path) -> None:
    edit_index(copy, lambda weights: weights.update({"model.extra.weight": shards(copy)[0].name}))
    message = refusal(copy)
    assert f"'model.extra.weight' is said to be in {shards(copy)[0].name}, which does not hold it" in message
    assert message.startswith(str(copy / INDEX))


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "a.bin", "..\\x.safetensors"]
)
def test_names_that_leave_the_directory(copy: Path, name: str) -> None:
    shutil.copy(shards(copy)[0], copy.parent / "other.safetensors")
    edit_index(copy, lambda weights: weights.update({"model.norm.weight": name}))
    assert f"'model.norm.weight' is said to be in {name!r}, which is not a safetensors file of this" in refusal(copy)


def test_a_link_out_of_the_directory(copy: Path) -> None:
    first = shards(copy)[0]
    outside = first.rename(copy.parent / "outside.safetensors")
    first.symlink_to(outside)
    assert f"{first}: is a link to {outside}, outside the model's directory" in refusal(copy)


def test_a_link_within_the_directory_is_fine(copy: Path) -> None:
    first = shards(copy)[0]
    first.symlink_to(first.rename(copy / "renamed.data"))
    open_model(str(copy), copy).check()


def test_a_tensor_in_two_shards(copy: Path) -> None:
    first, second = shards(copy)[:2]
    name, tensor = next(iter(load_file(second).items()))
    save_file(load_file(first) | {name: tensor}, first)
    assert f"tensor {name!r} is also in {first.name}" in refusal(copy)


def test_a_stray_shard_and_a_stray_tensor_are_warned_about(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"x": torch.zeros(1)}, copy / "model-00099-of-00099.safetensors")
    first = shards(copy)[0]
    save_file(load_file(first) | {"model.stray": torch.zeros(1)}, first)
    open_model(str(copy), copy).check()
    assert "model-00099-of-00099.safetensors: not part of the model, ignored" in caplog.text
    assert "tensor 'model.stray' is not in the index, ignored" in caplog.text


@pytest.mark.parametrize("keep", [0, 1, 200])
def test_an_index_cut_in_the_middle(copy: Path, keep: int) -> None:
    (copy / INDEX).write_bytes((copy / INDEX).read_bytes()[:keep])
    assert f"{copy / INDEX}: not valid JSON" in refusal(copy)


@pytest.mark.parametrize("value", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"x": 1}}])
def test_an_index_without_a_map(copy: Path, value: Any) -> None:
    (copy / INDEX).write_text(json.dumps(value))
    assert "key 'weight_map' is not an object of file names; download incomplete?" in refusal(copy)


def test_shards_without_their_index(copy: Path) -> None:
    (copy / INDEX).unlink()
    assert f"but no {INDEX}; download incomplete?" in refusal(copy)


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "holds no model file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_companion(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert f"{copy / name}: is missing; download incomplete?" in refusal(copy)


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("pickle-was-run"),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_never_read(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for path in [*shards(copy), copy / INDEX]:
        path.unlink()
    (copy / name).write_bytes(pickle.dumps(Bomb()))
    assert f"holds weights only as pickles ({name}), which can run code" in refusal(copy)
    assert "which can run code" in refusal(copy / name)
    assert not (tmp_path / "pickle-was-run").exists()


def test_pickles_beside_safetensors_are_left_alone(copy: Path) -> None:
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    open_model(str(copy), copy).check()


@pytest.mark.parametrize("keep", [0, 5, 9, 60, -1, -3000])
def test_a_truncated_shard(copy: Path, keep: int) -> None:
    first = shards(copy)[0]
    first.write_bytes(first.read_bytes()[:keep])
    message = refusal(copy)
    assert message.startswith(str(first))
    assert "incomplete" in message
    if keep < 0:
        assert "tensor 'model." in message


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json}", b"", "header is not valid JSON"),
        (b"[" * 100_000, b"", "header is not valid JSON"),
        (b"\xff\xfe{}", b"", "header is not valid JSON"),
        ([1, 2], b"", "header is a JSON list"),
        (b'{"a": 1, "a": 2}', b"", "'a' appears twice in the header"),
        ({"a": 7}, b"", "tensor 'a' is described by a int"),
        ({"a": entry("F99")}, bytes(8), "tensor 'a' has dtype 'F99', which is not known"),
        ({"a": entry(["F32"])}, bytes(8), "tensor 'a' has dtype"),
        ({"a": entry(shape=[-2])}, bytes(8), r"tensor 'a' has shape \[-2\]"),
        ({"a": entry(shape=[True])}, bytes(8), "tensor 'a' has shape"),
        ({"a": entry(shape=[1] * 9)}, bytes(8), "tensor 'a' has shape"),
        ({"a": entry(offsets=[0])}, bytes(8), "two positions were expected"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), "needs 8 bytes, its data_offsets span -8"),
        ({"a": entry(shape=[3])}, bytes(8), "needs 12 bytes, its data_offsets span 8"),
        ({"a": entry(shape=[1 << 40, 1 << 40], offsets=[0, 8])}, bytes(8), "its data_offsets span 8"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12), "tensor 'b' overlaps the tensor before it"),
        ({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20), "tensor 'b' leaves a gap before it"),
        ({"a": entry()}, bytes(9), "1 bytes follow the last tensor"),
        ({"a": entry()}, bytes(7), r"tensor 'a' ends at byte \d+, the file has \d+; download incomplete\?"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        SafetensorsFile(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [1 << 63, 100_000_001, 1000])
def test_a_claimed_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelFileError, match="header"):
        SafetensorsFile(write(tmp_path / "x.safetensors", {}, length=length))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_file_by_the_library_reads_back(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "a": torch.ones(0), "c": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in file.tensors.items()} == {
        "a": ("F32", (0,)),
        "b": ("BF16", (2, 3)),
        "c": ("F32", ()),
    }
    assert file.data("b").tobytes() == tensors["b"].view(torch.uint8).numpy().tobytes()
