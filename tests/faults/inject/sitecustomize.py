"""Found by each Python process that has this folder on its path: makes an engine on the null device fail when told to.

FAULT_TRIGGER names a file. While it holds `nan BYTE`, the logits of prompts that begin with BYTE are not finite; once it
holds `oom`, it is removed and the next step finds no memory. With FAULT_DEVICE=cuda, `sticky` makes a kernel of the engine's
own CUDA context write to address 0: an error that stays with the context until its process ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

_FAULTING_KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry fault() {
    .reg .b64 %address;
    .reg .b32 %value;
    mov.u64 %address, 0;
    mov.u32 %value, 1;
    st.global.u32 [%address], %value;
    ret;
}
"""


def _install_sticky(trigger: Path) -> None:
    from dragoman_agent.device.cuda import CudaDevice

    submit = CudaDevice.submit

    def failing(device: CudaDevice, *arguments: Any) -> Any:
        if trigger.exists() and trigger.read_text() == "sticky":
            trigger.unlink()
            _launch_fault()
        return submit(device, *arguments)

    CudaDevice.submit = failing  # type: ignore[method-assign]


def _launch_fault() -> None:
    """Through the driver, which compiles PTX by itself. Raises RuntimeError where it does not come to a launch."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function, text = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(_FAULTING_KERNEL)
    one, none = ctypes.c_uint(1), ctypes.c_void_p()
    steps = (
        ("cuModuleLoadData", lambda: driver.cuModuleLoadData(ctypes.byref(module), text)),
        ("cuModuleGetFunction", lambda: driver.cuModuleGetFunction(ctypes.byref(function), module, b"fault")),
        ("cuLaunchKernel", lambda: driver.cuLaunchKernel(function, *[one] * 6, ctypes.c_uint(0), none, none, none)),
    )
    for name, call in steps:
        if code := call():
            raise RuntimeError(f"the faulting kernel could not be made: {name} gave {code}")


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
    (_install_sticky if os.environ.get("FAULT_DEVICE") == "cuda" else _install)(Path(os.environ["FAULT_TRIGGER"]))
