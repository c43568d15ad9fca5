"""The check of the overlap on the null device: it passes, and tells of a device that is waited for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dragoman_agent.device.null import NullDevice

QUICK = ["--device", "null", "--batch", "8", "--tokens", "16", "--host-limit", "1"]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    path = Path(__file__).with_name("check_overlap.py")
    spec = importlib.util.spec_from_file_location("check_overlap", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.MIN_EARLY = 0.5  # this machine may be busy
    module.MAX_GAP = 0.5
    return module


def test_the_null_device_passes(check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([*QUICK, "--out", str(tmp_path)]) == 0
    assert sum(line.startswith("ok ") for line in capsys.readouterr().out.splitlines()) == 2 * len(check.KINDS)


def test_a_device_that_is_waited_for_is_told(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NullDevice, "samples_late", False)
    assert check.main([*QUICK, "--out", str(tmp_path)]) == 1
    off = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("OFF")}
    assert off == {"penalties:", "grammar:", "bad-words:"}
