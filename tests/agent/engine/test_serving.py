"""An engine that cannot start says why in one line, on its socket and in its log."""

from __future__ import annotations

import dataclasses
import gc
import logging
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dragoman_agent.device.base import DeviceError, LoadProgress
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine import serving
from dragoman_agent.engine.ahead import DeviceImport
from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.messages import Fatal, Ready, Shutdown, Step, Warmed
from dragoman_agent.engine.start_times import StartTimes

CONFIG = EngineConfig("null", "null", default_null_plan(NullModel(), num_blocks=16))


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (KeyError("layers.3"), "an unexpected KeyError: 'layers.3'; this is a fault of Dragoman"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "the Python module 'torch' is missing"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_failed_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, part: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(serving, "build_core", fail)
    ours, theirs = socket.socketpair()
    with ours, theirs, caplog.at_level(logging.INFO):
        assert serving.serve(theirs, CONFIG, StartTimes()) == 1
        messages = FrameDecoder().feed(ours.recv(1 << 20))
    fatal = messages[-1]
    assert isinstance(fatal, Fatal)
    assert part in fatal.message
    assert "\n" not in fatal.message
    assert part in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("capability", ["9.0", ""])
def test_kernels_are_compiled_ahead_of_the_device_and_waited_for_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    seen: list[str] = []

    class Workers:
        def wait(self) -> None:
            seen.append("waited")

        def close(self) -> None:
            seen.append("closed")

    class Library:
        kind = "cuda"

        def wait(self) -> None:
            seen.append("library")

        def wait_for_launches(self) -> None:
            seen.append("lookups")

    class Device(NullDevice):
        def load(self, model: Any, plan: Any, progress: Any) -> None:
            seen.append("weights")
            super().load(model, plan, lambda _: None)
            for done in range(4):
                progress(LoadProgress("warmup", done, 3, "steps"))
            seen.append("first step")

    def start(model: Any, plan: Any, wanted: str) -> Workers:
        seen.append(f"compile for {wanted}")
        return Workers()

    monkeypatch.setattr("dragoman_agent.device.precompile.start_compilers", start)
    made = bool(capability)
    monkeypatch.setattr(
        "dragoman_agent.device.cuda_context.open_context", lambda index: seen.append(f"context {index}") or made
    )
    monkeypatch.setattr(serving, "open_device", lambda *_, **__: Device())
    monkeypatch.setattr(serving, "open_source", lambda *_: NullModel())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        device, _ = serving.load(
            serving.Connection(theirs),
            dataclasses.replace(CONFIG, device="cuda", capability=capability),
            StartTimes(),
            cast(DeviceImport, Library()),
        )
        device.close()
        *_, ready = FrameDecoder().feed(ours.recv(1 << 20))
    assert isinstance(ready, Ready)
    parts = ready.info["start_seconds"]
    assert list(parts)[:2] == ["model files", "device library"] and list(parts)[-1] == "first step"
    assert all(seconds >= 0 for seconds in parts.values())
    assert list(ready.info["start_moments"]) == ["context"] * made
    if not capability:
        assert seen == ["context 0", "library", "weights", "lookups", "first step"] and "kernels" not in parts
        return
    assert seen == [
        "compile for 9.0", "context 0", "library", "weights", "lookups", "waited", "first step", "closed",
    ]  # fmt: skip
    assert list(parts)[2:-1] == ["memory", "kernels", "first launches", "graphs", "timed steps"]


def test_the_collector_is_on_again_once_the_device_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process turns it off until all is imported; requests leave cycles behind that nothing else would free."""
    seen: list[bool] = []

    class Device(NullDevice):
        def load(self, *given: Any) -> None:
            seen.append(gc.isenabled())
            super().load(*given)

    monkeypatch.setattr(serving, "open_device", lambda *_, **__: Device())
    ours, theirs = socket.socketpair()
    gc.disable()
    try:
        with ours, theirs:
            device, _ = serving.load(serving.Connection(theirs), CONFIG, StartTimes())
            device.close()
        assert seen == [True] and gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_workers_end_with_a_start_whose_device_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    workers = SimpleNamespace(close=lambda: seen.append("closed"))

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("no device here")

    monkeypatch.setattr("dragoman_agent.device.precompile.start_compilers", lambda *_: workers)
    monkeypatch.setattr("dragoman_agent.device.cuda_context.open_context", lambda index: False)
    monkeypatch.setattr(serving, "open_device", fail)
    monkeypatch.setattr(serving, "open_source", lambda *_: NullModel())
    config = dataclasses.replace(CONFIG, device="cuda", capability="9.0")
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(DeviceError, match="no device here"):
        serving.load(serving.Connection(theirs), config, StartTimes())
    assert seen == ["closed"]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_device_leaves_for_later_only_what_compiles_nothing(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """A part that compiles would take seconds, and who asks meanwhile would wait for it."""
    seen: list[bool] = []

    class Device(NullDevice):
        prepares_later = False
        info: dict[str, Any] = {"road": "x"}  # noqa: RUF012

        def load(self, model: Any, plan: Any, progress: Any) -> None:
            super().load(model, plan, lambda _: None)
            progress(LoadProgress("warmup", 0, 1, "steps"))
            seen.append(self.prepares_later)

        def prepare(self) -> bool:
            self.info = {"road": "x", "decode_steps": [[1, 2, 0.5]]}
            return False

    workers = SimpleNamespace(wait=lambda: compiled, close=lambda: None)
    monkeypatch.setattr("dragoman_agent.device.precompile.start_compilers", lambda *_: workers)
    monkeypatch.setattr(serving, "open_device", lambda *_, **__: Device())
    monkeypatch.setattr(serving, "open_source", lambda *_: NullModel())
    config = dataclasses.replace(CONFIG, device="cuda", capability="9.0")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=serving.serve, args=(theirs, config, StartTimes()))
        thread.start()
        decoder, messages = FrameDecoder(), []
        last = Warmed if compiled else Step  # a tick
        while not any(isinstance(message, last) for message in messages):
            messages += decoder.feed(ours.recv(1 << 20))
        ours.sendall(encode(Shutdown()))
        thread.join(10)
    assert not thread.is_alive() and seen == [compiled]
    (ready,) = [message for message in messages if isinstance(message, Ready)]
    assert ready.info["prepares_later"] is compiled and "decode_steps" not in ready.info
    assert [m.info for m in messages if isinstance(m, Warmed)] == (
        [{"decode_steps": [[1, 2, 0.5]]}] if compiled else []
    )
