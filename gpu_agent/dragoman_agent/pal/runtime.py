"""Does the installed torch fit the installed driver? Read from torch's version file: importing it would take seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dragoman_agent.pal import troubles
from dragoman_cli.failure import pip_install

# First driver release for each CUDA major version on Linux (CUDA release notes, "minor version compatibility").
_RELEASES = {11: 450, 12: 525, 13: 580}
_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_NO_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*None", re.MULTILINE)
_OTHER_LINE = re.compile(r"^(hip|xpu)\b[^=]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)

TORCH_FOR = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel GPUs (XPU)"}


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the installed torch was built for: `cuda` is "13.0", "" for none, None where it cannot be told.

    `hip` and `xpu` are the versions of other makers' libraries, empty for none.
    """

    cuda: str | None
    hip: str = ""
    xpu: str = ""

    @property
    def other_kind(self) -> str:
        """The kind of a maker's cards other than NVIDIA's that torch was built for; empty for none."""
        return "hip" if self.hip else "xpu" if self.xpu else ""

    @property
    def built_for(self) -> str:
        """In words."""
        if self.other_kind:
            return f"{TORCH_FOR[self.other_kind]} {self.hip or self.xpu}"
        return f"CUDA {self.cuda}" if self.cuda else "no GPU"


def installed_runtime() -> Runtime:
    """The torch that this interpreter would import."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return Runtime(None)
    try:
        return runtime_of(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        return Runtime(None)


def runtime_of(version_file: str) -> Runtime:
    """From the text of torch's version.py."""
    others = dict(_OTHER_LINE.findall(version_file))
    return Runtime(cuda_of(version_file), others.get("hip", ""), others.get("xpu", ""))


def cuda_of(version_file: str) -> str | None:
    """The CUDA version in the text of torch's version.py; "" where it says there is none, None where it says nothing."""
    match = _CUDA_LINE.search(version_file)
    if match:
        return match[1]
    return "" if _NO_CUDA_LINE.search(version_file) else None


def driver_problem(runtime: Runtime, driver_version: str) -> str:
    """Why this torch cannot run on a driver that supports CUDA `driver_version`; empty when it can.

    Within one major version a newer torch runs on an older driver; across major versions it does not.
    """
    if runtime.cuda is None:
        return ""
    if not runtime.cuda:
        return troubles.TORCH_WITHOUT_CUDA.text(pip_install=pip_install())
    have, need = (int(version.partition(".")[0] or 0) for version in (driver_version, runtime.cuda))
    if have >= need:
        return ""
    release = _RELEASES.get(need, max(_RELEASES.values()))
    return troubles.DRIVER_TOO_OLD.text(have=driver_version, need=runtime.cuda, release=release, major=have)
