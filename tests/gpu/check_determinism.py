"""Deterministic plans on a GPU: the logits of a row have the same bits alone and in company, in any chunks, and after re-entry.

PYTHONPATH=. python tests/gpu/check_determinism.py [--models NAME...] [--layers 6] [--cost] [--no-rows] [--sweep] [--out FILE.json]
    EMBEDDED_MODEL names the GGUF file of the embedded model. Prints a line a check; exit 1 when one is off. --cost times deterministic steps beside usual ones (--no-rows: that
    alone), --sweep times tiles. benchmarks.record_gpu records FILE.json: a sample a model for the rows, so that three models are needed, and three a shape for the cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.card import Result, keep, result, usable_gpu
from benchmarks.gpu_setup import Loaded
from tests.agent.device.conformance.steps import Part, step_of
from tests.gpu.determinism_rig import CHUNKS, CutSource, Rig, Stream, make_sequences

from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, Sampling, Start, Stop
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches

MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")
COMPANIES = (1, 8, 64, 256, 512)  # the last: the most that a plan has graphs for
DECODE_STEPS = 6
RESUME = (211, 96, 3)  # prompt, tokens after it, and after how many of them each the stream is taken up again
COST_LAYERS = {"qwen3-8b": 12}  # of 36: the whole model takes a minute to make
COST_DECODES = ((1, 200), (1, 4096), (32, 1024), (256, 1024))
COST_PREFILLS = ((16, 512), (1, 4096))  # prompts, tokens each
COST_REPEATS = 3
COST_PREDICTED = {"qwen3-0.6b-decode-1x200": 1.12, "qwen3-0.6b-prefill-16x512": 1.28}  # NOTES.md, "Deterministic mode"
ROW_CASES = {**{f"{count} together": str(count) for count in COMPANIES}, "chunks": "chunks", "re-entry": "re-entry"}
COMMAND = "python tests/gpu/check_determinism.py"

Answer = tuple[list[int], list[float]]


class Report:
    """Prints what was found and keeps it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.results: list[Result] = []
        self.num_off = 0

    def rows(self, name: str, pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Whether every pair (where, found, wanted) has equal bits."""
        bad = [(where, found, wanted) for where, found, wanted in pairs if not torch.equal(found, wanted)]
        share = 1 - len(bad) / max(len(pairs), 1)
        self.values[name] = {"identical_rows": share, "rows": len(pairs)}
        text = f"{'ok' if not bad else 'OFF':3} {name}: {len(pairs) - len(bad)} of {len(pairs)} rows have the same bits"
        if bad:
            self.num_off += 1
            where, found, wanted = bad[0]
            worst = float((found.float() - wanted.float()).abs().max())
            text += f"; first at {where}, {worst:.2e} apart"
            self.values[name]["first"] = where
        print(text, flush=True)

    def value(self, name: str, value: Any) -> None:
        """A figure."""
        self.values[name] = value
        print(f"    {name}: {value}", flush=True)

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """One part that fails must not cost the others."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            self.num_off += 1
            self.values[f"{name} failed"] = f"{type(error).__name__}: {error}"
            print(f"OFF {name}: {type(error).__name__}: {error}", flush=True)
        print(f"    {name} took {time.monotonic() - begun:.1f} s", flush=True)


def plan_of(
    profile: Profile, source: ModelSource, *, deterministic: bool, max_context: int = 4608, max_num_seqs: int = 256
) -> Plan:
    """The plan, with no more blocks than the checks need, so that other checks may share the card."""
    limits = Limits(
        max_context_tokens=min(max_context, source.config.max_context_tokens), max_num_seqs=max_num_seqs,
        deterministic=deterministic, kv_dtype="bf16",
    )  # fmt: skip
    plan, _ = plan_for(profile, source.config, limits, Switches())
    wanted = max_num_seqs * (1024 // plan.page_size + 1) + 2 * (max_context // plan.page_size + 1)
    return replace(plan, num_blocks=min(plan.num_blocks, wanted))


def check_rows(report: Report, name: str, rig: Rig, vocab_size: int, longest: int, companies: Sequence[int], resume: tuple[int, int, int] = RESUME) -> None:  # fmt: skip
    """Alone against company, chunks, places in the arena, and re-entry."""
    rng = np.random.default_rng(1)
    sequences = make_sequences(rng, max(companies), vocab_size, longest, DECODE_STEPS)
    alone = [rig.alone(one) for one in sequences]
    for count in companies:
        chosen = range(count) if count == max(companies) else sorted(rng.permutation(len(sequences))[:count].tolist())
        found = rig.together([sequences[i] for i in chosen])
        pairs = [
            (f"sequence {i} after {place} tokens", found[row][at], alone[i][at])
            for row, i in enumerate(chosen)
            for at, place in enumerate(sequences[i].places)
        ]
        report.rows(f"{name} {count} together", pairs)
    pairs = []
    for chunk in sorted({min(chunk, rig.plan.max_batch_tokens) for chunk in CHUNKS}):
        for at, row in enumerate(rig.alone(sequences[0], chunk)):
            pairs.append((f"chunks of {chunk}, place {at}", row, alone[0][at]))
    report.rows(f"{name} chunks", pairs)
    prompt, steps, every = resume
    one = Stream(rng.integers(0, vocab_size, prompt + steps).tolist(), prompt)
    decoded = rig.alone(one)
    pairs, others = [], sequences[1 : min(8, max(companies))]
    for at in range(0, steps + 1, every):
        again = Stream(one.tokens[: one.prompt + at], one.prompt + at)
        pairs.append((f"re-entry after {at} tokens", rig.alone(again)[0], decoded[at]))
        if at % (8 * every) == 0:
            pairs.append((f"re-entry beside others after {at}", rig.together([*others, again])[-1][0], decoded[at]))
    report.rows(f"{name} re-entry", pairs)


def check_model(report: Report, profile: Profile, name: str, num_layers: int) -> None:
    """One random model of real shape, cut."""
    source = CutSource(name, num_layers)
    plan = plan_of(profile, source, deterministic=True, max_num_seqs=max(COMPANIES))
    if max(plan.graph_batch_sizes, default=0) < max(COMPANIES):
        raise ValueError(f"the plan has graphs for {plan.graph_batch_sizes}, not for {max(COMPANIES)} sequences")
    device = CudaDevice(profile.device.index)
    begun = time.monotonic()
    device.load(source, plan, lambda _: None)
    report.value(f"{name} load seconds", round(time.monotonic() - begun, 1))
    try:
        with torch.inference_mode():
            check_rows(report, name, Rig(device, plan), source.config.vocab_size, 3001, COMPANIES)
    finally:
        device.close()


def ask(core: Any, starts: Sequence[Start]) -> dict[str, Answer]:
    """Tokens and their logprobs of every request, all given at once."""
    answers: dict[str, Answer] = {start.request_id: ([], []) for start in starts}
    for event in run_all(core, starts):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        if isinstance(event, Delta):
            answers[event.request_id][0].extend(event.token_ids)
            answers[event.request_id][1].extend(entry.logprob for entry in event.logprobs)
    return answers


def check_engine(report: Report, profile: Profile) -> None:
    """The embedded model through the scheduler: prefix hits and preemption (few blocks), greedy and drawn, alone and at once."""
    try:
        source = open_model(os.environ.get("EMBEDDED_MODEL", "embedded"), Path("/tmp/dragoman-check"))
    except ModelFileError as error:
        report.value("embedded model", f"left out: {error}")
        return
    plan = plan_of(profile, source, deterministic=True, max_context=2048)
    plan = replace(plan, num_blocks=min(plan.num_blocks, 4 * plan.max_context_tokens // plan.page_size + 1))
    device = CudaDevice(profile.device.index)
    device.load(source, plan, lambda _: None)
    core = build_core(device, source, plan)
    prompts = [[(i * 7919 + j * 104729) % 40000 + 100 for j in range(1 + (i * 37) % 400)] for i in range(64)]
    prompts[1::4] = [prompts[0] * 3 + own for own in prompts[1::4]]  # a common beginning

    def start(i: int, salt: str) -> Start:
        drawn = Sampling(temperature=0.8, top_p=0.9 if i % 2 else 1.0, seed=i, num_logprobs=0 if i % 3 else -1)
        sampling = drawn if i % 4 else Sampling(temperature=0.0, num_logprobs=0)
        stop = Stop(max_output_tokens=48)
        return Start(f"{salt}{i}", prompts[i], sampling, stop, credit=1 << 30, cache_salt=salt[0])

    together = ask(core, [start(i, "t") for i in range(len(prompts))])
    same = [ask(core, [start(i, "a")])[f"a{i}"] == together[f"t{i}"] for i in range(len(prompts))]
    device.close()
    report.num_off += not all(same)
    words = f"{sum(same)} of {len(same)}"
    report.value("embedded model: answers with the same tokens and logprobs", words)
    note = f"{words} answers of {source.config.name}, alone and at once: tokens and logprobs, with prefix hits and preemption"
    report.results.append(
        result("deterministic", "answers", "identical_answers", "share", same, predicted=1.0, value="min", note=note)
    )


def step_ms(device: CudaDevice, make: Callable[[], Any], count: int = 10) -> float:
    """Median device milliseconds of equal steps, two under way."""
    handles, seconds = [device.submit(make())], []
    for _ in range(count):
        handles.append(device.submit(make()))
        seconds.append(handles.pop(0).result().seconds)
    handles.pop().result()
    return round(1e3 * statistics.median(seconds[2:]), 4)


def check_cost(report: Report, profile: Profile, name: str) -> None:
    """Decode steps and prompts, deterministic beside usual."""
    source = CutSource(name, COST_LAYERS.get(name, 99))
    plans = [plan_of(profile, source, deterministic=deterministic) for deterministic in (False, True)]
    most = min(plan.max_batch_tokens for plan in plans)
    prefills = [(prompts, min(tokens, most // prompts)) for prompts, tokens in COST_PREFILLS]
    loaded, times = Loaded(source), []
    for plan in plans:
        device = loaded.device(plan)
        try:
            times.append(cost_times(device, plan, source.config.vocab_size, prefills))
        finally:
            device.close()
    for one in cost_results(name, source.config.num_layers, *times):
        report.results.append(one)
        report.value(f"{one['case']} cost", one["note"])


def cost_times(device: CudaDevice, plan: Plan, vocab_size: int, prefills: Sequence[tuple[int, int]]) -> dict[str, list[float]]:  # fmt: skip
    """Milliseconds of a step, `COST_REPEATS` times, by shape."""
    steps, rng = {}, np.random.default_rng(2)
    for batch, context in COST_DECODES:
        if batch * -(-context // plan.page_size) < plan.num_blocks:
            steps[f"decode-{batch}x{context}"] = decode_batch(plan, batch, context)
    for prompts, tokens in prefills:
        ids = rng.integers(0, vocab_size, tokens).tolist()
        parts = [Part(ids, 0, blocks) for blocks in Rig(device, plan).blocks([tokens] * prompts)]
        steps[f"prefill-{prompts}x{tokens}"] = step_of(parts, plan.page_size)
    return {
        shape: [step_ms(device, lambda step=step: step, 10 if shape.startswith("decode") else 6) for _ in range(COST_REPEATS)]
        for shape, step in steps.items()
    }  # fmt: skip


def cost_results(name: str, num_layers: int, usual: Mapping[str, Sequence[float]], fixed: Mapping[str, Sequence[float]]) -> list[Result]:  # fmt: skip
    """Deterministic over usual seconds of the shapes that both have."""
    made = []
    for shape in (shape for shape in usual if shape in fixed):
        ratios = [slow / quick for slow, quick in zip(fixed[shape], usual[shape], strict=True)]
        words = "; ".join(
            f"{mode} {', '.join(f'{ms:.3f}' for ms in times[shape])} ms"
            for mode, times in (("usual", usual), ("deterministic", fixed))
        )
        case = f"{name}-{shape}"
        note = f"{statistics.median(ratios):.3f}: {words} a step, {num_layers} layers"
        made.append(
            result("deterministic", case, "cost", "ratio", ratios, predicted=COST_PREDICTED.get(case), note=note)
        )
    return made


def row_results(values: Mapping[str, Any], models: Sequence[str]) -> list[Result]:
    """Share of rows with the same bits, a sample a model that was looked at."""
    made = []
    for label, case in ROW_CASES.items():
        found = {model: values[f"{model} {label}"] for model in models if f"{model} {label}" in values}
        if found:
            words = ", ".join(f"{one['rows']} of {model}" for model, one in found.items())
            shares = [one["identical_rows"] for one in found.values()]
            note = f"a sample a model; rows looked at: {words}"
            made.append(
                result("deterministic", case, "identical_rows", "share", shares, predicted=1.0, value="min", note=note)
            )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--no-rows", action="store_true", help="leave out what compares bits")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=500, help="parts begin no later than this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    begun = time.monotonic()
    report = Report()
    profile, _ = profile_device(usable_gpu(), Path("/tmp/dragoman-check"))
    parts: list[tuple[str, Callable[[], None]]] = []
    if not options.no_rows:
        parts += [(f"{m} rows", lambda m=m: check_model(report, profile, m, options.layers)) for m in options.models]  # type: ignore[misc]
        parts.append(("engine", lambda: check_engine(report, profile)))
    if options.cost:
        parts += [(f"{m} cost", lambda m=m: check_cost(report, profile, m)) for m in options.models]  # type: ignore[misc]
    if options.sweep:
        from benchmarks.fixed_kernels_gpu import sweep

        parts.append(("tiles", lambda: report.value("tiles", sweep(options.seconds - (time.monotonic() - begun)))))
    for name, part in parts:
        if time.monotonic() - begun > options.seconds:
            report.value(f"{name} left out", f"{options.seconds} s are over")
            continue
        with report.guarded(name):
            part()
        results = [*row_results(report.values, options.models), *report.results]
        command = COMMAND + " --cost" * options.cost + " --no-rows" * options.no_rows
        keep(options.out, "", profile.device.index, results, command=command, values=report.values)
    print(f"determinism: {report.num_off} checks off, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if report.num_off else 0


if __name__ == "__main__":
    sys.exit(main())
