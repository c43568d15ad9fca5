"""K and V in eight bits on a GPU: how far logits move from sixteen bits, how often the best token stays, and what it is worth.

PYTHONPATH=. python tests/gpu/check_kv_fp8.py [--models NAME...] [--speed] [--out FILE.json]
    EMBEDDED_MODEL names the GGUF file of the embedded model. Exit 1 when a clear best token (a lead over 0.5 in logprob) changes in more than 1 % of the places of a trained model.
    benchmarks.record_gpu records FILE.json: a sample a text of the embedded model, a quarter of a random model's one, a run of equal steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.card import Result, keep, result, usable_gpu
from benchmarks.gpu_setup import Loaded
from tests.agent.device.conformance.steps import Part, step_of
from tests.gpu.check_determinism import Report, step_ms
from tests.gpu.determinism_rig import CutSource, Rig

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Sampling, Start, Stop
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches

MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")
LAYERS = {"qwen3-8b": 12}  # of 36: the whole model takes a minute to make
DECODES = ((1, 8192), (32, 1024), (256, 1024), (64, 4096))
LONG_TOKENS = 4096  # of the text of a random model
NUM_PARTS = 4  # of it, a sample each
NUM_RUNS = 3  # of equal steps, a sample each
TEXT_TOKENS = 1000  # that the embedded model writes, and is asked about again
CLEAR_LEAD = 0.5
EMBEDDED = "smollm2-135m"
COMMAND = "python tests/gpu/check_kv_fp8.py"
UNITS = {
    "top1_agreement": "share", "clear_agreement": "share", "mean_logprob_moved": "nats", "p99_logprob_moved": "nats",
    "nll_bf16": "nats", "nll_fp8": "nats",
}  # fmt: skip
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "transformers_smollm2.json"


@dataclass(frozen=True)
class Read:
    """What a model said of one text: logprob of each next token, the two best ids and their logprobs."""

    logprobs: np.ndarray[Any, Any]
    best: np.ndarray[Any, Any]
    best_logprobs: np.ndarray[Any, Any]

    def part(self, places: slice) -> Read:
        """Of some places."""
        return Read(self.logprobs[places], self.best[places], self.best_logprobs[places])


def plan_of(profile: Profile, source: ModelSource, kv: str, *, num_blocks: int | None = None) -> Plan:
    context = min(8256, source.config.max_context_tokens)
    limits = Limits(max_context_tokens=context, max_num_seqs=256, kv_dtype=kv)
    plan, _ = plan_for(profile, source.config, limits, Switches())
    return plan if num_blocks is None else replace(plan, num_blocks=min(plan.num_blocks, num_blocks))


def read(device: CudaDevice, plan: Plan, tokens: Sequence[int], chunk: int = 512) -> Read:
    """A text in chunks: what earlier ones wrote is read back from the cache."""
    (blocks,) = Rig(device, plan).blocks([len(tokens)])
    parts = []
    for start in range(0, len(tokens) - 1, chunk):
        ids = tokens[start : min(start + chunk, len(tokens) - 1)]
        step = step_of([Part(ids, start, blocks, sampled=False)], plan.page_size)
        step.score_rows = np.arange(len(ids), dtype=np.int32)
        step.score_targets = np.array(tokens[start + 1 : start + 1 + len(ids)], np.int32)
        step.num_score_logprobs = 2
        result = device.submit(step).result()
        parts.append((result.score_logprobs, result.score_top_ids, result.score_top_logprobs))
    return Read(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def moves(wide: Read, narrow: Read) -> dict[str, Any]:
    """Eight bits beside sixteen, place by place. Log-probabilities in nats."""
    lead = wide.best_logprobs[:, 0] - wide.best_logprobs[:, 1]
    same = wide.best[:, 0] == narrow.best[:, 0]
    clear = lead > CLEAR_LEAD
    moved = np.abs(narrow.logprobs - wide.logprobs)
    return {
        "places": len(same),
        "top1_agreement": round(float(same.mean()), 5),
        "clear_places": int(clear.sum()),
        "clear_agreement": round(float(same[clear].mean()), 5) if clear.any() else None,
        "mean_logprob_moved": round(float(moved.mean()), 5),
        "p99_logprob_moved": round(float(np.quantile(moved, 0.99)), 5),
        "nll_bf16": round(float(-wide.logprobs.mean()), 5),
        "nll_fp8": round(float(-narrow.logprobs.mean()), 5),
        "late_mean_moved": round(float(moved[-len(moved) // 4 :].mean()), 5),
    }


def joined(reads: Sequence[Read]) -> Read:
    """Of all places."""
    return Read(
        *(np.concatenate([getattr(one, name) for one in reads]) for name in ("logprobs", "best", "best_logprobs"))
    )


def compare(report: Report, name: str, wide: Sequence[Read], narrow: Sequence[Read], *, trained: bool) -> None:
    """Of texts: all their places decide, each is a sample of the results."""
    found = moves(joined(wide), joined(narrow))
    report.value(f"{name} accuracy", found)
    bad = not math.isfinite(found["nll_fp8"]) or (trained and (found["clear_agreement"] or 0) < 0.99)
    report.num_off += bad
    print(f"{'OFF' if bad else 'ok':3} {name}: best token the same in {found['top1_agreement']:.2%} of {found['places']} places, "
          f"in {found['clear_agreement']} of the clear ones")  # fmt: skip
    each = [moves(*pair) for pair in zip(wide, narrow, strict=True)]
    report.results += accuracy_results(name, found, each, trained=trained)


def accuracy_results(name: str, whole: Mapping[str, Any], each: Sequence[Mapping[str, Any]], *, trained: bool) -> list[Result]:  # fmt: skip
    """A record a metric, a sample a text, with all places' figure in the note."""
    what = "texts that the model wrote itself" if trained else "parts of a random text, random weights"
    made = []
    for metric, unit in UNITS.items():
        samples = [one[metric] for one in each if one[metric] is not None]
        if samples:
            places = whole["clear_places"] if metric == "clear_agreement" else whole["places"]
            note = f"{whole[metric]} of all {places} places of {len(samples)} {what}; fp8 beside bf16"
            if metric == "clear_agreement":
                note += f"; clear: a lead over {CLEAR_LEAD} nats" + ("; bar 0.99 of all" if trained else "")
            made.append(result("kv_fp8", name, metric, unit, samples, note=note))
    return made


def texts(device: CudaDevice, source: ModelSource, plan: Plan) -> list[list[int]]:
    """What the embedded model writes to the recorded prompts, with them in front."""
    prompts = [entry["prompt_ids"] for entry in json.loads(GOLDEN.read_text())["greedy"]][:4]
    core = build_core(device, source, plan)
    starts = [
        Start(str(i), ids, Sampling(temperature=0.7, seed=i), Stop(max_output_tokens=TEXT_TOKENS), credit=1 << 30)
        for i, ids in enumerate(prompts)
    ]
    written = [list(ids) for ids in prompts]
    for event in run_all(core, starts):
        if isinstance(event, Delta):
            written[int(event.request_id)].extend(event.token_ids)
    return written


def check_embedded(report: Report, profile: Profile) -> None:
    """A trained model's own text."""
    try:
        source = open_model(os.environ.get("EMBEDDED_MODEL", "embedded"), Path("/tmp/dragoman-check"))
    except ModelFileError as error:
        report.value("embedded model", f"left out: {error}")
        return
    plan = plan_of(profile, source, "bf16", num_blocks=512)
    device = CudaDevice(profile.device.index)
    device.load(source, plan, lambda _: None)
    written = texts(device, source, plan)
    wide = [read(device, plan, tokens) for tokens in written]
    device.close()
    plan = plan_of(profile, source, "fp8", num_blocks=512)
    device = CudaDevice(profile.device.index)
    device.load(source, plan, lambda _: None)
    report.value("embedded scales", device.info["kv_scales"])
    narrow = [read(device, plan, tokens) for tokens in written]
    device.close()
    compare(report, EMBEDDED, wide, narrow, trained=True)


def check_model(report: Report, profile: Profile, name: str, *, speed: bool) -> None:
    """A random model of real shape: accuracy at a long context, and time."""
    source = CutSource(name, LAYERS.get(name, 99))
    tokens = np.random.default_rng(3).integers(0, source.config.vocab_size, LONG_TOKENS).tolist()
    loaded = Loaded(source)
    reads: dict[str, Read] = {}
    times: dict[str, dict[str, list[float]]] = {}
    predicted: dict[str, dict[str, float]] = {}
    for kv in ("bf16", "fp8"):
        plan = plan_of(profile, source, kv, num_blocks=None if speed else 200)
        device = loaded.device(plan)
        reads[kv], times[kv], predicted[kv] = read(device, plan, tokens), {}, {}
        for batch, context in DECODES if speed else ():
            if batch * -(-context // plan.page_size) < plan.num_blocks and context <= plan.max_context_tokens:
                shape = f"{batch}x{context}"
                predicted[kv][shape] = plan.step_model.decode_step_seconds(batch, context)
                step = decode_batch(plan, batch, context)
                times[kv][shape] = [step_ms(device, lambda step=step: step) for _ in range(NUM_RUNS)]
        if kv == "fp8":
            report.value(f"{name} scales", device.info["kv_scales"][:4])
        device.close()
    size = -(-len(reads["bf16"].logprobs) // NUM_PARTS)
    parts = [slice(start, start + size) for start in range(0, NUM_PARTS * size, size)]
    wide, narrow = ([reads[kv].part(places) for places in parts] for kv in ("bf16", "fp8"))
    compare(report, name, wide, narrow, trained=False)
    for one in speed_results(name, source.config.num_layers, times, predicted):
        report.results.append(one)
        report.value(f"{one['case']} speedup", one["note"])


def speed_results(name: str, num_layers: int, times: Mapping[str, Mapping[str, Sequence[float]]], predicted: Mapping[str, Mapping[str, float]]) -> list[Result]:  # fmt: skip
    """Sixteen bits' milliseconds over eight bits', of the shapes for which both have room."""
    made = []
    for shape in (shape for shape in times["bf16"] if shape in times["fp8"]):
        ratios = [wide / narrow for wide, narrow in zip(times["bf16"][shape], times["fp8"][shape], strict=True)]
        expected = round(predicted["bf16"][shape] / predicted["fp8"][shape], 3)
        words = "; ".join(f"{kv} {', '.join(f'{ms:.3f}' for ms in times[kv][shape])} ms" for kv in ("bf16", "fp8"))
        note = f"{statistics.median(ratios):.3f} ({expected} predicted): {words} a decode step, {num_layers} layers"
        made.append(
            result("kv_fp8", f"{name}-decode-{shape}", "speedup", "ratio", ratios, predicted=expected, note=note)
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Check and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS[:1])
    parser.add_argument("--speed", action="store_true", help="time whole models too; takes the whole card")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    begun, report = time.monotonic(), Report()
    profile, _ = profile_device(usable_gpu(), Path("/tmp/dragoman-check"))
    for name in ("embedded", *options.models):
        with report.guarded(name):
            if name == "embedded":
                check_embedded(report, profile)
            else:
                check_model(report, profile, name, speed=options.speed)
        command = COMMAND + " --speed" * options.speed
        keep(options.out, "", profile.device.index, report.results, command=command, values=report.values)
    print(f"kv_fp8: {report.num_off} checks off, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if report.num_off else 0


if __name__ == "__main__":
    sys.exit(main())
