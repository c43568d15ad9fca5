"""Whether the device ever waits for the host in steady decode, read from a trace, and whether running ahead changes an answer.

PYTHONPATH=. python tests/gpu/check_overlap.py [MODEL] [--device cuda] [--batch 256] [--tokens 128] [--out FILE.json] [--traces DIR]
    exit 1 when a check is off

The overlap is looked at in the usual plan: with plain sampling and with top-k and top-p no device may wait; where a step's sampling
hangs on the text before it, a device may wait for a host that works longer than the device, and only then. That is told as SLOW. The host's work itself is a
figure for benchmarks: it is printed beside its bar and decides nothing here. Answers are compared in a deterministic plan, where a
batch that is composed otherwise changes no bit, so that none may differ.

Traces for ui.perfetto.dev are left in DIR, and FILE.json gets what benchmarks.record_gpu records: a sample a third of the steady
steps, one behind the other. The same check runs without a GPU on `--device null`, of which no record is made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.card import Result, keep, result, usable_gpu

from dragoman_agent.device.base import Device
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, GrammarSpec, Sampling, Start, Step, Stop
from dragoman_agent.engine.trace import TraceWriter
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

MIN_EARLY = 0.9  # of the steps in steady state, handed over before the one before them ended
MAX_GAP = 0.03  # median time between two steps, over the median step
MAX_HOST_SECONDS = 300e-6  # the bar of host work a step at batch 256

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 20, "top_p": 0.95},
    "top-p": {"top_p": 0.9},  # whose candidates a random model's flat logits go beyond
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "grammar": {"grammar": GrammarSpec("regex", "[a-z ]{1,400}")},
    "bad-words": {"bad_word_ids": [[5, 6], [7]]},
}
NUM_PARTS = 3  # of the steady steps, a sample each
COMMAND = "python tests/gpu/check_overlap.py"
LATE = ("penalties", "grammar", "bad-words")  # whose sampling hangs on the text before


@dataclass(slots=True)
class Overlap:
    """What a trace says of its steady state: decode steps of the full batch."""

    num_steps: int
    early: float  # share of the steps handed over before the one before ended
    gap: float  # median seconds between two steps
    step: float  # median seconds of a step


def steady_pairs(path: Path, batch: int) -> list[tuple[Any, Any]]:
    """Steps of the full batch that follow each other in a trace of one run."""
    events = [e for e in json.loads(path.read_text()) if e["ph"] == "X" and e["tid"] == 2]
    steps = sorted((e for e in events if e["args"]["decode_tokens"] == batch), key=lambda e: e["args"]["step"])
    return [(a, b) for a, b in itertools.pairwise(steps) if b["args"]["step"] == a["args"]["step"] + 1][2:]


def overlap_of(pairs: Sequence[tuple[Any, Any]]) -> Overlap:
    """What such pairs say."""
    ends = [a["ts"] + a["dur"] for a, _ in pairs]
    return Overlap(
        len(pairs),
        statistics.mean(b["args"]["handed_over"] < end for (_, b), end in zip(pairs, ends, strict=True)),
        statistics.median(b["ts"] - end for (_, b), end in zip(pairs, ends, strict=True)) * 1e-6,
        statistics.median(a["dur"] for a, _ in pairs) * 1e-6,
    )


def thirds(steps: Sequence[Any]) -> list[Sequence[Any]]:
    """`NUM_PARTS` parts in order, without empty ones."""
    bounds = [len(steps) * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    return [steps[begin:end] for begin, end in itertools.pairwise(bounds) if end > begin]


def results_of(model: str, kind: str, batch: int, pairs: Sequence[tuple[Any, Any]], host: Sequence[float]) -> list[Result]:  # fmt: skip
    """Of the steady steps of a kind of request: `host` seconds of each."""
    whole, parts = overlap_of(pairs), [overlap_of(part) for part in thirds(pairs)]
    note = f"{model}, batch {batch}: {whole.num_steps} steps of {whole.step * 1e3:.3f} ms in {len(parts)} parts"
    bar = f"{note}; bar {MAX_GAP * whole.step * 1e6:.0f} us, {MAX_GAP:.0%} of a step"
    worked = [1e6 * statistics.median(part) for part in thirds(host)]
    limit = f"; bar {MAX_HOST_SECONDS * 1e6:.0f} us" if kind == "plain" else ""
    return [
        result("overlap", kind, "gap_microseconds", "us", [1e6 * one.gap for one in parts], predicted=0.0, note=bar),
        result("overlap", kind, "handed_over_early", "share", [one.early for one in parts], predicted=1.0, note=note),
        result("overlap", kind, "host_microseconds", "us", worked, note=f"{note}; a trace is written meanwhile{limit}"),
    ]


def requests(kind: str, batch: int, num_tokens: int, label: str) -> list[Start]:
    """`batch` requests of one kind, each with a prompt of its own."""
    fields = KINDS[kind]
    stop = Stop(max_output_tokens=num_tokens)
    return [
        Start(
            f"{label}-{kind}-{i}", [1 + (7 * i + k) % 200 for k in range(100)], Sampling(temperature=0.8, seed=i, **fields),
            stop, credit=1 << 30, key=-1 if "grammar" in fields else i, cache_salt=label,
        )
        for i in range(batch)
    ]  # fmt: skip


def play(core: EngineCore, starts: list[Start]) -> dict[str, list[int]]:
    """Tokens by request."""
    for start in starts:
        start.key = -1  # as events
    tokens: dict[str, list[int]] = {start.request_id.partition("-")[2]: [] for start in starts}
    for event in run_all(core, starts):
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.request_id}: {event.message}")
        if isinstance(event, Delta):
            tokens[event.request_id.partition("-")[2]].extend(event.token_ids)
    return tokens


def judge(found: Overlap, host: float, *, is_late: bool) -> str:
    """ok, OFF, or SLOW: the device waited for a host that works longer than a step takes. `is_late`: sampling hangs on the text."""
    if found.early >= MIN_EARLY and found.gap <= MAX_GAP * found.step:
        return "ok"
    return "SLOW" if is_late and host > found.step else "OFF"


def check_overlap(make: Any, traces: Path, model: str, kind: str, batch: int, num_tokens: int, host_limit: float) -> tuple[dict[str, Any], list[Result]]:  # fmt: skip
    """One kind of request in steady state: what was seen with the verdict, and the raw results."""
    trace = TraceWriter(traces / kind)
    core = make(trace=trace)
    frames: list[Step] = []
    run_all(core, requests(kind, batch, num_tokens, "trace"), on_step=frames.append)
    trace.close()
    pairs = steady_pairs(trace.path, batch)
    found = overlap_of(pairs)
    pure = [f.host_seconds for f in frames if f.load.decode_tokens == batch and not f.load.prefill_tokens]
    host = statistics.median(pure)
    verdict = judge(found, host, is_late=kind in LATE)
    meaning = {
        "ok": "the device does not wait",
        "OFF": "the device waits although the host had the time" if host <= found.step else "the device waits",
        "SLOW": "the host works longer than the device, which waits for it",
    }[verdict]
    bar = (
        f", the bar of {host_limit * 1e6:.0f} us is {'kept' if host <= host_limit else 'missed'}"
        if kind == "plain"
        else ""
    )
    print(
        f"{verdict} {kind}: {found.num_steps} steps of {found.step * 1e3:.3f} ms at batch {batch}, {found.early:.1%} handed over "
        f"early, {found.gap * 1e6:.0f} us between two: {meaning}; host work {host * 1e6:.0f} us a step{bar}",
        flush=True,
    )
    seen = {"kind": kind, "batch": batch, "verdict": verdict, "host_seconds": host, **asdict(found)}
    seen |= {"host_limit_seconds": host_limit} if kind == "plain" else {}
    return seen, results_of(model, kind, batch, pairs, pure)


def check_answers(make: Any, kind: str, batch: int, num_tokens: int) -> int:
    """Run ahead and waited for: the same tokens, by a device whose rows do not see the batch they are in."""
    ahead, waited = (
        play(make(run_ahead=run_ahead), requests(kind, batch, num_tokens, f"a{run_ahead}"))
        for run_ahead in (True, False)
    )
    differ = [name for name, tokens in ahead.items() if tokens != waited[name]]
    print(
        f"{'OFF' if differ else 'ok'} answers, {kind}: {len(differ)} of {batch} differ when run ahead {differ[:4]}",
        flush=True,
    )
    return int(bool(differ))


def open_subject(model: str, kind: str, batch: int, *, deterministic: bool) -> tuple[Device, ModelSource, Plan]:
    """A loaded device. The null device computes exactly, whatever the plan."""
    if kind == "null":
        from dragoman_agent.device.null import NullDevice
        from dragoman_agent.device.null_model import NullModel, default_null_plan

        null = NullModel()
        device: Device = NullDevice(speed=10.0)
        plan = default_null_plan(null, max_num_seqs=batch)
        device.load(null, plan, lambda _: None)
        return device, null, plan
    from dragoman_agent.device.cuda import CudaDevice
    from dragoman_agent.model.source import open_model
    from dragoman_agent.pal.planner import Limits, plan_for
    from dragoman_agent.pal.probe import profile_device
    from dragoman_agent.pal.switches import Switches

    source = open_model(f"random:{model}", Path())
    profile, _ = profile_device(usable_gpu(), Path("/tmp/dragoman-check"))
    limits = Limits(
        max_context_tokens=1024,
        max_num_seqs=batch,
        memory_utilization=0.2,
        kv_dtype="bf16",
        deterministic=deterministic,
    )
    plan, _ = plan_for(profile, source.config, limits, Switches())
    device = CudaDevice()
    device.load(source, plan, lambda _: None)
    return device, source, plan


@contextmanager
def cores(options: argparse.Namespace, *, deterministic: bool) -> Iterator[Any]:
    """Makes cores on a loaded device that has run before."""
    device, source, plan = open_subject(options.model, options.device, options.batch, deterministic=deterministic)
    tokenizer = TextTokenizer.from_files(source.tokenizer)

    def make(**fields: Any) -> EngineCore:
        digest, vocab_size = bytes.fromhex(source.digest), source.config.vocab_size
        return EngineCore(device, tokenizer, digest, plan, vocab_size=vocab_size, **fields)

    try:
        run_all(build_core(device, source, plan), requests("plain", 2, 4, "warm"))
        yield make
    finally:
        device.close()


def main(argv: list[str] | None = None) -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cuda", "null"), default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="a JSON file for the raw results")
    parser.add_argument("--traces", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-trace")
    parser.add_argument(
        "--host-limit", type=float, default=MAX_HOST_SECONDS, help="the bar, in seconds of host work a step"
    )
    options = parser.parse_args(argv)
    seen: list[dict[str, Any]] = []
    results: list[Result] = []
    off: dict[str, int] = {}

    def save() -> None:
        """What was found so far: a run that is ended has it."""
        name = options.model if options.device == "cuda" else options.device
        words = ", ".join(kind for kind, differ in off.items() if differ) or "none"
        answers = result(
            "overlap", "answers", "identical_answers", "share", [1.0 - differ for differ in off.values()],
            predicted=1.0, value="min", note=f"{name}, run ahead and waited for, a sample a kind of request; differing: {words}",
        )  # fmt: skip
        keep(
            options.out, "", 0 if options.device == "cuda" else None, [*results, answers], command=f"{COMMAND} {name}",
            overlap=seen, answers_off=sum(off.values()),
        )  # fmt: skip

    with cores(options, deterministic=True) as make:
        for kind in KINDS:
            off[kind] = check_answers(make, kind, min(options.batch, 16), min(options.tokens, 48))
            save()
    with cores(options, deterministic=False) as make:
        for kind in KINDS:
            batch = options.batch if kind == "plain" else min(options.batch, 32)
            one, found = check_overlap(
                make, options.traces, options.model, kind, batch, options.tokens, options.host_limit
            )
            seen.append(one)
            results += found
            save()
    return 1 if any(off.values()) or any(one["verdict"] == "OFF" for one in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
