"""The planned form of prefill attention against every form that the planner may choose from. Run by `benchmarks.plan_quality`.

By pointers, by tensor descriptors, with roles for warps and by cuDNN, at the shapes that the planner judges by, of each the one
that the device would run there; made, checked and timed as in `benchmarks.prefill_kernels_gpu`. Decode's forms, one part of a context or several,
are the candidates of the choice `split-size`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from benchmarks.gpu_setup import Setup
from benchmarks.prefill_kernels_gpu import TOLERANCE, Step, close, make_step, name_of, seconds_of

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import prefill_points, prefill_shortlist
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner_attention import launch_of
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import PrefillLaunch

TURNS = 3
NOTE = (
    "prefill of 1 x 1,024 tokens, of the last 2,048 of 8,192 and of 16 x 1,024; decode's variants, one part or several "
    "(bursts), are those of split-size"
)

Prompts = tuple[tuple[int, int], ...]  # (tokens computed, tokens before them)
Variant = PrefillLaunch | None  # None: the library's


def shapes_of(max_context_tokens: int) -> list[Prompts]:
    """Steps to time: the points that launches are compared at."""
    points = prefill_points(max_context_tokens)
    return [((point.tokens, point.context - point.tokens),) * point.num_prompts for point in points]


def variants_of(profile: Profile, model: ModelConfig, plan: Plan) -> list[Variant]:
    """Our own launches that fit the card, the planned one among them, and the library."""
    options = prefill_shortlist(KernelTimes(rates_of(profile)), model, plan.page_size)
    planned = plan.prefill_forms.all if plan.prefill_forms is not None else ()
    return [*dict.fromkeys(launch_of(option) for option in (*options, *planned)), None]


def planned_variant(plan: Plan, prompts: Prompts) -> Variant:
    """Which one a step of these prompts, all alike, takes: by graph or kernel by kernel, since each launch has graphs of its own."""
    library = plan.library_prefill
    tokens = sum(count for count, _ in prompts)
    if library is not None and tokens >= library.min_tokens and len(prompts) <= library.max_num_seqs:
        return None
    count, before = prompts[0]
    assert plan.prefill_forms is not None  # every plan of a GPU has some
    return launch_of(plan.prefill_forms.of(count, count + before, len(prompts)))


def label(variant: Variant) -> str:
    """In words."""
    return "cudnn" if variant is None else name_of(variant)


def timed(
    step: Step, variants: Sequence[Variant], seconds: Callable[[Callable[[], object]], float]
) -> dict[Variant, float]:
    """Median `seconds` of those that run and agree with the first that does, of turns in changing order."""
    bodies: dict[Variant, Callable[[], object]] = {}
    expected: torch.Tensor | None = None
    for variant in variants:
        out = torch.full_like(step.q, float("nan"))
        try:
            body = step.library_call(out) if variant is None else step.call(variant, out)
            body()
            if expected is not None and not (error := close(out, expected)) <= TOLERANCE:
                raise ValueError(f"off by {error:.1e}")
        except Exception as problem:  # whatever a compiler, a driver or a library says: this form alone is left out
            print(f"    {label(variant)}: left out, {type(problem).__name__}: {str(problem)[:140]}", flush=True)
            continue
        expected = out if expected is None else expected
        bodies[variant] = body
    rounds: dict[Variant, list[float]] = {variant: [] for variant in bodies}
    for turn in range(TURNS):
        for variant in list(bodies)[::-1] if turn % 2 else bodies:
            rounds[variant].append(seconds(bodies[variant]))
    return {variant: statistics.median(times) for variant, times in rounds.items()}


def share_of_best(planned: Variant, times: dict[Variant, float], shape: str) -> float:
    """The quickest's time over the planned one's; 0 where the planned one does not run."""
    if planned not in times:
        print(f"    {shape}: the planned {label(planned)} does not run", flush=True)
        return 0.0
    best = min(times, key=lambda variant: times[variant])
    print(f"    {shape}: planned {label(planned)} {1e6 * times[planned]:.1f} us, best {label(best)} "
          f"{1e6 * times[best]:.1f} us of {len(times)}", flush=True)  # fmt: skip
    return times[best] / times[planned]


def attention_variants(here: Setup) -> dict[str, list[float]]:
    """Share of the best, a sample a shape."""
    model, plan = here.source.config, here.plan
    variants = variants_of(here.profile, model, plan)
    sizes = model.num_heads, model.num_kv_heads, model.head_dim
    shares = []
    with (
        torch.cuda.device(plan.device_index),
        torch.cuda.stream(torch.cuda.Stream(plan.device_index)),
        torch.inference_mode(),
    ):
        for prompts in shapes_of(plan.max_context_tokens):
            tokens, before = prompts[0]
            shape = f"prefill {len(prompts)} x {tokens}" + (f" behind {before}" if before else "")
            times = timed(make_step(prompts, *sizes, page=plan.page_size), variants, seconds_of)
            shares.append(share_of_best(planned_variant(plan, prompts), times, shape))
    return {"attention-variant": shares}
