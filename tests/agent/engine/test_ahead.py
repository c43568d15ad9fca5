"""A device's library that is imported ahead: done when waited for, and a failure is the import's own."""

from __future__ import annotations

import importlib
import sys

import pytest

from dragoman_agent.device.base import DeviceError
from dragoman_agent.engine.ahead import DeviceImport
from dragoman_agent.engine.native import TorchLibraries


def test_the_device_named_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(importlib, "import_module", seen.append)
    library = DeviceImport("cuda")
    library.wait()
    assert library.kind == "cuda" and seen[0] == "dragoman_agent.device.cuda"


def test_what_the_first_launch_looks_up_is_there_when_waited_for() -> None:
    cache = importlib.import_module("triton.runtime.cache")
    cache.triton_key.cache_clear()
    library = DeviceImport("cuda", TorchLibraries([]))
    library.wait()
    library.wait_for_launches()
    assert cache.triton_key.cache_info().currsize == 1 and "triton.experimental.gluon.nvidia.hopper" in sys.modules


@pytest.mark.parametrize("is_loading", [True, False])
def test_triton_is_imported_beside_pytorchs_libraries_and_the_device_behind_them(
    monkeypatch: pytest.MonkeyPatch, is_loading: bool
) -> None:
    """With what a first launch looks up where there is time for that, and else behind the device."""
    seen: list[str] = []

    class Libraries(TorchLibraries):
        is_loading = False

        def wait(self) -> None:
            super().wait()
            seen.append("libraries")

    monkeypatch.setattr(Libraries, "is_loading", is_loading)
    libraries, done = Libraries([]), list[str]()
    monkeypatch.setattr(importlib, "import_module", seen.append)
    library = DeviceImport("cuda", libraries, done.append)
    library._thread.join(60)
    assert set(done) == {"triton", "look-ups", "all but PyTorch and the device", "device"}
    looked_up = {
        "triton.runtime.build",
        "triton.backends.nvidia.driver",
        "triton.runtime.cache",
    }  # in a thread of their own
    assert looked_up < set(seen)
    assert seen[:2] == ["dragoman_agent.device.precompile", "triton"]
    module = ["triton.experimental.gluon.nvidia.hopper"]
    behind = [name for name in seen[2:] if name not in looked_up]
    assert behind == [*(module if is_loading else []), "libraries", "dragoman_agent.device.cuda", *module]


@pytest.mark.parametrize("is_loading", [True, False])
def test_what_cannot_be_looked_up_ahead_is_left_to_the_first_launch(
    monkeypatch: pytest.MonkeyPatch, is_loading: bool
) -> None:
    class Libraries(TorchLibraries):
        pass

    def imported(name: str) -> None:
        if name.startswith("triton."):
            raise AttributeError(f"{name} is another version's")

    monkeypatch.setattr(Libraries, "is_loading", is_loading)
    libraries = Libraries([])
    monkeypatch.setattr(importlib, "import_module", imported)
    library = DeviceImport("cuda", libraries)
    library.wait()  # raises what is wrong with the device alone
    library.wait_for_launches()


def test_without_libraries_nothing_more_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(importlib, "import_module", seen.append)
    library = DeviceImport("cpu")
    library._thread.join(60)
    assert seen == ["dragoman_agent.device.cpu"]


def test_a_broken_library_is_told_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(f"{name} needs torch", name="torch")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="needs torch"):
        DeviceImport("cuda").wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_import_that_ended_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class NativePanic(BaseException):
        pass

    def panic(name: str) -> None:
        raise NativePanic(name)

    monkeypatch.setattr(importlib, "import_module", panic)
    library = DeviceImport("cuda")
    library._thread.join(60)
    assert library._imported.is_set()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="not one of cpu, cuda"):
        DeviceImport("os.path")
