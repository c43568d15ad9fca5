"""What the start leaves for after it, on a GPU: how long each part takes, that none touches a block of others, and the same tokens.

python tests/gpu/check_left_for_later.py [qwen3-0.6b]      exit 1 when something is off
Between parts requests are served; beside them a thread pins memory, as that of the KV tiers does. Tokens are compared where the
plan is deterministic: otherwise a step that is padded further may round differently.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Sampling, Start, Stop
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import Plan

PROFILES = Path("/tmp/dragoman-check")
MAX_BLOCKS = 512  # they are compared after each part
MAX_ROWS = 100  # that the thread pins
SERVED_AFTER = (0, 1, 12, 30)  # parts
PREDICTED_SECONDS = 0.015  # a part; of two long steps more


class Service:
    """Requests of one kind each time: two that share a prompt, two that decode beside them."""

    def __init__(self, core: EngineCore, num_tokens: int, vocab_size: int) -> None:
        rng = np.random.default_rng(1)
        self._core, self._prompt = core, rng.integers(1, vocab_size, num_tokens).tolist()
        self.tokens: dict[str, list[int]] = {}

    def ask(self, when: int) -> None:
        """All four at once."""
        commands = [
            Start(f"{when}-{nth}", self._prompt[nth * 3 :] if nth > 1 else self._prompt, Sampling(temperature=0.0), Stop(max_output_tokens=8), credit=99)
            for nth in range(4)
        ]  # fmt: skip
        for event in run_all(self._core, commands):
            if isinstance(event, Delta):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)


@contextmanager
def pinning(device: Any) -> Any:
    """A thread that takes pinned memory; what it met comes out."""
    _ = device.max_num_copied_blocks  # made by this thread
    ended, problems, rows = threading.Event(), [], []

    def pin() -> None:
        while not ended.is_set():
            try:
                if len(rows) < MAX_ROWS:
                    rows.append(device.new_rows(1))
            except Exception as error:
                problems.append(str(error))
            time.sleep(1e-3)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        yield problems
    finally:
        ended.set()
        thread.join()


def check(name: str, opened: Callable[[bool], Any], source: ModelSource, plan: Plan, num_tokens: int) -> int:
    """Serve on a device that leaves what it can for later, then on one that leaves nothing; how much is off. `opened`: such a device."""
    begun = time.perf_counter()
    device = opened(True)
    load_seconds = time.perf_counter() - begun
    service = Service(build_core(device, source, plan), num_tokens, source.config.vocab_size)
    service.ask(0)
    seconds: list[float] = []
    is_left, num_written = True, 0
    raw = device._cache.raw.keys, device._cache.raw.values
    with pinning(device) as problems:
        while is_left:
            held = [cache[:, 1:].clone() for cache in raw]
            device._runtime.synchronize()
            begun = time.perf_counter()
            is_left = device.prepare()
            seconds.append(time.perf_counter() - begun)
            device._runtime.synchronize()
            num_written += sum(not torch.equal(a, b[:, 1:]) for a, b in zip(held, raw, strict=True))
            if len(seconds) in SERVED_AFTER:
                service.ask(len(seconds))
    service.ask(-1)
    del held, raw
    device.close()
    begun = time.perf_counter()
    whole = opened(False)
    whole_seconds = time.perf_counter() - begun
    expected = Service(build_core(whole, source, plan), num_tokens, source.config.vocab_size)
    for when in dict.fromkeys(int(key.rpartition("-")[0]) for key in service.tokens):
        expected.ask(when)
    facts = [
        (d.info["graph_batch_sizes"], d.info["mixed_graph_tokens"], len(d.info["decode_steps"]))
        for d in (device, whole)
    ]
    whole.close()
    off = {
        "a part wrote to a block": num_written > 0,
        "memory could not be pinned": bool(problems),
        "not all was made": facts[0] != facts[1],
        "other tokens": plan.deterministic and service.tokens != expected.tokens,
    }
    bad = [what for what, is_off in off.items() if is_off]
    print(
        f"{'OFF' if bad else 'ok '} {name}: {', '.join(bad + problems[:1])} {len(seconds)} parts, {sum(seconds):.2f} s in all, the longest "
        f"{1e3 * max(seconds):.1f} ms, median {1e3 * float(np.median(seconds)):.1f} (predicted {1e3 * PREDICTED_SECONDS:.0f}); "
        f"load {load_seconds:.2f} s with the rest left, {whole_seconds:.2f} with all", flush=True,
    )  # fmt: skip
    return len(bad)


def main() -> int:
    """The plan of the model as it is, and the deterministic one."""
    from benchmarks.card import usable_gpu
    from benchmarks.gpu_setup import Loaded

    from dragoman_agent.model.source import open_model
    from dragoman_agent.pal.planner import Limits, Switches, plan_for
    from dragoman_agent.pal.probe import profile_device

    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
    source = open_model(f"random:{name}", Path())
    found = usable_gpu()
    profile, _ = profile_device(found, PROFILES)
    loaded, num_off = Loaded(source), 0
    for label, is_exact in (("usual", False), ("deterministic", True)):
        limits = Limits(max_context_tokens=4096, max_num_seqs=256, deterministic=is_exact)
        plan = replace(plan_for(profile, source.config, limits, Switches())[0], num_blocks=MAX_BLOCKS)
        loaded.device(plan).close()  # what compiles is no part of it
        num_off += check(
            f"{name} {label}", lambda later, plan=plan: loaded.device(plan, prepares_later=later), source, plan, 300
        )
    return num_off


if __name__ == "__main__":
    sys.exit(min(main(), 1))
