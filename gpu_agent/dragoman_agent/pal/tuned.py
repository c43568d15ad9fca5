"""Which kernel times a plan is made from: those kept from before, those taken now, or none. Says so in a decision."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.limits import Limits
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.planner_cuda import wanted_groups, wanted_layers, wanted_lists
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuning import Case, load_timings, tune

logger = logging.getLogger(__name__)

Tuning = Literal["auto", "now", "off"]
_SUBJECT = "tuning"
_MAX_ROUNDS = 3


def timings_for(
    profile: Profile, model: ModelConfig, limits: Limits, switches: Switches, cache_dir: Path, mode: Tuning
) -> tuple[Timings | None, Decision | None]:
    """The times to plan from. Raises TuningError when they are to be taken now and cannot be.

    "auto" reads what is kept and takes nothing, for a start must not wait; "now" takes what is missing; "off" uses none.
    Only GPUs have kernels to choose among.
    """
    if profile.device.kind != "cuda":
        return None, None
    if reason := switches.reason("launch_tuning"):
        return None, Decision(_SUBJECT, "none", reason)
    if mode == "off":
        return None, Decision(_SUBJECT, "none", "--tune off was asked for: launches are predicted from the profile")
    timings = load_timings(cache_dir, profile.fingerprint)
    plan, _ = plan_for(profile, model, limits, switches, timings)
    cases = tuning_cases(profile, model, plan)
    if mode == "now":
        index = profile.device.index
        timings = tune_all(profile, [model], limits, switches, timings, cache_dir, index, logger.warning)
        plan, _ = plan_for(profile, model, limits, switches, timings)
        cases = tuning_cases(profile, model, plan)
    known = sum(timings.get(case.key) is not None for case in cases)
    lost = sum(case.key in timings.failed for case in cases)
    chosen = f"{known} of {len(cases)} kernels timed on this device" + (f", {lost} cannot run on it" if lost else "")
    reason = "kept from before" if mode == "auto" else "timed now, and kept for the next start"
    if not known:
        reason = (
            "launches are predicted from the profile; start once with --tune now to time them, which takes a minute"
        )
    return timings, Decision(_SUBJECT, chosen, reason)


def tune_all(
    profile: Profile,
    models: Sequence[ModelConfig],
    limits: Limits,
    switches: Switches,
    timings: Timings,
    cache_dir: Path,
    index: int,
    say: Callable[[str], None],
) -> Timings:
    """Time what plans for `models` on CUDA device `index` are made from, all models' together. Raises TuningError."""

    def kernels(held: Timings) -> list[Case]:
        plans = [(model, plan_for(profile, model, limits, switches, held)[0]) for model in models]
        return [case for model, plan in plans for case in tuning_cases(profile, model, plan)]

    def layers(held: Timings) -> list[Case]:
        """And groups of short sequences and work lists, whose launches are known by then."""
        return [
            case
            for model in models
            for wanted in (wanted_layers, wanted_groups, wanted_lists)
            for case in wanted(profile, model, limits, switches, held)
        ]

    timings = _until_known(kernels, timings, cache_dir, index, say)
    return _until_known(layers, timings, cache_dir, index, say)


def _until_known(
    wanted: Callable[[Timings], Sequence[Case]],
    timings: Timings,
    cache_dir: Path,
    index: int,
    say: Callable[[str], None],
) -> Timings:
    """Rounds, since what was timed may change what is asked: another page asks for its own launches, and dependent launch is
    asked of the products that layers chose.
    """
    for _ in range(_MAX_ROUNDS):
        cases = list({case.key: case for case in wanted(timings)}.values())
        if all(timings.knows(case.key) for case in cases):
            break
        before, timings = timings, tune(cases, timings, cache_dir, index, say)
        if timings == before:
            break  # what is left fails each time, though it might not for good
    return timings
