"""What the GPU backend's host does for a decode step, counted under Triton's interpreter. Run by test_step_calls.py."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import numpy as np
from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.subjects import interpreted_subject
from tests.agent.device.conformance.tiny_model import TinyModel

from dragoman_agent.device import checks
from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.warm_up import decode_batch


def counted(owner: Any, name: str, calls: Counter[str]) -> None:
    """Let `owner.name` count its calls."""
    whole: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        calls[name] += 1
        return whole(*arguments)

    setattr(owner, name, call)


def behind(batch: StepBatch) -> StepBatch:
    """A token further in the same pages."""
    one = np.int32(1)
    return replace(
        batch, step=batch.step + 1, positions=batch.context_lens, context_lens=batch.context_lens + one,
        slot_mapping=batch.slot_mapping + one, sampling=replace(batch.sampling, cursors=batch.sampling.cursors + one),
    )  # fmt: skip


def main() -> None:
    """Print how often each was called for steps of these kinds."""
    plan = interpreted_subject().plan
    device: Any = InterpretedDevice()
    model: Any = TinyModel()
    device.load(model, plan, lambda _: None)
    calls: Counter[str] = Counter()
    for owner, name in (
        (device._runtime, "on"), (device._runtime, "stay_on"), (device, "_draw_others"), (checks, "_sound_decode"),
    ):  # fmt: skip
        counted(owner, name, calls)
    shown = {}

    def run(what: str, batch: StepBatch) -> StepBatch:
        calls.clear()
        handle = device.submit(batch)
        if batch.sampling_follows:
            handle.supply(batch.sampling)
        handle.result()
        shown[what] = dict(calls)
        return batch

    batch = run("first", decode_batch(plan, 2, plan.page_size // 2))
    batch = run("next", behind(batch))
    ones, halves = np.ones(2, np.int32), np.full(2, 0.5, np.float32)
    asking: tuple[tuple[str, Any], ...] = (
        ("top_ks", ones), ("top_ps", halves), ("min_ps", halves), ("num_logprobs", ones),
        ("temperatures", np.zeros(2, np.float32)),
    )  # fmt: skip
    for name, asked in asking:
        run("as before", batch)
        other = replace(batch, sampling=replace(batch.sampling, **{name: asked}))
        run(name, other)
        run(f"{name} again", other)
        run(f"without {name}", batch)
    run("edited", replace(batch, sampling=replace(batch.sampling, banned={0: np.array([3], np.int32)})))
    run("without edits", batch)
    run("late", replace(behind(batch), sampling_follows=True))
    device.close()
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
