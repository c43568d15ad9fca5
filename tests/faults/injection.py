"""Faults inside an agent's processes: an engine that fails when told to, and a GPU that reports faults through a fake NVML."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"


class Injection:
    """What one agent's processes are told. Give `environ` to the agent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.trigger = folder / "trigger"
        self._nvml = folder / "nvml.json"
        self.report_xids()

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the agent."""
        path = os.pathsep.join(filter(None, (str(INJECT), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        return {
            "PYTHONPATH": path,
            "FAULT_TRIGGER": str(self.trigger),
            "DRAGOMAN_NVML_MODULE": "tests.fakes.nvml",
            "FAKE_NVML_STATE": str(self._nvml),
        }

    def run_out_of_memory(self) -> None:
        """The next step finds no memory."""
        self._put(self.trigger, "oom")

    def spoil(self, first_byte: int) -> None:
        """The logits of prompts that begin with this byte are not finite, until `heal`."""
        self._put(self.trigger, f"nan {first_byte}")

    def heal(self) -> None:
        """Nothing is wrong any more."""
        self.trigger.unlink(missing_ok=True)

    def report_xids(self, *xids: int) -> None:
        """The GPU reports these faults, each once."""
        self._put(self._nvml, json.dumps({"xids": xids}))

    def _put(self, path: Path, text: str) -> None:
        """At once, so that nobody reads half of it."""
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)
