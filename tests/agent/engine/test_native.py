"""PyTorch's libraries beside other imports: which, in which order, and that the interpreter goes on meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman_agent.engine import native
from dragoman_agent.engine.native import TorchLibraries, torch_libraries

# Its constructor waits for a word that only the interpreter can write.
WAITS = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void wait_for_a_word(void) {
    char word;
    int pipe = open(getenv("A_PIPE"), O_RDONLY);
    if (read(pipe, &word, 1) != 1) abort();
}
"""
GOES_ON = """
import os, sys
from pathlib import Path
from dragoman_agent.engine.native import TorchLibraries
libraries = TorchLibraries([(Path(sys.argv[1]), os.RTLD_NOW)])
with open(os.environ["A_PIPE"], "wb") as pipe:
    pipe.write(b"x")
libraries.wait()
assert sys.argv[1] in Path("/proc/self/maps").read_text()
"""
PYTORCH = """
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from dragoman_agent.engine.native import TorchLibraries

def with_native_code():
    modules = sys.modules.values()
    return {m.__name__ for m in modules if isinstance(getattr(m, "__loader__", None), ExtensionFileLoader)}

libraries = TorchLibraries()
before = with_native_code()
import dragoman_agent.engine.process, dragoman_agent.engine.ahead, dragoman_agent.engine.config
import dragoman_agent.engine.serving
import dragoman_agent.device.precompile
import triton
assert with_native_code() - before == {"triton._C.libtriton"}, with_native_code() - before
libraries.wait()
assert "torch" not in sys.modules
mapped = Path("/proc/self/maps").read_text()
assert "libtorch_cpu.so" in mapped and "libtorch_python.so" not in mapped
import torch
assert ("libtorch_cuda.so" in mapped) == (torch.version.cuda is not None)
a = torch.arange(6.0).view(2, 3)
assert torch.equal(a @ a.T, torch.tensor([[5.0, 14.0], [14.0, 50.0]]))
try:
    torch.zeros(2) @ torch.zeros(3)
except RuntimeError as error:  # an exception that passes from one library through another
    print("told:", error)
"""


def python(script: str, *given: str, **environ: str) -> str:
    command = [sys.executable, "-c", script, *given]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(library: Path, source: str) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"], input=source.encode(), check=True)


def test_the_interpreter_goes_on_while_a_library_is_loaded(tmp_path: Path) -> None:
    library, pipe = tmp_path / "waits.so", tmp_path / "pipe"
    compiled(library, WAITS)
    os.mkfifo(pipe)
    python(GOES_ON, str(library), A_PIPE=str(pipe))


def test_pytorch_is_what_it_is_without_and_no_engine_module_waits_for_the_linker() -> None:
    assert "told: inconsistent tensor size" in python(PYTORCH)


def test_what_cannot_be_loaded_is_left_to_the_import_with_all_behind_it(tmp_path: Path) -> None:
    broken, behind = tmp_path / "broken.so", tmp_path / "behind.so"
    broken.write_text("no library")
    compiled(behind, "int nothing;")
    TorchLibraries([(broken, os.RTLD_NOW), (behind, os.RTLD_NOW)]).wait()
    assert str(behind) not in Path("/proc/self/maps").read_text()
    TorchLibraries([(behind, os.RTLD_NOW)]).wait()
    assert str(behind) in Path("/proc/self/maps").read_text()


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ModuleNotFoundError, match="msgpack"):
        TorchLibraries([])


def test_a_python_without_what_no_engine_needs_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lzma", "bz2"):
        monkeypatch.setitem(sys.modules, name, None)
    TorchLibraries([]).wait()


def test_the_order_is_that_of_the_import_and_without_pytorch_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(torch_libraries())
    names = [path.name for path, _ in found]
    assert all(path.exists() for path, _ in found)
    assert names[0] == "libtorch_global_deps.so" and names[-2:] == ["libtorch_cpu.so", "libtorch.so"]
    assert [bool(mode & os.RTLD_GLOBAL) for _, mode in found] == [True, *(False for _ in found[1:])]
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert list(torch_libraries()) == []
