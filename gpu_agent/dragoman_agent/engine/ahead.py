"""Imports a device's library before it is known what it is to do: GPU libraries take seconds, and planning takes long too.

What the first launch of a Triton kernel needs beside it goes on while the device is opened: a digest of Triton's files, by which it
finds its binaries (0.35 s on a machine with an H200), and a module of its that it looks arguments up in (0.1 s).
"""

from __future__ import annotations

import importlib
import sys
import threading
from contextlib import suppress

from dragoman_agent.device import DEVICE_KINDS
from dragoman_agent.device.base import DeviceError


class DeviceImport:
    """The import of one device's module in a thread, begun now."""

    def __init__(self, kind: str) -> None:
        """Raises DeviceError for a kind this version does not have."""
        if kind not in DEVICE_KINDS:
            raise DeviceError(f"device {kind!r} is not one of {', '.join(DEVICE_KINDS)}; choose one of these")
        self.kind = kind
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

    def _run(self) -> None:
        try:
            importlib.import_module(f"dragoman_agent.device.{self.kind}")
        except Exception as error:  # told by `wait`, where it is known whether the device is the one to use
            self._error = error
        finally:  # whatever it raised: native code has exceptions of its own, for which nobody may wait for good
            self._imported.set()
        if self._error is None and "triton" in sys.modules:
            _prime_triton()


def _prime_triton() -> None:
    with suppress(Exception):  # another version has them elsewhere: the first launch does it itself, then
        importlib.import_module("triton.runtime.cache").triton_key()  # keeps what it returned
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
