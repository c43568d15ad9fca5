"""The engine inside the caller's process, without socket or process: for tests, and for the warm-up of the real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from dragoman_agent.device.base import Device
from dragoman_agent.engine.core import Command, EngineCore, StepTrace
from dragoman_agent.engine.events import Event
from dragoman_agent.engine.live_requests import Clock
from dragoman_agent.engine.messages import Failed, Sampling, Start, Step, Stop
from dragoman_agent.engine.tiers import TierSizes
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

WARM_UP_ID = "warm-up"


def build_core(
    device: Device,
    model: ModelSource,
    plan: Plan,
    clock: Clock = time.monotonic,
    tier_sizes: TierSizes | None = None,
    trace: StepTrace | None = None,
) -> EngineCore:
    """The core of a device that has loaded `model`. Raises DiskTierError when the directory of `tier_sizes` cannot be used."""
    tokenizer = TextTokenizer.from_files(model.tokenizer)
    digest, vocab_size = bytes.fromhex(model.digest), model.config.vocab_size
    return EngineCore(device, tokenizer, digest, plan, clock, vocab_size, tier_sizes=tier_sizes, trace=trace)


def run_all(
    core: EngineCore, commands: Iterable[Command] = (), *, on_step: Callable[[Step], None] | None = None
) -> list[Event]:
    """Feed `commands`, then turn until no request is live and nothing is left to say; all events in order.

    Raises RuntimeError when the engine stands still with live requests, such as one without credit.
    """
    for command in commands:
        core.receive(command)
    events: list[Event] = []
    while True:
        steps: list[Step] = []
        ran = core.turn(steps.append)
        for step in steps:
            events.extend(step.events)
            if on_step is not None:
                on_step(step)
        if not steps and not ran and not core.has_output:
            if core.is_compiling or (core.requests and core.is_moving):
                time.sleep(0.001)
                continue
            if core.requests:
                raise RuntimeError(f"no step can run but {len(core.requests)} requests are live")
            return events


def warm_up(core: EngineCore, prompt_ids: list[int]) -> None:
    """Run one request through the whole path. Raises RuntimeError when it fails, DeviceError when the device does."""
    stop = Stop(max_output_tokens=2)
    events = run_all(core, [Start(WARM_UP_ID, prompt_ids, Sampling(temperature=0.0), stop)])
    for event in events:
        if isinstance(event, Failed):
            raise RuntimeError(f"the first request failed: {event.message}")
