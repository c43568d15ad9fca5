"""What choosing costs: seconds of timing and planning by shape that a choice was made for. Run by `benchmarks.pal_gpu`.

A shape is one kind of kernel at one problem (batch and context, tokens and context, or rows and matrix) for which more than one
candidate was timed. All that tuning took is shared out by the number of cases, what was timed for the step model alone
included, so that the mean over the shapes is the whole cost over their number.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks.card import Result
from benchmarks.gpu_setup import Setup

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.layer_timing import LayerCase
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.tuning import Case

MAX_SECONDS_A_SHAPE = 1.0  # the bar
PLANNINGS = 5
# Kinds that are candidates of one choice.
_ONE_CHOICE = {"prefill-library": "prefill-attention", "prefill-batch": "prefill-attention"}
# What of a shape is the candidate and not the problem.
_OPTIONS = {"decode-grouped": ("rows",), "decode-list": ("items",)}
_ATTENTION = ("num_heads", "num_kv_heads", "head_dim")

Shape = tuple[object, ...]


def shape_of(case: Case) -> Shape:
    """The problem that a case is a candidate for."""
    sizes = tuple(pair for pair in sorted(case.shape.items()) if pair[0] not in _OPTIONS.get(case.kind, ()))
    model = (case.config["model"]["name"],) if isinstance(case, LayerCase) else ()
    return (_ONE_CHOICE.get(case.kind, case.kind), *model, *sizes)


def is_of(case: Case, model: ModelConfig) -> bool:
    """Whether a plan for `model` asks for the case; two models may ask for the same one."""
    shape = case.shape
    if isinstance(case, LayerCase):
        return bool(case.config["model"]["name"] == model.name)
    if set(_ATTENTION) <= shape.keys():
        return all(shape[name] == getattr(model, name) for name in _ATTENTION)
    if "n" in shape:
        return (shape["n"], shape["k"]) in (*step_cost.matrices(model), (model.vocab_size, model.hidden_size))
    if "vocab_size" in shape:
        return shape["vocab_size"] == model.vocab_size
    return shape["width"] in (model.hidden_size, model.intermediate_size)


def chosen_shapes(cases: Sequence[Case]) -> dict[Shape, int]:
    """Candidates timed by shape, where there was more than one."""
    counts = Counter(shape_of(case) for case in {case.key: case for case in cases}.values())
    return {shape: count for shape, count in counts.items() if count > 1}


def seconds_by_shape(model: ModelConfig, models: Sequence[ModelConfig], cases: Sequence[Case], seconds: float) -> list[float]:  # fmt: skip
    """Seconds of each shape chosen for `model`, of `seconds` that the cases of all `models` took together."""
    own = [case for case in cases if is_of(case, model)]
    asked = sum(is_of(case, one) for one in models for case in cases)
    shapes = chosen_shapes(own)
    share = seconds * len(own) / max(asked, 1)
    return [share * count / sum(shapes.values()) for count in shapes.values()]


def planning_seconds(here: Setup) -> list[float]:
    """Of making the plan anew from what was timed, `PLANNINGS` times."""
    found = []
    for _ in range(PLANNINGS):
        begin = time.perf_counter()
        plan_for(here.profile, here.source.config, here.limits, Switches(), here.timings)
        found.append(time.perf_counter() - begin)
    return found


def selection(here: Setup, models: Sequence[ModelConfig]) -> list[Result]:
    """Seconds by shape, where tuning took times in this process; seconds of planning alone."""
    results: list[Result] = []
    planning = planning_seconds(here)
    if here.tuned_cases:
        samples = seconds_by_shape(here.source.config, models, here.tuned_cases, here.all_tuning_seconds)
        samples = [each + statistics.median(planning) / len(samples) for each in samples]
        note = (
            f"{sum(samples):.1f} s of timing and planning over {len(samples)} shapes, most {max(samples):.2f}; a shape: one kind "
            f"of kernel at one problem with two candidates or more; bar {MAX_SECONDS_A_SHAPE:g} s"
        )
        results.append(
            {"bench": "plan_quality", "case": "selection", "metric": "selection_seconds_a_shape", "samples": samples,
             "predicted": None, "note": note}
        )  # fmt: skip
        print(f"  selection: {statistics.fmean(samples):.3f} s a shape ({note})", flush=True)
    else:
        print("  selection: no kernel was timed in this process, so there are no seconds a shape", flush=True)
    results.append(
        {"bench": "plan_quality", "case": "planning", "metric": "planning_seconds", "samples": planning, "predicted": None,
         "note": "the whole plan anew from the profile and the kernels' times, nothing timed"}
    )  # fmt: skip
    return results
