"""Mixed load on a cell for some minutes: does anything grow, fragment or slow down?

    python -m benchmarks.soak [--minutes 5] [--device null|cpu|all] [--record]

Lengths, cancels, stop strings, several choices, logprobs and disconnects, through the gateway and the client library, by
one fixed seed. The figures: growth of memory (bytes a minute, over the second half), of file descriptors, share of KV
blocks that are neither free nor cached nor owned once nothing runs, and p99 latency of the last quarter over the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from benchmarks.cell import Cell, running_cell
from benchmarks.record import MIN_NUM_SAMPLES, make_record, save

from dragoman import AsyncClient, RetryPolicy
from dragoman_agent.model.embedded import default_cache_dir, embedded_target

SEED = 20260101
SAMPLE_SECONDS = 5.0
LATENCY_TOKENS = 16  # latencies are compared over requests of equal length
DEVICES: dict[str, tuple[str, ...]] = {
    "null": ("--device", "null", "--null-speed", "2"),
    # A pool of 4,096 tokens: one that load fills and turns over within a minute or two, so that a slope is not of pages first touched.
    "cpu": ("--device", "cpu", "--model", "embedded", "--max-context", "2048", "--max-num-seqs", "4"),
}
_NUM_WORKERS = {"null": 24, "cpu": 4}
_LONGEST = {"null": 4000, "cpu": 300}


@dataclass(slots=True)
class Sample:
    """What the processes hold at a moment."""

    time: float
    rss_bytes: int
    num_fds: int


@dataclass(slots=True)
class Observed:
    """Everything seen in one soak."""

    samples: list[Sample] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)  # (end, seconds) of the probe requests
    counts: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    fragmentation: float = 1.0
    fd_growth: float = 0.0

    def count(self, kind: str) -> None:
        """One request of this kind has ended."""
        self.counts[kind] = self.counts.get(kind, 0) + 1


class Worker:
    """Makes one request after another, each of a kind drawn from its own generator."""

    def __init__(
        self, client: AsyncClient, http: httpx.AsyncClient, observed: Observed, seed: int, longest: int
    ) -> None:
        self._client = client
        self._http = http
        self._observed = observed
        self._random = random.Random(seed)
        self._longest = longest
        self._kinds = (self.probe, self.whole, self.choices, self.stop, self.cancel, self.disconnect, self.logprobs)

    async def run(self, until: float) -> None:
        """Until the time comes."""
        while time.monotonic() < until:
            kind = self._random.choice(self._kinds)
            try:
                await kind()
            except Exception as error:
                # The soak ends with the list; one failure must not end the load.
                self._observed.errors.append(f"{kind.__name__}: {error!r}")
            self._observed.count(kind.__name__)

    async def probe(self) -> None:
        """A short request whose latency is kept."""
        started = time.monotonic()
        await self._post({"max_tokens": LATENCY_TOKENS, "prompt": self._prompt(64), "ignore_eos": True})
        ended = time.monotonic()
        self._observed.latencies.append((ended, ended - started))

    async def whole(self) -> None:
        """Any length, not streamed, some with a prefix that others have too."""
        shared = "You are a helpful assistant. " * 20 if self._random.random() < 0.5 else ""
        prompt = shared + self._prompt(self._longest)
        await self._post({"prompt": prompt, "max_tokens": self._random.randint(1, 100)})

    async def choices(self) -> None:
        """Several outputs."""
        body = {"prompt": self._prompt(200), "max_tokens": 40, "n": self._random.randint(2, 4), "temperature": 1.0}
        await self._post(body)

    async def stop(self) -> None:
        """Ended by a stop string, mostly."""
        await self._post({"prompt": self._prompt(100), "max_tokens": 80, "stop": ["e", "the", "qu"]})

    async def logprobs(self) -> None:
        """With log-probabilities."""
        await self._post({"prompt": self._prompt(100), "max_tokens": 20, "logprobs": 3})

    async def cancel(self) -> None:
        """Left after some tokens, by the client library."""
        wanted = self._random.randint(0, 30)
        async with self._client.generate(self._prompt(self._longest), max_output_tokens=400, deadline=60.0) as stream:
            async for token in stream:
                if token.cursor >= wanted:
                    break

    async def disconnect(self) -> None:
        """A connection cut in the middle of its stream."""
        body = {"prompt": self._prompt(300), "max_tokens": 400, "ignore_eos": True, "stream": True}
        wanted = self._random.randint(0, 20)
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            _check(reply)
            async for _ in reply.aiter_lines():
                wanted -= 1
                if wanted < 0:
                    return

    async def _post(self, body: dict[str, Any]) -> None:
        _check(await self._http.post("/v1/completions", json=body))

    def _prompt(self, longest: int) -> str:
        words = ("apple", "river", "quick", "stone", "cloud", "seven", "music")
        return " ".join(self._random.choices(words, k=max(1, self._random.randint(1, longest) // 6)))


def _check(reply: httpx.Response) -> None:
    if reply.status_code != 200:
        raise RuntimeError(f"status {reply.status_code}: {reply.text[:200] if reply.is_closed else ''}")


async def load(cell: Cell, observed: Observed, device: str, minutes: float) -> None:
    """The load and the samples beside it."""
    until = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
    async with (
        AsyncClient(cell.controller_address, retry=RetryPolicy(budget=1000.0)) as client,
        httpx.AsyncClient(base_url=cell.url, timeout=120, limits=limits) as http,
    ):
        workers = [
            Worker(client, http, observed, SEED + index, _LONGEST[device]).run(until)
            for index in range(_NUM_WORKERS[device])
        ]
        await asyncio.gather(sample(cell, observed, until), *workers)


async def sample(cell: Cell, observed: Observed, until: float) -> None:
    """Take a sample now and then."""
    while time.monotonic() < until:
        held = cell.footprint().values()
        observed.samples.append(
            Sample(time.monotonic(), sum(rss for _, _, rss in held), sum(fds for _, fds, _ in held))
        )
        await asyncio.sleep(SAMPLE_SECONDS)


def soak(device: str, minutes: float) -> Observed:
    """One soak on a device of two agents (one on a CPU). Raises CellError when something is left over at the end."""
    observed = Observed()
    agents = [DEVICES[device]] * (2 if device == "null" else 1)
    with running_cell(*agents) as cell:
        warm = Observed()
        asyncio.run(load(cell, warm, device, min(0.25, minutes / 4)))
        cell.quiesce(60)
        fds = sum(count for _, count, _ in cell.footprint().values())
        asyncio.run(load(cell, observed, device, minutes))
        cell.quiesce(60)
        time.sleep(1.0)
        observed.fd_growth = sum(count for _, count, _ in cell.footprint().values()) - fds
        totals = [cell.agent_metric(agent_id, "dragoman_kv_blocks", state="total") for agent_id in cell.agents]
        observed.fragmentation = sum(cell.kv_blocks_in_use(agent_id) for agent_id in cell.agents) / sum(totals)
        # The engines' own account of it.
        own = [cell.agent_metric(agent_id, "dragoman_kv_fragmentation_ratio") for agent_id in cell.agents]
        observed.fragmentation = max(observed.fragmentation, *own)
    return observed


def rss_slope(samples: Sequence[Sample]) -> float:
    """Bytes a minute: least squares over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < MIN_NUM_SAMPLES:
        raise ValueError(f"{len(half)} samples are too few for a slope; soak longer")
    slope, _ = statistics.linear_regression([s.time / 60 for s in half], [float(s.rss_bytes) for s in half])
    return slope


def p99_drift(latencies: Sequence[tuple[float, float]]) -> float:
    """p99 of the last quarter of the time over that of the second quarter; 1.0 is no drift."""
    first, last = min(at for at, _ in latencies), max(at for at, _ in latencies)
    quarter = (last - first) / 4
    early = [seconds for at, seconds in latencies if first + quarter <= at < first + 2 * quarter]
    late = [seconds for at, seconds in latencies if at >= last - quarter]
    if min(len(early), len(late)) < MIN_NUM_SAMPLES:
        raise ValueError("too few probe requests for a drift; soak longer")
    return _p99(late) / _p99(early)


def _p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def report(device: str, observed: Observed, minutes: float) -> dict[str, float]:
    """Print and return the figures."""
    figures = {
        "rss_slope": rss_slope(observed.samples),
        "fd_growth": observed.fd_growth,
        "fragmentation": observed.fragmentation,
        "p99_drift": p99_drift(observed.latencies),
    }
    total = sum(observed.counts.values())
    print(f"{device}: {total} requests in {minutes:g} min {json.dumps(observed.counts)}, {len(observed.errors)} errors")
    print(
        f"  memory {figures['rss_slope'] / 2**20:+.2f} MiB a minute of {observed.samples[-1].rss_bytes / 2**20:.0f} MiB"
    )
    print(f"  descriptors {figures['fd_growth']:+.0f}, fragmentation {figures['fragmentation']:.4f}", end="")
    print(f", p99 {figures['p99_drift']:.2f} of the second quarter's")
    for error in observed.errors[:5]:
        print(f"  error: {error}")
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, report, and record where asked; 1 when requests failed or blocks were lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", choices=(*DEVICES, "all"), default="all", help="all: cpu where the model is here")
    parser.add_argument("--record", action="store_true", help="three soaks each, kept in benchmarks/results/soak.json")
    options = parser.parse_args(argv)
    devices = [options.device] if options.device != "all" else ["null"]
    if options.device == "all":
        path: Path = embedded_target(default_cache_dir(os.environ))
        if path.exists():
            devices.append("cpu")
        else:
            print(f"cpu: skipped, the embedded model is not at {path}; run `dragoman models fetch embedded`")
    failed, records = False, []
    for device in devices:
        runs = []
        for _ in range(MIN_NUM_SAMPLES if options.record else 1):
            observed = soak(device, options.minutes)
            runs.append(report(device, observed, options.minutes))
            failed |= bool(observed.errors) or observed.fragmentation > 0
        if options.record:
            command = f"python -m benchmarks.soak --minutes {options.minutes:g} --device {device} --record"
            records += [_record(device, name, [run[name] for run in runs], command) for name in runs[0]]
    if records:
        print(f"saved to {save('soak', records)}")
    return 1 if failed else 0


def _record(device: str, metric: str, samples: list[float], command: str) -> dict[str, Any]:
    units = {"rss_slope": "bytes/min", "fd_growth": "1", "fragmentation": "1", "p99_drift": "1"}
    return make_record(
        bench="soak", case=device, metric=metric, unit=units[metric], samples=samples,
        predicted=1.0 if metric == "p99_drift" else 0.0, command=command, packages=("grpcio", "uvloop", "uvicorn"),
        note="over all processes of the cell",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
