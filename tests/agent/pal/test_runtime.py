"""The installed torch against the installed driver, read without importing torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dragoman_agent.pal.runtime import Runtime, cuda_of, driver_problem, installed_runtime


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ('cuda = "12.8"\n', "12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", ""),
        ("__version__ = '9'\n", None),
        ("", None),
    ],
)
def test_version_file(text: str, cuda: str | None) -> None:
    assert cuda_of(text) == cuda


@pytest.mark.parametrize(
    ("need", "have", "words"),
    [
        ("13.0", "13.0", ""),
        ("13.1", "13.0", ""),  # minor versions of one major version go together
        ("12.8", "13.0", ""),
        ("13.0", "12.9", "to release 580 or newer, or install a torch that was built for CUDA 12"),
        ("12.1", "11.8", "to release 525 or newer"),
        ("", "13.0", "the installed torch was built without CUDA"),
        (None, "11.4", ""),
    ],
)
def test_driver(need: str | None, have: str, words: str) -> None:
    problem = driver_problem(Runtime(need), have)
    assert words in problem
    assert bool(words) == bool(problem)


def test_the_installed_torch_agrees_with_itself_and_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from dragoman_agent.pal.runtime import installed_runtime\n"
        "print(installed_runtime().cuda, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    cuda, imported = done.stdout.split()
    assert imported == "False"
    import torch

    assert cuda == (torch.version.cuda or "")
    assert installed_runtime().cuda == cuda
