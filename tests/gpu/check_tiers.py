"""KV that went to pinned host memory or to disk and came back: equal logits, and the rate of both directions beside the link's.

python tests/gpu/check_tiers.py [MODEL] [--device cuda] [--tokens 2048] [--out FILE.json]      exit 1 when a check is off

A rate is bytes over the seconds between two events on the device: from before the first piece is gathered until the last one has
crossed (or from before the first crosses until the last is scattered), nothing else running. The host's time to hand the pieces over
is in it: where that is most of the seconds, the host is what limits. The best of the copies is held against the bar, with the link's
rate of the profile; the rate of plain copies of as many bytes between the same pinned rows and one buffer is told beside it.
benchmarks.record_gpu records FILE.json: each copy is a sample, and each round trip.

Whether bringing pays is not asked here: on a quick card and a small model it does not, and the engine computes. The check prices
computing so high that everything is brought, and says what the plan's own prices would have chosen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.card import Result, keep, result
from benchmarks.tiers import engine, expected_ratio, settle

from dragoman_agent.device.base import BlockCopy, BlockDevice, UInt8Array
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Delta, Finished, Sampling, Start, Stop

MIN_SHARE = 0.5  # of the link's measured rate, gathering and scattering on the device included
PREDICTED_SHARE = 0.9  # 50 of 55.2 GB/s: NOTES.md, "KV tiers"
NUM_COPIES, NUM_PLAIN = 20, 6
NUM_ROUNDS = 3
COMMAND = "python tests/gpu/check_tiers.py"
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
    for number in range(NUM_ROUNDS):
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


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of equal size in one direction, one after another."""

    name: str  # "out" of the device, or "in"
    num_bytes: int  # of each
    seconds: tuple[float, ...]  # on the device, see the module
    host_seconds: tuple[float, ...]  # until the host had handed each over
    plain_seconds: tuple[float, ...]  # of plain copies of as many bytes; none where the device has no link

    @property
    def rate(self) -> float:
        """Bytes a second of the best."""
        return self.num_bytes / min(self.seconds)

    @property
    def host_share(self) -> float:
        """Of the median copy's seconds, those that the host took to hand it over."""
        return statistics.median(self.host_seconds) / max(statistics.median(self.seconds), 1e-9)

    def words(self, link: float) -> str:
        """Rates and what limits them; `link` in bytes a second."""
        median = self.num_bytes / max(statistics.median(self.seconds), 1e-9)
        text = (
            f"{self.name}: best {self.rate / 1e9:.1f}, median {median / 1e9:.1f} GB/s of {len(self.seconds)} copies of "
        )
        text += f"{self.num_bytes / 1e6:.0f} MB; the link {link / 1e9:.1f} by the profile"
        if self.plain_seconds:
            plain = self.num_bytes / statistics.median(self.plain_seconds)
            text += f", {plain / 1e9:.1f} by plain copies in the same minute"
        return text + f"; the host hands a copy over in {self.host_share:.0%} of its seconds"


def copies(device: BlockDevice, num_blocks: int, *, is_cuda: bool) -> tuple[Copies, Copies]:
    """Out of the device and into it, as large as one takes. `num_blocks` are in the cache, 0 unused."""
    count, size = min(device.max_num_copied_blocks, num_blocks - 1), device.block_format.block_bytes
    held = device.new_rows(count)
    rows, blocks = list(held), np.arange(1, count + 1, dtype=np.int32)

    def timed(begin: Callable[[], BlockCopy]) -> tuple[float, float]:
        begun = time.perf_counter()
        copy = begin()
        handed_over = time.perf_counter() - begun
        return wait(copy), handed_over

    out = [timed(lambda: device.copy_out(blocks, rows)) for _ in range(NUM_COPIES)]
    back = [timed(lambda: device.copy_in(rows, blocks)) for _ in range(NUM_COPIES)]
    plain = plain_seconds(held) if is_cuda else ((), ())
    made = []
    for name, found, own in (("out", out, plain[0]), ("in", back, plain[1])):
        seconds, host = zip(*found, strict=True)
        made.append(Copies(name, count * size, seconds, host, own))
    return made[0], made[1]


def plain_seconds(rows: UInt8Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Between these pinned rows and one buffer of the GPU, a copy each: out of it, and into it."""
    import torch

    host = torch.from_numpy(rows).view(-1)
    card = torch.empty(host.shape, dtype=torch.uint8, device="cuda")

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    out = tuple(timed(host, card) for _ in range(NUM_PLAIN))
    return out, tuple(timed(card, host) for _ in range(NUM_PLAIN))


def check_rates(found: Sequence[Copies], link: float) -> list[str]:
    """Both directions beside the link's measured rate."""
    for one in found:
        print(one.words(link))
    return [
        f"{one.name} runs at {one.rate / link:.0%} of the link's rate, at least {MIN_SHARE:.0%} was expected; "
        f"the host hands a copy over in {one.host_share:.0%} of its seconds"
        for one in found
        if link and one.rate < MIN_SHARE * link
    ]


def rate_results(model: str, found: Sequence[Copies], link: float) -> list[Result]:
    """Share of the profile's link that each copy reached, beside that of plain copies; none where the link is not known."""
    made = []
    for one in found if link else ():
        shares = [one.num_bytes / seconds / link for seconds in one.seconds]
        peer: dict[str, object] = {}
        if one.plain_seconds:
            share = one.num_bytes / statistics.median(one.plain_seconds) / link
            peer = {"peer": {"name": "plain copies in the same minute", "value": round(share, 4)}}
        metric, note = f"{one.name}_share_of_link", f"{one.words(link)}; bar of the best {MIN_SHARE}"
        made.append(
            result("tiers", f"{model}-host", metric, "share", shares, predicted=PREDICTED_SHARE, note=note, **peer)
        )
    return made


def round_trip_result(model: str, tier: str, num_tokens: int, problems: Sequence[str]) -> Result:
    """A sample a round trip: 1 where every bit came back."""
    samples = [0.0] * len(problems) + [1.0] * (NUM_ROUNDS - len(problems))
    note = "; ".join([f"{num_tokens} tokens, greedy answers and log-probabilities bit by bit", *problems[:1]])
    return result(
        "tiers", f"{model}-{tier}", "identical_answers", "share", samples, predicted=1.0, value="min", note=note
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 1 when one is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="random:qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="a JSON file for the raw results")
    options = parser.parse_args(arguments)
    given = options.model
    model = given if ":" in given or "/" in given or given == "embedded" else f"random:{given}"
    name, is_cuda = model.removeprefix("random:"), options.device == "cuda"
    problems: list[str] = []
    results: list[Result] = []
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
            off = check_round_trip(core, options.tokens, tier)
            problems += off
            results.append(round_trip_result(name, tier, options.tokens, off))
            print(f"{tier}: {core.tiers.report().tiers[0]}")
            if tier == "host":
                settle(core)  # blocks that still leave would share the link
                device: Any = core._device
                link = core._plan.kv_link_bytes_per_second
                found = copies(device, core._plan.num_blocks, is_cuda=is_cuda)
                problems += check_rates(found, link)
                results += rate_results(name, found, link)
            keep(options.out, "", core._plan.device_index if is_cuda else None, results, command=f"{COMMAND} {name}")
    for problem in problems:
        print(f"OFF {problem}")
    print("ok" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
