"""The GPU backend's code under Triton's interpreter, with graphs and timed steps left for after the load. Run by test_cuda_prepare.py.

Prints JSON: the tokens of requests that come before, between and after the parts, with those of a device that left nothing, and more.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import numpy as np
import torch
from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.steps import Part, step_of
from tests.agent.device.conformance.subjects import TinyModel, interpreted_subject

from dragoman_agent.device import warm_up
from dragoman_agent.device.base import DeviceError, DeviceMemoryError, LoadProgress
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Delta, Sampling, Start, Stop
from dragoman_text import TextTokenizer
from dragoman_text.tokenizer import byte_tokenizer_files

warm_up.TIMED_CONTEXTS, warm_up.TIMED_BATCHES = (40,), (4,)  # as small as the model
PLAN = replace(interpreted_subject().plan, graph_batch_sizes=(1, 2, 4), mixed_graph_tokens=(4, 12), chunk_graph=False)
PROMPT = np.random.default_rng(3).integers(1, 60, 20).tolist()  # a page and more, which requests that come later share


def opened(*, later: bool) -> tuple[InterpretedDevice, list[LoadProgress]]:
    """The device is told when it reports its first step, as the engine does once kernels are compiled."""
    device, told = InterpretedDevice(), []

    def report(progress: LoadProgress) -> None:
        if progress.phase == "warmup":
            device.prepares_later = later
        told.append(progress)

    device.load(TinyModel(), PLAN, report)
    return device, told


class Service:
    """An engine on a device; its tokens by request."""

    def __init__(self, device: InterpretedDevice) -> None:
        tokenizer = TextTokenizer.from_files(byte_tokenizer_files())
        self.core = EngineCore(device, tokenizer, b"0" * 32, PLAN, vocab_size=TinyModel().config.vocab_size)
        self.tokens: dict[str, list[int]] = {}

    def ask(self, *requests: tuple[str, list[int], float]) -> None:
        """Requests by id, what follows the shared prompt, and temperature."""
        commands = [
            Start(name, PROMPT + more, Sampling(temperature=warmth, seed=5), Stop(max_output_tokens=3), credit=99)
            for name, more, warmth in requests
        ]
        for event in run_all(self.core, commands):
            if isinstance(event, Delta):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)


def conversation(device: InterpretedDevice) -> dict[str, Any]:
    """Requests between the parts, while there are any; the blocks that others hold must stay as they are."""
    service = Service(device)
    service.ask(("before", [], 0.0), ("drawn before", [7], 0.9))
    num_parts, is_left, written = 0, device.prepares_later, 0
    while is_left:
        held = device._cache.keys[:, 1:].clone(), device._cache.values[:, 1:].clone()
        is_left = device.prepare()
        num_parts += 1
        now = device._cache.keys[:, 1:], device._cache.values[:, 1:]
        written += sum(not torch.equal(a, b) for a, b in zip(held, now, strict=True))
        if num_parts == 1:
            service.ask(("between", [], 0.0), ("with others", [8, 9], 0.9))
    if not num_parts:
        service.ask(("between", [], 0.0), ("with others", [8, 9], 0.9))
    service.ask(("after", [], 0.0), ("drawn after", [7], 0.9))
    return {"tokens": service.tokens, "parts": num_parts, "written": written}


def refused(device: InterpretedDevice) -> list[str]:
    """A part while the newest step waits for its sampling; then how it ends without memory, and that steps run on."""
    step = step_of([Part([5], 3, [1]), Part([6], 3, [2])], PLAN.page_size)
    expected = device.submit(step).result().token_ids.tolist()
    words = []
    waiting = device.submit(replace(step, sampling_follows=True))
    try:
        device.prepare()
    except DeviceError as error:
        words.append(str(error))
    waiting.supply(step.sampling)
    capture, device._runtime.capture = device._runtime.capture, no_room  # type: ignore[method-assign, assignment]
    try:
        device.prepare()
    except DeviceMemoryError as error:
        words.append(str(error))
    device._runtime.capture = capture  # type: ignore[method-assign]
    words.append(f"taken: {waiting._outcome is not None}")  # before its words were written over
    words.append(f"same: {device.submit(step).result().token_ids.tolist() == expected}")
    words.append(f"more: {device.prepare()}")
    return words


def no_room(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")


def main() -> None:
    """Both devices, then one that finds no memory."""
    whole, whole_told = opened(later=False)
    later, later_told = opened(later=True)
    at_load = {name: later.info[name] for name in ("graph_batch_sizes", "mixed_graph_tokens", "decode_steps")}
    shown = {
        "whole": conversation(whole), "later": conversation(later), "at_load": at_load,
        "told": [whole_told[-1].total, later_told[-1].total],
        "info": [{name: device.info[name] for name in (*at_load, "mixed_step_seconds")} for device in (whole, later)],
    }  # fmt: skip
    shown["refused"] = refused(opened(later=True)[0])
    for device in (whole, later):
        device.close()
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
