"""The engine on the GPU backend's code under Triton's interpreter, whose allocator fails now and then. Run by test_cuda_memory.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import numpy as np
import torch
from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.subjects import TinyModel, interpreted_subject

from dragoman_agent.device.base import DeviceError, DeviceMemoryError
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Delta, Embedded, Sampling, Start, StartEmbed, Stop
from dragoman_text import TextTokenizer
from dragoman_text.tokenizer import byte_tokenizer_files


def failing(device: Any, name: str, calls: set[int], *, after: bool) -> list[int]:
    """Let `device.name` find no memory in these of its calls, before or after its work. The calls that were made."""
    whole: Callable[..., Any] = getattr(device, name)
    made: list[int] = []

    def call(*arguments: Any) -> Any:
        made.append(len(made))
        if made[-1] in calls and not after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")
        result = whole(*arguments)
        if made[-1] in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")
        return result

    setattr(device, name, call)
    return made


def answers(inject: Callable[[Any], list[int]] | None) -> dict[str, Any]:
    """What two streams, one of them with edited logits, and two embeddings give."""
    subject = interpreted_subject()
    device = InterpretedDevice()
    model = TinyModel()
    device.load(model, subject.plan, lambda _: None)
    made = inject(device) if inject is not None else [0]
    tokenizer = TextTokenizer.from_files(byte_tokenizer_files())
    core = EngineCore(device, tokenizer, b"0" * 32, subject.plan, vocab_size=model.config.vocab_size)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 50, count).tolist() for count in (5, 20, 9, 30)]
    stop = Stop(max_output_tokens=8)
    commands: list[Any] = [
        Start("greedy", prompts[0], Sampling(temperature=0.0), stop, credit=1000),
        Start("drawn", prompts[1], Sampling(temperature=0.9, top_p=0.8, seed=3, num_logprobs=2), stop, credit=1000),
        *(StartEmbed(f"vector{i}", ids) for i, ids in enumerate(prompts[2:])),
    ]
    found: dict[str, Any] = {}
    for event in run_all(core, commands):
        if isinstance(event, Delta):
            found.setdefault(event.request_id, []).extend(event.token_ids)
        elif isinstance(event, Embedded):
            found[event.request_id] = np.frombuffer(event.values, "<f4").round(4).tolist()
    assert made, "nothing was injected"
    assert core.scheduler.pool.num_free == subject.plan.num_blocks - 1
    device.close()
    return found


def what_is_raised() -> str:
    """By a step and by a copy."""
    subject = interpreted_subject()
    device = InterpretedDevice()
    device.load(TinyModel(), subject.plan, lambda _: None)
    failing(device, "_mixed_step", {0}, after=False)
    words = []
    from dragoman_agent.device.warm_up import warm_up_batch

    try:
        device.submit(warm_up_batch(subject.plan.page_size, 0, 8))
    except DeviceMemoryError as error:
        words.append(str(error))
    device.submit(warm_up_batch(subject.plan.page_size, 0, 8)).result()
    torch_blocks = sys.modules["dragoman_agent.device.torch_blocks"]
    failing(torch_blocks, "read_blocks", {0}, after=False)
    try:
        device.read_blocks(np.array([1], np.int32))
    except DeviceError as error:
        words.append(f"{type(error).__name__}: {error}")
    device.close()
    return " | ".join(words)


def what_the_driver_says() -> list[str]:
    """Errors of Triton's launcher and of cuBLAS, which are RuntimeErrors, and what a step makes of them."""
    from dragoman_agent.device.warm_up import decode_batch

    subject = interpreted_subject()
    device = InterpretedDevice()
    device.load(TinyModel(), subject.plan, lambda _: None)
    raised = []
    for text in (
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ):
        with mock.patch.object(device, "_fill_decode", side_effect=RuntimeError(text)):
            try:
                device.submit(decode_batch(subject.plan, 2, 5))
            except DeviceError as error:
                raised.append(f"{type(error).__name__}: {error}")
    device.submit(decode_batch(subject.plan, 2, 5)).result()
    device.close()
    return raised


def main() -> None:
    """Print what came of it."""

    def inject(device: Any) -> list[int]:
        """After a prefill's kernels, and behind a step under way."""
        failing(device, "_mixed_step", {1}, after=True)
        return failing(device, "_fill_decode", {1}, after=False)

    expected = answers(None)
    is_equal = answers(inject) == expected
    print(
        json.dumps(
            {
                "equal": is_equal,
                "num": len(expected),
                "raised": what_is_raised(),
                "driver": what_the_driver_says(),
            }
        )
    )


if __name__ == "__main__":
    main()
