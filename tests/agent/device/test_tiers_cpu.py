"""KV that went below the CPU's cache and came back gives the same greedy tokens, on every road."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.agent.device.conformance.subjects import plan_of
from tests.agent.device.conformance.tiny_model import CONFIG, TinyModel

from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.events import Event
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Delta, Finished, Sampling, Start, Stop
from dragoman_agent.engine.tiers import TierSizes
from dragoman_text import TextTokenizer

BLOCK_BYTES = 16 * 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
PROMPTS = [np.random.default_rng(seed).integers(1, 70, 40).tolist() for seed in range(5)]


def tokens_of(road: str, num_blocks: int, tiers: TierSizes | None, rounds: int) -> tuple[list[list[int]], int, Any]:
    """The tokens after each prompt in each round, the cached tokens of the last round, and the tiers' report."""
    device = CpuDevice()
    plan = plan_of("cpu", road, num_blocks=num_blocks)
    model: Any = TinyModel()
    device.load(model, plan, lambda progress: None)
    tokenizer = TextTokenizer.from_files(NullModel().tokenizer)
    core = EngineCore(device, tokenizer, b"d" * 32, plan, vocab_size=CONFIG.vocab_size, tier_sizes=tiers)
    try:
        found, cached = [], 0
        for turn in range(rounds):
            for name, prompt in enumerate(PROMPTS):
                start = Start(f"{turn}-{name}", prompt, Sampling(temperature=0.0), Stop(max_output_tokens=7), credit=99)
                events: list[Event] = run_all(core, [start])
                found.append([token for event in events if isinstance(event, Delta) for token in event.token_ids])
                assert isinstance(events[-1], Finished)
                cached += events[-1].cached_tokens if turn else 0
                settle(core)
        return found, cached, core.tiers.report() if core.tiers else None
    finally:
        if core.tiers is not None:
            core.tiers.close()
        device.close()


def settle(core: EngineCore) -> None:
    deadline = time.monotonic() + 10
    core.turn(lambda step: None)
    while core.is_moving:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        core.turn(lambda step: None)


@pytest.mark.parametrize("road", ["torch-float32", "native-float32"])
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_the_same_tokens_with_a_cache_too_small_for_two(road: str, kind: str, tmp_path: Path) -> None:
    wanted, _, _ = tokens_of(road, 24, None, 1)
    size = 64 * (BLOCK_BYTES + 300)
    tiers = TierSizes(host_bytes=size) if kind == "host" else TierSizes(disk_bytes=size, disk_dir=str(tmp_path))
    found, cached, report = tokens_of(road, 7, tiers, 2)
    assert found == wanted * 2 and len(set(map(tuple, wanted))) == len(PROMPTS)
    assert cached == len(PROMPTS) * 32, "two whole blocks of each prompt came back, or were still there"
    assert report.tiers[0].read_blocks >= 6 and report.dropped_blocks == 0
