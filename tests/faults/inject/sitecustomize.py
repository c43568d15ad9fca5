"""Found by each Python process that has this folder on its path: makes an engine on the null device fail when told to.

FAULT_TRIGGER names a file. While it holds `nan BYTE`, the logits of prompts that begin with BYTE are not finite; once it
holds `oom`, it is removed and the next step finds no memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _install(trigger: Path) -> None:
    from dragoman_agent.device.base import StepBatch
    from dragoman_agent.device.null import NullDevice, NullStepHandle

    submit = NullDevice.submit

    def failing(device: NullDevice, batch: StepBatch) -> NullStepHandle:
        handle = submit(device, batch)
        if not trigger.exists():
            return handle
        kind, _, argument = trigger.read_text().partition(" ")
        if kind == "oom":
            trigger.unlink()
            raise MemoryError("no memory for the workspace of this step (injected)")
        for row, sequence in enumerate(batch.sample_seqs.tolist()):
            first_slot = int(batch.block_tables[sequence, 0]) * device._page_size
            if device._tokens[first_slot] == int(argument):
                handle._result.finite[row] = False
        return handle

    NullDevice.submit = failing  # type: ignore[method-assign]


if "dragoman_agent.engine.process" in sys.orig_argv and "FAULT_TRIGGER" in os.environ:
    _install(Path(os.environ["FAULT_TRIGGER"]))
