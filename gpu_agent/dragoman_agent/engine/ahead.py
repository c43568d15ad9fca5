"""Imports a device's library before it is known what it is to do: GPU libraries take seconds, and planning takes long too.

What the first launch of a Triton kernel needs beside it goes on meanwhile: a module that it looks arguments up in (0.15 s on a machine
with an H200), a digest of Triton's files, by which it finds its binaries (0.35 s), and what other programs say of the system.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import suppress

from dragoman_agent.device import DEVICE_KINDS
from dragoman_agent.device.base import DeviceError
from dragoman_agent.engine.native import TorchLibraries


class DeviceImport:
    """The import of one device's module in a thread, begun now."""

    def __init__(
        self, kind: str, libraries: TorchLibraries | None = None, note: Callable[[str], None] = lambda _: None
    ) -> None:
        """`libraries`: that are being loaded, for a device whose kernels are Triton's. `note` is told when something is done.

        Raises DeviceError for a kind this version does not have.
        """
        if kind not in DEVICE_KINDS:
            raise DeviceError(f"device {kind!r} is not one of {', '.join(DEVICE_KINDS)}; choose one of these")
        self.kind = kind
        self._libraries, self._note = libraries, note
        self._error: Exception | None = None
        self._imported = threading.Event()
        # Not a daemon: an interpreter that ends in the middle of a library's import can crash.
        self._thread = threading.Thread(target=self._run, name="device-import")
        self._thread.start()

    def wait(self) -> None:
        """Until the device's module is there. Raises what the import raised: a second try of a broken library fails for another reason."""
        self._imported.wait()
        if self._error is not None:
            raise self._error

    def wait_for_launches(self) -> None:
        """Until also is there what a first launch looks up: one that came before would make it once more."""
        self._thread.join()

    def _run(self) -> None:
        lookups: threading.Thread | None = None
        try:
            if self._libraries is not None:
                # These need nothing of PyTorch: beside its libraries' constructors. First what has no native code, see `native`.
                importlib.import_module("dragoman_agent.device.precompile")
                importlib.import_module("triton")
                self._note("triton")
                lookups = threading.Thread(target=self._look_up, name="triton-lookups")
                lookups.start()
                if self._libraries.is_loading:
                    _import_lookups()
                self._libraries.wait()
                self._note("all but PyTorch and the device")
            importlib.import_module(f"dragoman_agent.device.{self.kind}")
            self._note("device")
        except Exception as error:  # told by `wait`, where it is known whether the device is the one to use
            self._error = error
        finally:  # whatever it raised: native code has exceptions of its own, for which nobody may wait for good
            self._imported.set()
        if lookups is not None:
            _import_lookups()  # beside the opening of the device, which waits for it now and then
            lookups.join()

    def _look_up(self) -> None:
        """Reading, hashing and waiting for a program need no interpreter: they go on beside imports. Triton keeps what each returned."""
        for module, name in (
            ("triton.runtime.build", "platform_key"),
            ("triton.backends.nvidia.driver", "library_dirs"),
            ("triton.runtime.cache", "triton_key"),
        ):
            # Another version has it elsewhere, or there is no driver: the first launch says so.
            with suppress(Exception):
                getattr(importlib.import_module(module), name)()
        self._note("look-ups")


def _import_lookups() -> None:
    # Another version has it elsewhere, or it is broken: the first launch imports what it wants.
    with suppress(Exception):
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
