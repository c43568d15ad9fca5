"""Each planned choice against exhaustive search over the same candidates. Run by `benchmarks.pal_gpu`.

Attention launches are timed alone at 4 batches and 3 contexts, forms of prefill attention at 3 shapes; page, graph sizes and chunk
by whole steps on the device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from benchmarks import attention_variants
from benchmarks.card import Result
from benchmarks.gpu_setup import Loaded, Setup, step_seconds

from dragoman_agent.device.base import SamplingBatch, StepBatch, no_ids
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.cuda_tuning import time_cases
from dragoman_agent.device.warm_up import decode_batch
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import planner_cuda
from dragoman_agent.pal.candidates import PAGE_SIZES, TuningCase
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.plan import DecodeAttention, Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.planner_batch import LATENCY_TARGET_SECONDS
from dragoman_agent.pal.planner_chunk import PATIENCE
from dragoman_agent.pal.step_cost import decode_attention_call
from dragoman_agent.pal.switches import Switches
from dragoman_kernels.triton.launches import DECODE_LAUNCHES, DECODE_SPLITS

BATCHES = (1, 8, 64, 256)
CONTEXTS = (256, 1024, 4096)
STEPS = 8
CHUNKS = (512, 1024, 2048, 4096, 8192, 12288, 16384)
LONGER = 1.3  # than predicted a chunk's step may still be within them
GRAPH_SETS: dict[str, tuple[int, ...]] = {
    "powers of two": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "every 16": (1, 8, *range(16, 257, 16)),
    "every 8": (1, 2, 4, *range(8, 257, 8)),
    "every 32": (1, 8, *range(32, 257, 32)),
}
MAX_KV_BYTES = 24 << 30  # of one attention case
BATCH_SPANS = (range(1, 33), range(33, 129), range(129, 257))
KV_TOKENS = 140_000  # of an arena: 256 sequences of 512 tokens
PAGE_BATCHES = (1, 16, 64)
TURNS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """One batch and context of a model, with every launch to time there."""

    batch: int
    context: int
    options: tuple[DecodeAttention, ...]  # the planned one first
    cases: tuple[TuningCase, ...]


def attention_shapes(here: Setup) -> list[Shape]:
    """What `attention` times; known before anything is timed, so that all of it can be compiled at once."""
    model, plan = here.source.config, here.plan
    found = []
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        blocks = batch * -(-context // plan.page_size)
        if 4 * blocks * plan.page_size * model.num_kv_heads * model.head_dim > MAX_KV_BYTES:
            continue
        options = tuple(_options(plan.decode_for(batch)))
        calls = [decode_attention_call(model, plan.page_size, option, batch, context) for option in options]
        cases = tuple(
            TuningCase(f"{index}", call.kind, call.shape, call.config, 0.0) for index, call in enumerate(calls)
        )
        found.append(Shape(batch, context, options, cases))
    return found


def attention(here: Setup) -> dict[str, list[float]]:
    """Share of the best by choice, a sample a shape: each choice is varied with the others as planned.

    What looks best among many is partly luck, so the best and the planned one are timed again in turns.
    """
    found: dict[str, list[float]] = {choice: [] for choice in _FIXED}
    for shape in attention_shapes(here):
        planned = shape.options[0]
        times = _timed(shape, shape.options, here.plan.device_index)
        if planned not in times:
            print(f"    b{shape.batch} c{shape.context}: the planned launch {_name(planned)} does not run", flush=True)
            for samples in found.values():
                samples.append(0.0)
            continue
        near = {
            choice: [one for one in times if _differs_only(one, planned, fixed)] for choice, fixed in _FIXED.items()
        }
        quickest = [
            one for options in (*near.values(), list(times)) for one in sorted(options, key=times.__getitem__)[:2]
        ]
        contenders = list(dict.fromkeys([planned, *quickest]))
        again = _timed_in_turns(shape, contenders, here.plan.device_index)
        for choice in _FIXED:
            found[choice].append(min(again[one] for one in near[choice] if one in again) / again[planned])
        best = min(again, key=lambda option: again[option])
        print(f"    b{shape.batch} c{shape.context}: planned {_name(planned)} {1e6 * again[planned]:.1f} us, best "
              f"{_name(best)} {1e6 * again[best]:.1f} us of {len(times)}", flush=True)  # fmt: skip
    return found


def _timed(shape: Shape, options: Iterable[DecodeAttention], index: int) -> dict[DecodeAttention, float]:
    """Seconds of those that run."""
    places = [shape.options.index(option) for option in options]
    answers = time_cases([dataclasses.asdict(shape.cases[place]) for place in places], index)
    return {
        shape.options[place]: seconds
        for place in places
        if isinstance(seconds := answers[shape.cases[place].key], float)
    }


def _timed_in_turns(shape: Shape, options: list[DecodeAttention], index: int) -> dict[DecodeAttention, float]:
    """Median seconds of `TURNS` rounds, every second one backwards."""
    rounds = [_timed(shape, options[::-1] if turn % 2 else options, index) for turn in range(TURNS)]
    return {option: statistics.median(times[option] for times in rounds) for option in options}


def _differs_only(option: DecodeAttention, planned: DecodeAttention, fixed: tuple[str, ...]) -> bool:
    return all(getattr(option, name) == getattr(planned, name) for name in fixed)


_FIXED: dict[str, tuple[str, ...]] = {
    "split-size": ("block_n", "num_warps", "num_stages"),
    "block-threads": ("num_splits",),
    "stages": ("num_splits", "block_n", "num_warps"),
}


def _options(planned: DecodeAttention) -> Iterable[DecodeAttention]:
    """Every split with the planned launch, and every launch with the planned split."""
    yield planned
    for splits in DECODE_SPLITS:
        if splits != planned.num_splits:
            yield replace(planned, num_splits=splits)
    for launch in DECODE_LAUNCHES:
        option = replace(planned, **dataclasses.asdict(launch))
        if option != planned:
            yield option


def _name(option: DecodeAttention) -> str:
    return f"s{option.num_splits}-n{option.block_n}-w{option.num_warps}-g{option.num_stages}"


def pages(here: Setup, loaded: Loaded) -> list[float]:
    """The planned page against the others, each with its own plan: a share a batch, of a step at 1,024 tokens."""
    plans = {
        page: small(with_page(here, page), graph_batch_sizes=PAGE_BATCHES, mixed_graph_tokens=(), chunk_graph=False)
        for page in PAGE_SIZES
    }
    devices = {}
    times: dict[int, list[list[float]]] = {page: [[] for _ in PAGE_BATCHES] for page in PAGE_SIZES}
    try:
        for page, plan in plans.items():
            devices[page] = loaded.device(plan)
        for turn in range(TURNS):
            for page in PAGE_SIZES[::-1] if turn % 2 else PAGE_SIZES:
                for samples, batch in zip(times[page], PAGE_BATCHES, strict=True):
                    samples.append(_step(devices[page], plans[page], batch, 1024))
    finally:
        for device in devices.values():
            device.close()
    medians = {page: [statistics.median(samples) for samples in each] for page, each in times.items()}
    shown = {page: [round(1e3 * seconds, 3) for seconds in each] for page, each in medians.items()}
    print(f"    pages {shown} planned {here.plan.page_size}", flush=True)
    return [
        min(column) / own
        for column, own in zip(zip(*medians.values(), strict=True), medians[here.plan.page_size], strict=True)
    ]


def small(plan: Plan, **changes: Any) -> Plan:
    """The plan with an arena that is taken quickly and leaves room for other models' weights."""
    return replace(plan, num_blocks=KV_TOKENS // plan.page_size + 1, max_context_tokens=4096, **changes)


def with_page(here: Setup, page: int) -> Plan:
    """The plan as it would be with `page`."""
    if page == here.plan.page_size:
        return here.plan
    with mock.patch.object(planner_cuda, "choose_page", lambda *_: (page, Decision("page-size", str(page), "given"))):
        return plan_for(here.profile, here.source.config, here.limits, Switches(), here.timings)[0]


def _step(device: CudaDevice, plan: Plan, batch: int, context: int) -> float:
    return statistics.median(step_seconds(device, decode_batch(plan, batch, context), STEPS))


def graphs(here: Setup, loaded: Loaded) -> list[float]:
    """The planned sizes against other sets: the mean step over few, some and many sequences, each padded to the next size."""
    fine = sorted({size for sizes in (*GRAPH_SETS.values(), here.plan.graph_batch_sizes) for size in sizes})
    plan = small(here.plan, graph_batch_sizes=tuple(fine), mixed_graph_tokens=(), chunk_graph=False)
    device = loaded.device(plan)
    cost = {size: _step(device, plan, size, 512) for size in fine}
    device.close()

    def means(sizes: Iterable[int]) -> list[float]:
        ordered = sorted(sizes)
        padded = {batch: cost[next(size for size in ordered if size >= batch)] for batch in range(1, 257)}
        return [statistics.fmean(padded[batch] for batch in span) for span in BATCH_SPANS]

    sets = {**GRAPH_SETS, "planned": here.plan.graph_batch_sizes}
    found = {name: means(sizes) for name, sizes in sets.items()}
    print(f"    graphs { ({name: (len(sets[name]), [round(1e3 * t, 3) for t in ts]) for name, ts in found.items()}) }")
    return [min(column) / own for column, own in zip(zip(*found.values(), strict=True), found["planned"], strict=True)]


def chunks(here: Setup, loaded: Loaded) -> dict[str, list[float]]:
    """The planned chunks against others that take no longer than the planner allows, in tokens a second: a share a repeat.

    Of prompts alone, and of prompts beside streams where the plan takes fewer there. Each has a graph, as a plan with that chunk
    would have it.
    """
    plan = here.plan
    target = here.limits.latency_target_seconds or LATENCY_TARGET_SECONDS
    sizes = chunk_sizes(plan, PATIENCE * target)
    graphs = sizes if plan.captured_tokens else ()
    device = loaded.device(
        small(plan, max_batch_tokens=sizes[-1], graph_batch_sizes=(), mixed_graph_tokens=graphs, chunk_graph=False)
    )
    rates: dict[int, list[float]] = {chunk: [] for chunk in sizes}
    try:
        for turn in range(TURNS):
            for chunk in sizes[::-1] if turn % 2 else sizes:
                steps = step_seconds(device, prefill_batch(plan, here.source.config, chunk), 2)
                rates[chunk] += [chunk / seconds for seconds in steps]
    finally:
        device.close()
    shown = {chunk: round(statistics.median(rate)) for chunk, rate in rates.items()}
    print(f"    chunks {shown} planned {plan.max_batch_tokens}, beside streams {plan.max_company_tokens}", flush=True)
    shares = {"chunk-size": chunk_shares(rates, plan.max_batch_tokens, PATIENCE * target)}
    if plan.max_company_tokens != plan.max_batch_tokens:
        shares["chunk-size-beside-streams"] = chunk_shares(rates, plan.max_company_tokens, target)
    return shares


def chunk_sizes(plan: Plan, max_seconds: float) -> tuple[int, ...]:
    """The planned ones, and those of `CHUNKS` that surely end within `max_seconds`, or nearly."""
    most = LONGER * max_seconds * plan.step_model.prefill_tokens_per_second
    return tuple(sorted({*(chunk for chunk in CHUNKS if chunk <= most), *plan.full_tokens}))


def chunk_shares(rates: Mapping[int, Sequence[float]], planned: int, max_seconds: float) -> list[float]:
    """Of the best rate of a chunk that is no longer than the planned one or takes at most `max_seconds`; a share a repeat."""
    allowed = [
        statistics.median(rate)
        for chunk, rate in rates.items()
        if chunk <= planned or chunk / statistics.median(rate) <= max_seconds
    ]
    return [min(rate / max(allowed), 1.0) for rate in rates[planned]]


def prefill_batch(plan: Plan, model: ModelConfig, tokens: int, prompt: int = 512) -> StepBatch:
    """A step of whole prompts that have `tokens` tokens together."""
    lengths = [prompt] * (tokens // prompt) + ([tokens % prompt] if tokens % prompt else [])
    width = -(-prompt // plan.page_size)
    tables = np.arange(1, len(lengths) * width + 1, dtype=np.int32).reshape(len(lengths), width)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    owners = np.repeat(np.arange(len(lengths)), lengths)
    slots = tables[owners, positions // plan.page_size] * plan.page_size + positions % plan.page_size
    count = len(lengths)
    ones, zeros = np.ones(count, dtype=np.float32), np.zeros(count, dtype=np.int32)
    sampling = SamplingBatch(0 * ones, zeros, ones, 0 * ones, zeros.astype(np.uint64), zeros, zeros, zeros - 1)
    return StepBatch(
        step=1,
        token_ids=np.random.default_rng(0).integers(0, min(model.vocab_size, 10_000), tokens).astype(np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_lens=np.array(lengths, dtype=np.int32),
        block_tables=tables,
        prompt_lens=np.array(lengths, dtype=np.int32),
        sample_seqs=np.arange(count, dtype=np.int32),
        pool_seqs=no_ids(),
        sampling=sampling,
    )


def plan_quality(
    here: Setup,
    loaded: Loaded,
    deadline: float = math.inf,
    keep: Callable[[Sequence[Result]], None] = lambda _: None,
) -> list[Result]:
    """A result a choice; of those begun before `deadline` (time.monotonic). `keep` gets them after each part."""
    steps: list[Callable[[], dict[str, list[float]]]] = [
        lambda: attention(here),
        lambda: attention_variants.attention_variants(here),
        lambda: {"page-size": pages(here, loaded)},
        lambda: {"graph-buckets": graphs(here, loaded)},
        lambda: chunks(here, loaded),
    ]
    results: list[Result] = []
    for number, measure in enumerate(steps):
        if time.monotonic() > deadline:
            print(f"  {len(steps) - number} of {len(steps)} parts left out, no time is left", flush=True)
            break
        try:
            results += results_of(measure())
            keep(results)
        except (ValueError, RuntimeError) as error:  # one part costs no other
            print(f"  a part failed: {error}", flush=True)
    return results


def results_of(shares: Mapping[str, Sequence[float]]) -> list[Result]:
    """A result a choice, its samples by shape."""
    results: list[Result] = []
    for choice, samples in shares.items():
        note = f"mean of {len(samples)} shapes, least {min(samples):.3f}"
        note += f"; {attention_variants.NOTE}" if choice == "attention-variant" else ""
        print(f"  {choice}: {statistics.fmean(samples):.3f} ({note})", flush=True)
        results.append(
            {"bench": "plan_quality", "case": choice, "metric": "share_of_best", "samples": list(samples), "predicted": 1.0,
             "note": note}
        )  # fmt: skip
    return results
