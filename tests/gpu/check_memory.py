"""Memory that somebody else takes while a model serves on a GPU: steps that find none are tried smaller, no text changes, nobody dies.

PYTHONPATH=. python tests/gpu/check_memory.py [--model qwen3-0.6b] [--layers 6] [--leave-mib 96]      a line a part; exit 1 when one is off

A deterministic plan, whose bits hang on no chunk, without graphs for prompts, which would have their memory already. Another owner leaves
first some of what a whole step needs, then nothing, then gives all back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.card import usable_gpu
from tests.gpu.check_determinism import plan_of

from dragoman.v1 import error_pb2
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, Sampling, Start, Stop

LENGTHS = (1500, 37, 900, 2200, 64, 1800, 311, 1024)  # of prompts: together a step of thousands of tokens
NUM_TOKENS = 12
Answers = dict[str, list[int]]


class Owner(Protocol):
    """Somebody else who takes the device's memory."""

    def take(self, leave_bytes: int) -> None:
        """All that is free but so much."""

    def give_back(self) -> None:
        """What was taken."""


class Hog:
    """Takes it as one tensor of this process, which the allocator cannot have."""

    def __init__(self) -> None:
        self._held: Any = None

    def take(self, leave_bytes: int) -> None:
        """See Owner."""
        import torch

        self.give_back()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        self._held = torch.empty(max(free - leave_bytes, 1), dtype=torch.uint8, device="cuda")

    def give_back(self) -> None:
        """See Owner."""
        import torch

        self._held = None
        torch.cuda.empty_cache()


def ask(core: EngineCore, salt: str, lengths: Sequence[int]) -> tuple[Answers, list[Failed], int]:
    """Tokens by request, those that failed, and the most tokens that a step may have had at the least."""
    starts = [
        Start(f"{salt}{i}", [(i * 7919 + j * 31) % 240 + 10 for j in range(length)], Sampling(temperature=0.0),
              Stop(max_output_tokens=NUM_TOKENS), credit=1 << 30, cache_salt=salt)
        for i, length in enumerate(lengths)
    ]  # fmt: skip
    answers: Answers = {str(i): [] for i in range(len(lengths))}
    least = [core.scheduler.memory_limit.max_step_tokens]
    failed: list[Failed] = []
    for event in run_all(core, starts, on_step=lambda _: least.append(core.scheduler.memory_limit.max_step_tokens)):
        if isinstance(event, Delta):
            answers[event.request_id.removeprefix(salt)].extend(event.token_ids)
        elif isinstance(event, Failed):
            failed.append(event)
    return answers, failed, min(least)


def told(good: bool, text: str) -> bool:
    """Print a line."""
    print(f"{'ok ' if good else 'OFF'} {text}", flush=True)
    return good


def check(core: EngineCore, owner: Owner, leave_bytes: int, lengths: Sequence[int] = LENGTHS) -> int:
    """How many parts are off."""
    blocks = core.scheduler.pool.num_free
    wanted, failed, planned = ask(core, "w", lengths)
    good = [
        told(
            not failed and all(map(len, wanted.values())), f"with memory: {len(lengths)} answers of {NUM_TOKENS} tokens"
        )
    ]
    owner.take(leave_bytes)
    try:
        found, failed, least = ask(core, "s", lengths)
        text = f"with {leave_bytes >> 20} MiB: steps of {least} tokens in place of {planned}, {len(failed)} failed"
        # That steps became smaller is the proof that memory was short.
        good.append(
            told(not failed and found == wanted and least < planned, text + ", the same tokens" * (found == wanted))
        )
        owner.take(0)
        found, failed, _ = ask(core, "n", lengths)
        reasons = {event.reason for event in failed}
        right = [name for name in wanted if found[name] == wanted[name]]
        text = f"with none: {len(right)} answers are right, {len(failed)} requests failed for want of device memory"
        good.append(
            told(len(right) + len(failed) == len(lengths) and reasons <= {error_pb2.ERROR_REASON_DEVICE_MEMORY}, text)
        )
    finally:
        owner.give_back()
    found, failed, _ = ask(core, "b", lengths)
    good.append(
        told(
            found == wanted and not failed,
            f"given back: {sum(found[n] == wanted[n] for n in wanted)} answers are right",
        )
    )
    good.append(told(core.scheduler.pool.num_free == blocks and not core.requests, "no block and no request is left"))
    return good.count(False)


def main(argv: Sequence[str] | None = None) -> int:
    """A model of real shape with fewer layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--leave-mib", type=int, default=96)
    options = parser.parse_args(argv)
    card = usable_gpu()
    from tests.gpu.determinism_rig import CutSource

    from dragoman_agent.device.cuda import CudaDevice
    from dragoman_agent.pal.probe import profile_device

    profile, _ = profile_device(card, Path("/tmp/dragoman-check"))
    source = CutSource(options.model, options.layers)
    plan = replace(plan_of(profile, source, deterministic=True), mixed_graph_tokens=(), chunk_graph=False)
    device = CudaDevice(profile.device.index)
    device.load(source, plan, lambda _: None)
    num_off = check(build_core(device, source, plan), Hog(), options.leave_mib << 20)
    device.close()
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main())
