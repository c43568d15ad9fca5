"""Decode, the 256-request benchmark and prefill of one model on a GPU, through the engine core in this process.

python -m benchmarks.engine_gpu MODEL [--benches decode,nano,prefill] [--out FILE]      FILE is written anew with each result
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.card import Result, keep, result
from benchmarks.gpu_setup import LIMITS, setup

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Failed, Sampling, Start, Step, Stop
from dragoman_agent.pal.plan import Plan

# Microseconds of host work a step by batch: middles of what NOTES.md predicts for an H200's host, "Host work a step".
HOST_PREDICTED = {1: 225.0, 32: 195.0, 256: 290.0}
MAX_HOST_MICROSECONDS = 300  # the bar, at 256
COMPANY_FRAMES = 400  # of a stream beside which prompts arrive
_SETTLED_FRAMES = 20  # by which all of them decode

_KEYS = itertools.count()


def start(name: str, prompt: list[int], num_tokens: int, temperature: float = 0.0) -> Start:
    """A request that runs to its length. Its tokens leave as ids, whose text is the other process' work."""
    stop = Stop(max_output_tokens=num_tokens)
    return Start(name, prompt, Sampling(temperature=temperature), stop, credit=1 << 30, key=next(_KEYS))


def run(core: EngineCore, requests: list[Start]) -> tuple[float, list[Step]]:
    """Seconds until all have ended, and the frames."""
    steps: list[Step] = []
    begin = time.perf_counter()
    events = run_all(core, requests, on_step=steps.append)
    seconds = time.perf_counter() - begin
    for event in events:
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
    return seconds, steps


def decode(core: EngineCore, batch: int, num_tokens: int, repeats: int) -> tuple[Result, Result]:
    """Milliseconds a step as vLLM's anchor was taken: (wall - wall of the same call with one token) / (tokens - 1); and
    microseconds of the host's work a step, a sample a run.
    """
    samples, device_ms, host_us = [], [], []
    for repeat in range(repeats):
        rng = random.Random(repeat)
        prompts = [[rng.randrange(10000) for _ in range(128)] for _ in range(batch)]
        short, _ = run(core, [start(f"s{repeat}-{i}", p, 1) for i, p in enumerate(prompts)])
        prompts = [[rng.randrange(10000) for _ in range(128)] for _ in range(batch)]
        long, steps = run(core, [start(f"l{repeat}-{i}", p, num_tokens) for i, p in enumerate(prompts)])
        samples.append((long - short) / (num_tokens - 1) * 1e3)
        pure = [s for s in steps if s.load.decode_tokens == batch and not s.load.prefill_tokens]
        device_ms.append(statistics.median(s.step_seconds for s in pure) * 1e3)
        host_us.append(statistics.median(s.host_seconds for s in pure) * 1e6)
    device, host = statistics.median(device_ms), statistics.median(host_us) * 1e-3
    note = f"median step on the device {device:.3f} ms, host work {host:.3f} ms"
    return result("decode", f"b{batch}", "ms_per_step", "ms", samples, note=note), host_result(batch, host_us, device)


def host_result(batch: int, samples: list[float], device_ms: float) -> Result:
    """Beside its bar. The frames stay in this process."""
    bar = f"; bar {MAX_HOST_MICROSECONDS} us" if batch == max(HOST_PREDICTED) else ""
    note = (
        f"medians of steps that decode alone, frames not encoded and not sent; the device takes {device_ms:.3f} ms{bar}"
    )
    predicted = HOST_PREDICTED.get(batch)
    return result("host_step", f"b{batch}", "microseconds", "us", samples, predicted=predicted, note=note)


def nano(core: EngineCore, repeats: int) -> Result:
    """The 256-request benchmark of nano-vllm, as defined in its README: output tokens a second."""
    samples = []
    for repeat in range(repeats):
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
        lengths = [rng.randint(100, 1024) for _ in range(256)]
        # Every repeat has a salt of its own: a prefix cache must not serve the second run.
        requests = [start(f"n{repeat}-{i}", p, n, 0.6) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        for request in requests:
            request.cache_salt = str(repeat)
        seconds, steps = run(core, requests)
        samples.append(sum(lengths) / seconds)
        print(
            f"  nano: {seconds:.2f} s, {samples[-1]:.0f} tok/s, {len(steps)} frames, device "
            f"{sum(s.step_seconds for s in steps):.2f} s, host {sum(s.host_seconds for s in steps):.2f} s, "
            f"preemptions {steps[-1].load.preemptions}", flush=True,
        )  # fmt: skip
    return {"bench": "nano", "case": "nano", "metric": "output_tokens_per_second", "samples": samples}


def prefill(core: EngineCore, batch: int, length: int, repeats: int) -> Result:
    """Prompt tokens a second until all have their first token."""
    samples = []
    for repeat in range(repeats):
        rng = random.Random(1000 + repeat)
        prompts = [[rng.randrange(10000) for _ in range(length)] for _ in range(batch)]
        seconds, _ = run(core, [start(f"p{batch}-{repeat}-{i}", p, 1) for i, p in enumerate(prompts)])
        samples.append(batch * length / seconds)
    return {"bench": "prefill", "case": f"{batch}x{length}", "metric": "tokens_per_second", "samples": samples}


def company(core: EngineCore, num_streams: int, length: int, every: int, repeats: int) -> tuple[Result, Result]:
    """Milliseconds between the frames of streams that decode while a prompt arrives with every so many of them: mean and
    99th percentile.
    """
    means, worst = [], []
    for repeat in range(repeats):
        rng = random.Random(2000 + repeat)
        seen: list[float] = []

        def arrive(step: Step, rng: random.Random = rng, seen: list[float] = seen) -> None:
            seen.append(time.perf_counter())
            if len(seen) % every == 0 and len(seen) < COMPANY_FRAMES:
                core.receive(start(f"a{len(seen)}", [rng.randrange(10000) for _ in range(length)], 1))

        prompts = [[rng.randrange(10000) for _ in range(128)] for _ in range(num_streams)]
        streams = [start(f"c{repeat}-{i}", prompt, COMPANY_FRAMES) for i, prompt in enumerate(prompts)]
        failed = [event for event in run_all(core, streams, on_step=arrive) if isinstance(event, Failed)]
        if failed:
            raise RuntimeError(failed[0].message)
        gaps = sorted(1e3 * (b - a) for a, b in itertools.pairwise(seen[_SETTLED_FRAMES:COMPANY_FRAMES]))
        means.append(statistics.fmean(gaps))
        worst.append(gaps[int(0.99 * len(gaps))])
    case = {"bench": "company", "case": f"b{num_streams}-{length}-every-{every}"}
    return {**case, "metric": "mean_gap_ms", "samples": means}, {**case, "metric": "p99_gap_ms", "samples": worst}


def predict_nano(plan: Plan) -> float:
    """Tokens a second by the step model alone: its prefill, then each step at its batch and mean context."""
    rng = random.Random(0)
    prompts = [len([rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]) for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    seconds = plan.step_model.prefill_seconds(sum(prompts))
    for step in range(max(lengths)):
        alive = [p + step for p, n in zip(prompts, lengths, strict=True) if n > step]
        seconds += plan.step_model.decode_step_seconds(len(alive), sum(alive) / len(alive))
    return sum(lengths) / seconds


def main() -> None:
    """Run and print; `--out` gets the raw results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--benches", default="decode,nano,prefill,company")
    parser.add_argument("--mixed-graphs", choices=("planned", "off"), default="planned", help="of steps with prompts")
    parser.add_argument("--lists", choices=("planned", "off"), default="planned", help="work lists of decode attention")
    parser.add_argument("--batches", default="1,32,256")
    parser.add_argument("--max-seqs", type=int, default=LIMITS.max_num_seqs, help="that the plan has graphs for")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = setup(options.model, replace(LIMITS, max_num_seqs=options.max_seqs))
    source, profile, plan = here.source, here.profile, here.plan
    if options.mixed_graphs == "off":
        plan = replace(plan, mixed_graph_tokens=())
    if options.lists == "off":
        plan = replace(plan, decode_lists=())
    device = CudaDevice()
    begin = time.perf_counter()
    device.load(source, plan, lambda _: None)
    print(f"loaded in {time.perf_counter() - begin:.1f} s: {device.info}", flush=True)
    core = build_core(device, source, plan)
    run(core, [start("warm", [1, 2, 3], 8)])
    gc.collect()
    gc.freeze()  # as the engine's process does once it serves
    results: list[Result] = []
    benches = options.benches.split(",")

    def note(measured: Result, predicted: float | None, text: str) -> None:
        measured["predicted"] = predicted
        if options.mixed_graphs == "off":
            measured["case"] = f"{measured['case']}-by-kernel"
        if options.lists == "off":
            measured["case"] = f"{measured['case']}-without-lists"
        results.append(measured)
        print(f"  {text}", flush=True)
        keep(options.out, options.model, profile.device.index, results, info=device.info)

    if "decode" in benches:
        for batch in map(int, options.batches.split(",")):
            decoded, host = decode(core, batch, 512 if batch == 1 else 256, options.repeats)
            predicted = plan.step_model.decode_step_seconds(batch, 128 + 128) * 1e3
            note(decoded, predicted, f"decode b{batch}: {decoded} predicted {predicted:.2f} ms")
            note(host, HOST_PREDICTED.get(batch), f"host work b{batch}: {host}")
    if "nano" in benches:
        predicted = predict_nano(plan)
        note(nano(core, options.repeats), predicted, f"nano predicted {predicted:.0f}")
    if "prefill" in benches:
        for batch, length in ((1, 8192), (16, 1024)):
            prompts = prefill(core, batch, length, options.repeats)
            note(prompts, plan.step_model.prefill_tokens_per_second, f"prefill: {prompts}")
    if "company" in benches:
        for length in (64, 512):
            alone = prefill(core, 1, length, 10 * options.repeats)
            note(alone, length / plan.step_model.prefill_seconds(length), f"prompt alone: {alone}")
            step = plan.step_model.decode_step_seconds(32, 300)
            added = plan.step_model.prefill_seconds(length)
            for gaps, predicted in zip(
                company(core, 32, length, 5, options.repeats), (step + added / 5, step + added), strict=True
            ):
                note(gaps, 1e3 * predicted, f"company: {gaps} predicted {1e3 * predicted:.2f} ms")
    device.close()


if __name__ == "__main__":
    main()
