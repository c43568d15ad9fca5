"""Imports a device's library before it is known what it is to do: GPU libraries take seconds, and planning takes long too."""

from __future__ import annotations

import importlib
import threading

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
        # Not a daemon: an interpreter that ends in the middle of a library's import can crash.
        self._thread = threading.Thread(target=self._run, name="device-import")
        self._thread.start()

    def wait(self) -> None:
        """Until it is done. Raises what the import raised: a second try of a broken library fails for another reason."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            importlib.import_module(f"dragoman_agent.device.{self.kind}")
        except Exception as error:  # told by `wait`, where it is known whether the device is the one to use
            self._error = error
