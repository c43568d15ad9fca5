"""Which safetensors files of a directory make up a model, each checked to be there, whole and inside the directory."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import read_json
from dragoman_agent.model.safetensors_file import SafeTensor, SafetensorsFile

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
PICKLE_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_INCOMPLETE: Final = "download incomplete? Fetch the model again"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shards:
    """The files of one model, by name, and the file each tensor is in."""

    files: dict[str, SafetensorsFile]
    file_of: dict[str, str]
    warnings: tuple[str, ...]

    def find(self, name: str) -> tuple[SafetensorsFile, SafeTensor]:
        """File and place of a tensor. Raises KeyError."""
        file = self.files[self.file_of[name]]
        return file, file.tensors[name]


def open_shards(directory: Path) -> Shards:
    """Open a directory's safetensors files; headers are read, weights are not.

    Raises ModelFileError: no such files, only pickles, an index that names missing, unsafe or contradicting files,
    a damaged file. Files that no index names are warned about.
    """
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    index = directory / INDEX_NAME
    if index.exists():
        weight_map = _weight_map(index)
        wanted = sorted(set(weight_map.values()))
        _check_present(index, weight_map, directory)
    else:
        weight_map = None
        wanted = [_single_name(directory, names)]
    files = {name: SafetensorsFile(_inside(directory, name)) for name in wanted}
    warnings = [f"{directory / name}: not part of the model, ignored" for name in names if name not in files]
    file_of = _file_of(files)
    if weight_map is not None:
        _check_listed(index, weight_map, files)
        unlisted = sorted(file_of.keys() - weight_map.keys())
        warnings += [f"{files[file_of[name]].path}: tensor {name!r} is not in the index, ignored" for name in unlisted]
        file_of = weight_map
    for warning in warnings:
        _log.warning("%s", warning)
    return Shards(files, file_of, tuple(warnings))


def holds_safetensors(directory: Path) -> bool:
    """Whether a directory has safetensors files or an index of some."""
    return (directory / INDEX_NAME).exists() or any(directory.glob("*.safetensors"))


def refuse_pickles(directory: Path) -> None:
    """Raise ModelFileError when a directory has weights only in files whose loading runs code."""
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelFileError(
            directory,
            f"holds weights only as pickles ({', '.join(pickles[:3])}), which can run code when loaded and are never read",
            "fetch the safetensors files, or convert the model to safetensors",
        )


def _weight_map(index: Path) -> dict[str, str]:
    value: Any = read_json(index).get("weight_map")
    if not isinstance(value, dict) or not value or not all(isinstance(name, str) for name in value.values()):
        raise ModelFileError(index, "key 'weight_map' is not an object of file names", _INCOMPLETE)
    return value


def _check_present(index: Path, weight_map: dict[str, str], directory: Path) -> None:
    for tensor, name in weight_map.items():
        if name != Path(name).name or name.startswith(".") or "\\" in name or not name.endswith(".safetensors"):
            raise ModelFileError(
                index,
                f"tensor {tensor!r} is said to be in {name!r}, which is not a safetensors file of this directory",
                "do not use this model; fetch it from its publisher",
            )
    counts = Counter(weight_map.values())
    missing = sorted(name for name in counts if not (directory / name).exists())
    if missing:
        first = next(tensor for tensor, name in weight_map.items() if name == missing[0])
        raise ModelFileError(
            directory / missing[0],
            f"is missing, {len(missing)} of {len(counts)} files are; the index puts {counts[missing[0]]} tensors there, "
            f"the first is {first!r}",
            _INCOMPLETE,
        )


def _single_name(directory: Path, names: list[str]) -> str:
    if SINGLE_NAME in names:
        return SINGLE_NAME
    if not names:
        raise ModelFileError(directory, "holds no safetensors file", "check the path")
    if len(names) > 1 or "-of-" in names[0]:
        raise ModelFileError(
            directory, f"holds {len(names)} safetensors files ({names[0]} first) but no {INDEX_NAME}", _INCOMPLETE
        )
    return names[0]


def _inside(directory: Path, name: str) -> Path:
    """The file's path, unless a link leads out of the directory.

    A download cache keeps `snapshots/REVISION/NAME` as links into the `blobs` folder beside `snapshots`; those are
    followed.
    """
    root, target = directory.resolve(), (directory / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if target.parent != root and target.parent != blobs:
        raise ModelFileError(
            directory / name,
            f"is a link to {target}, outside the model's directory",
            "put the file itself there, or give the directory that holds it",
        )
    return directory / name


def _file_of(files: dict[str, SafetensorsFile]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for name, file in files.items():
        for tensor in file.tensors:
            if tensor in file_of:
                raise file.fail(f"tensor {tensor!r} is also in {file_of[tensor]}", "fetch the model again")
            file_of[tensor] = name
    return file_of


def _check_listed(index: Path, weight_map: dict[str, str], files: dict[str, SafetensorsFile]) -> None:
    absent = [tensor for tensor, name in weight_map.items() if tensor not in files[name].tensors]
    if absent:
        raise ModelFileError(
            index,
            f"tensor {absent[0]!r} is said to be in {weight_map[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors)",
            _INCOMPLETE,
        )
