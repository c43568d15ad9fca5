"""KV that went to pinned host memory or to disk and came back: equal logits, and the rate of both directions beside the link's.

python tests/gpu/check_tiers.py [MODEL] [--device cuda] [--tokens 2048]      exit 1 when a check is off

Whether bringing pays is not asked here: on a quick card and a small model it does not, and the engine computes. The check prices
computing so high that everything is brought, and says what the plan's own prices would have chosen.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tiers import engine, expected_ratio, settle

from dragoman_agent.device.base import BlockCopy, BlockDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Delta, Finished, Sampling, Start, Stop

MIN_SHARE = 0.5  # of the link's measured rate, gathering and scattering on the device included
NUM_COPIES = 20
COMPUTE_SECONDS = 0.01  # a token, as the engine is made to believe: any tier is quicker
FIRST_ID, END_ID = 100, 5000  # of the prompts' tokens


def always_bring(core: EngineCore) -> None:
    """Let no block be computed because that is quicker."""
    assert core.tiers is not None
    core.tiers.bringer._prefill_seconds = lambda num_tokens: COMPUTE_SECONDS * num_tokens


def answer(core: EngineCore, name: str, prompt: list[int]) -> tuple[list[tuple[int, float]], int]:
    """Greedy tokens with their log-probabilities, and how much of the prompt was cached."""
    start = Start(name, prompt, Sampling(temperature=0.0, num_logprobs=1), Stop(max_output_tokens=16), credit=1 << 20)
    events = run_all(core, [start])
    assert isinstance(events[-1], Finished), events[-1]
    entries = [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]
    return [(entry.token_id, entry.logprob) for entry in entries], events[-1].cached_tokens


def check_round_trip(core: EngineCore, num_tokens: int, tier: str) -> list[str]:
    """The same from the device's cache and from the tier: both compute the same tail, so every bit must agree."""
    assert core.tiers is not None
    problems, pool = [], core.scheduler.pool
    for number in range(3):
        prompt = np.random.default_rng(number).integers(FIRST_ID, END_ID, num_tokens).tolist()
        answer(core, f"{tier}-first-{number}", prompt)
        cached, num_cached = answer(core, f"{tier}-cached-{number}", prompt)
        settle(core)
        # Not by filling the cache with other prompts: those would push the blocks out of the small tier as well.
        pool.evict(pool.num_blocks)
        if pool.num_cached:
            problems.append(f"{tier}: the device still holds {pool.num_cached} blocks, nothing needs to come back")
            continue
        before, declined = core.tiers.report().tiers[0].read_blocks, core.tiers.bringer.num_declined
        brought, num_brought = answer(core, f"{tier}-brought-{number}", prompt)
        num_read = core.tiers.report().tiers[0].read_blocks - before
        if not num_cached == num_brought == num_read * core._plan.page_size > 0:
            problems.append(
                f"{tier}: {num_brought} tokens came back in {num_read} blocks, {num_cached} were cached; "
                f"declined {core.tiers.bringer.num_declined - declined} times, {core.tiers.lower.problem or 'no problem told'}"
            )
        elif brought != cached:
            worst = max(abs(a[1] - b[1]) for a, b in zip(brought, cached, strict=True))
            problems.append(f"{tier}: log-probabilities differ by up to {worst:.3g} after the round trip")
    return problems


def wait(copy: BlockCopy) -> float:
    """Until it is done; its seconds."""
    while not copy.is_done():
        time.sleep(0.0001)
    return copy.seconds


def rates(device: BlockDevice, num_blocks: int) -> tuple[float, float]:
    """Bytes a second out of the device and into it, of copies as large as one takes. `num_blocks` are in the cache, 0 unused."""
    count, size = min(device.max_num_copied_blocks, num_blocks - 1), device.block_format.block_bytes
    rows = list(device.new_rows(count))
    blocks = np.arange(1, count + 1, dtype=np.int32)
    out = [wait(device.copy_out(blocks, rows)) for _ in range(NUM_COPIES)]
    back = [wait(device.copy_in(rows, blocks)) for _ in range(NUM_COPIES)]
    return count * size / min(out), count * size / min(back)


def check_rates(core: EngineCore, link: float) -> list[str]:
    """Both directions beside the link's measured rate."""
    device: Any = core._device
    out, back = rates(device, core._plan.num_blocks)
    print(f"device to host {out / 1e9:.1f} GB/s, host to device {back / 1e9:.1f} GB/s; the link {link / 1e9:.1f} GB/s")
    return [
        f"{name} runs at {rate / link:.0%} of the link's rate, at least {MIN_SHARE:.0%} was expected"
        for name, rate in (("device to host", out), ("host to device", back))
        if link and rate < MIN_SHARE * link
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 1 when one is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args(arguments)
    model = (
        options.model
        if ":" in options.model or "/" in options.model or options.model == "embedded"
        else f"random:{options.model}"
    )
    problems: list[str] = []
    for tier in ("host", "disk"):
        with (
            tempfile.TemporaryDirectory(prefix="dragoman-tiers-") as folder,
            engine(options.device, model, tier, options.tokens, folder) as core,
        ):
            assert core.tiers is not None
            ratio = expected_ratio(core, options.tokens)
            choice = "it brings" if ratio < 1 else "it computes"
            print(f"{tier}: by the plan, bringing takes {ratio:.2f} of computing over the link, so that {choice}")
            always_bring(core)
            problems += check_round_trip(core, options.tokens, tier)
            print(f"{tier}: {core.tiers.report().tiers[0]}")
            if tier == "host":
                problems += check_rates(core, core._plan.kv_link_bytes_per_second)
    for problem in problems:
        print(f"OFF {problem}")
    print("ok" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
