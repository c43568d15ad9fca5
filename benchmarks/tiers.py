"""TTFT of a long prompt whose KV lies in a lower tier, against computing it; and the rate of each direction.

    python -m benchmarks.tiers [--device cpu|cuda] [--model M] [--tier disk|host] [--tokens 1024] [--rounds 3] [--out F] [--record]

In each round a prompt is computed, left idle until its blocks are below the device, evicted from there, and asked again; then it is
asked once more with another salt, so that it is computed. Files are dropped from the page cache before they are read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import make_record, save

from dragoman_agent.cache.disk_store import SUFFIX
from dragoman_agent.device import open_device
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Finished, Sampling, Start, Stop, TierCounts
from dragoman_agent.engine.tiers import TierSizes
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.planner import Limits
from dragoman_agent.pal.startup import start_on_device

HOST_BYTES, DISK_BYTES = 4 << 30, 4 << 30
PREDICTED_DISK = 0.2  # see NOTES.md, "KV tiers"


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to the first token, and how much of the prompt was cached when it was asked again."""

    computed: float
    brought: float
    cached_tokens: int


@contextmanager
def engine(device: str, model: str, tier: str, num_tokens: int, folder: str) -> Iterator[EngineCore]:
    """A core on a loaded device, with one tier below it."""
    cache_dir = default_cache_dir(os.environ)
    source = open_model(model, cache_dir)
    limits = Limits(max_context_tokens=min(num_tokens + 64, source.config.max_context_tokens), kv_disk_bytes=DISK_BYTES)
    planned = start_on_device(source, device, "auto", limits, cache_dir)
    sizes = TierSizes(
        HOST_BYTES if tier == "host" else 0, DISK_BYTES if tier == "disk" else 0, folder,
        planned.plan.kv_link_bytes_per_second,
    )  # fmt: skip
    opened = open_device(planned.plan.device_kind, index=planned.plan.device_index, cache_dir=cache_dir)
    core = None
    try:
        opened.load(source, planned.plan, lambda progress: None)
        core = build_core(opened, source, planned.plan, tier_sizes=sizes)
        wait_for_arena(core)
        yield core
    finally:
        if core is not None and core.tiers is not None:
            core.tiers.close()
        opened.close()


def wait_for_arena(core: EngineCore) -> None:
    """The host tier's memory is taken in pieces, beside the first requests."""
    host = core.tiers.lower.host if core.tiers is not None else None
    while host is not None and host.index.capacity < host.num_planned:
        assert not host.problem, host.problem
        time.sleep(0.01)
        host.poll()


def ask(core: EngineCore, name: str, prompt: list[int], salt: str) -> Finished:
    """One greedy request of two tokens."""
    start = Start(name, prompt, Sampling(temperature=0.0), Stop(max_output_tokens=2), credit=1 << 20, cache_salt=salt)
    last = run_all(core, [start])[-1]
    assert isinstance(last, Finished), last
    return last


def settle(core: EngineCore) -> None:
    """Until everything idle is below the device."""
    core.turn(lambda step: None)
    while core.is_moving:
        time.sleep(0.001)
        core.turn(lambda step: None)


def drop_page_cache(folder: str) -> None:
    """Of the blocks' files, so that the disk itself is read."""
    for file in Path(folder).glob("*" + SUFFIX):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def one_round(core: EngineCore, number: int, num_tokens: int, vocab_size: int, folder: str) -> Round:
    """See the module."""
    rng = random.Random(number)
    prompt = [rng.randrange(100, vocab_size - 100) for _ in range(num_tokens)]
    ask(core, f"first-{number}", prompt, f"kept {number}")
    settle(core)
    core.scheduler.pool.evict(core.scheduler.pool.num_blocks)
    drop_page_cache(folder)
    brought = ask(core, f"again-{number}", prompt, f"kept {number}")
    computed = ask(core, f"new-{number}", prompt, f"new {number}")
    return Round(computed.first_token_seconds, brought.first_token_seconds, brought.cached_tokens)


def rates(counts: TierCounts) -> tuple[float, float]:
    """Bytes a second to the tier and back."""
    return counts.written_bytes / max(counts.write_seconds, 1e-9), counts.read_bytes / max(counts.read_seconds, 1e-9)


def expected_ratio(core: EngineCore, num_tokens: int) -> float:
    """Of a prompt's blocks over the planned link, and the tail computed, to all of it computed."""
    assert core.tiers is not None
    bringer, page = core.tiers.bringer, core._plan.page_size
    num_blocks = (num_tokens - 1) // page
    link = core._plan.kv_link_bytes_per_second
    moved = num_blocks * bringer._block_bytes / link if link else 0.0
    tail = bringer._prefill_seconds(num_tokens - num_blocks * page)
    return (moved + tail) / bringer._prefill_seconds(num_tokens)


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tier", default="disk", choices=("disk", "host"))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the raw results")
    parser.add_argument("--record", action="store_true", help="put the result into benchmarks/results/cpu.json")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="dragoman-tiers-") as folder,
        engine(options.device, options.model, options.tier, options.tokens, folder) as core,
    ):
        assert core.tiers is not None
        model = core.tiers.bringer
        vocab_size = core._live._tokenizer.vocab_size
        done = [one_round(core, n, options.tokens, vocab_size, folder) for n in range(options.rounds)]
        out, back = rates(core.tiers.report().tiers[0])
        predicted = model._prefill_seconds(options.tokens)
        expected = expected_ratio(core, options.tokens) if options.tier == "host" else PREDICTED_DISK
    brought = [r.brought for r in done]
    computed = [r.computed for r in done]
    ratio = [b / c for b, c in zip(brought, computed, strict=True)]
    print(
        f"{options.tokens} tokens on {options.device}, {options.tier}: brought back {statistics.median(brought):.3f} s, computed "
        f"{statistics.median(computed):.3f} s ({statistics.median(ratio):.2f} of it; {predicted:.3f} s predicted); "
        f"{done[-1].cached_tokens} tokens cached; {out / 1e9:.2f} GB/s down, {back / 1e9:.2f} GB/s up"
    )
    case = f"{options.device}-{options.tier}-{options.tokens}"
    note = f"computed {statistics.median(computed):.3f} s; {out / 1e9:.2f} GB/s down, {back / 1e9:.2f} GB/s up"
    if options.out is not None:
        from benchmarks.card import environment

        result = {
            "bench": "tiers", "case": f"{options.tier}-{options.tokens}", "metric": "ttft_over_computed",
            "samples": ratio, "predicted": expected, "note": note,
        }  # fmt: skip
        body = {"model": options.model.removeprefix("random:"), "info": {}, "results": [result], **environment(0)}
        options.out.write_text(json.dumps(body, indent=1, default=str))
    if options.record:
        record = make_record(
            bench="tiers", case=case, metric="ttft_over_computed", unit="ratio", samples=ratio, predicted=expected,
            packages=("numpy", "torch"), command=f"python -m benchmarks.tiers --tier {options.tier} --record", note=note,
        )  # fmt: skip
        print(f"saved to {save('cpu', [record])}")


if __name__ == "__main__":
    main()
