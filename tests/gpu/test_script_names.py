"""Every name of ours that a script of tests/gpu or benchmarks imports is there: most of them run on a GPU machine alone, and seldom."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted(ROOT.glob("tests/gpu/[!t]*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
OURS = ("benchmarks", "clients", "tests")
SIBLINGS = {path.stem for path in SCRIPTS if not (ROOT / path.stem).is_dir()}  # found where a script lies, as it is run


def imported(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what a script imports from us, also inside its functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def problems(text: str) -> list[str]:
    """The names that are not there."""
    found = []
    for module, name in imported(text):
        top = module.partition(".")[0]
        if top in SIBLINGS:
            found += [] if name in own_names(ROOT / "tests" / "gpu" / f"{top}.py") else [f"{module}.{name}"]
        elif top.startswith("dragoman") or top in OURS:
            made = importlib.import_module(module)
            if name and not hasattr(made, name):
                try:
                    importlib.import_module(f"{module}.{name}")
                except ImportError:
                    found.append(f"{module}.{name}")
    return found


def own_names(path: Path) -> set[str]:
    """What a script that is not imported here defines itself; nothing of a file that is not there."""
    if not path.exists():
        return set()
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_names_are_there(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-"])
    assert problems(script.read_text()) == []


def test_a_name_that_is_gone_is_found() -> None:
    gone = "from benchmarks.gpu_setup import surroundings\nfrom engine_gpu import environment\nfrom check_parity import hf_model"
    assert problems(gone) == ["benchmarks.gpu_setup.surroundings", "engine_gpu.environment"]
    assert problems("def f():\n    from dragoman_agent.device.cuda import Tuda") == ["dragoman_agent.device.cuda.Tuda"]
