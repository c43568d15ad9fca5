"""An allocator that fails in a step of the GPU backend: the same answers, and the words of the error."""

from __future__ import annotations

import json

from tests.agent.device.apart import printed_by


def test_a_failed_allocation_costs_no_token_and_no_engine() -> None:
    """In a process of its own: Triton's interpreter is chosen when its kernels are imported."""
    shown = json.loads(printed_by("out_of_memory", OMP_NUM_THREADS="1"))
    assert shown["equal"] and shown["num"] == 4
    step, copy = shown["raised"].split(" | ")
    assert step == "a step of 8 tokens does not fit: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert copy.startswith("DeviceMemoryError: there is no room to move KV blocks: CUDA out of memory")
    fault, memory = shown["driver"]
    assert (
        fault == "DeviceError: Step 0 failed on the GPU: Triton Error [CUDA]: an illegal memory access was encountered"
    )
    assert memory.startswith(
        "DeviceMemoryError: a step of 2 tokens does not fit: CUDA error: CUBLAS_STATUS_ALLOC_FAILED"
    )
