"""An engine that cannot start says why in one line, on its socket and in its log."""

from __future__ import annotations

import logging
import socket

import pytest

from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine import serving
from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.engine.messages import Fatal, FrameDecoder

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
        assert serving.serve(theirs, CONFIG) == 1
        messages = FrameDecoder().feed(ours.recv(1 << 20))
    fatal = messages[-1]
    assert isinstance(fatal, Fatal)
    assert part in fatal.message
    assert "\n" not in fatal.message
    assert part in caplog.text
    assert "Traceback" not in caplog.text
