"""The one entry to planning: profile, model, limits and switches to a plan with its decisions. Pure, needs no device."""

from __future__ import annotations

import dataclasses

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.found import UNTESTED_KINDS
from dragoman_agent.pal.limits import Limits, PlanError, Road, profile_input
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner_cpu import plan_cpu, predict_cpu
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.planner_torch import plan_torch
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings

# Rows are computed one by one, in one order: alone, in company, in any chunks (tests/agent/device/conformance).
_EXACT_CPU_ROADS = ("native-int8", "native-float32")

__all__ = [
    "Limits",
    "Plan",
    "PlanError",
    "Road",
    "Switches",
    "Timings",
    "plan_cpu",
    "plan_cuda",
    "plan_for",
    "predict_cpu",
    "profile_input",
]


def plan_for(
    profile: Profile,
    model: ModelConfig,
    limits: Limits,
    switches: Switches,
    timings: Timings | None = None,
    road: Road | None = None,
) -> tuple[Plan, list[Decision]]:
    """The plan for `model` on the profiled device. Raises PlanError where there is none.

    `road` is how a CPU computes the weights; other kinds have one road and take none. `timings` of another device are
    refused.
    """
    if timings is not None and timings.fingerprint != profile.fingerprint:
        raise PlanError(
            f"the timings were taken on another device ({timings.fingerprint}) than the profile {profile.name} "
            f"({profile.fingerprint}); time the kernels on this one"
        )
    kind = profile.device.kind
    if limits.kv_dtype != "auto" and kind != "cuda":
        raise PlanError(
            f"--kv-dtype {limits.kv_dtype} is a choice on CUDA devices; {profile.device.name} is a {kind} device, whose road "
            "decides how K and V are kept. Leave --kv-dtype out"
        )
    if kind == "cuda":
        plan, decisions = plan_cuda(profile, model, limits, switches, timings)
    elif kind == "cpu":
        if road is None:
            raise PlanError(f"a CPU plan of {model.name} needs the road its weights are computed on; pass one")
        plan, decisions = plan_cpu(profile, model, road, limits)
    elif kind in UNTESTED_KINDS:
        if limits.deterministic:
            raise PlanError(
                f"--deterministic needs kernels that were never compiled for {kind} devices; leave it out, or use "
                "--device cpu"
            )
        plan, decisions = plan_torch(profile, model, limits, switches)
    else:
        raise PlanError(
            f"nothing plans for a device of kind {kind!r}; profiles of kind cuda, cpu, {' and '.join(UNTESTED_KINDS)} "
            "can be planned for"
        )
    if limits.deterministic:
        plan, decisions = _deterministic(plan, decisions)
    off = switches.names_off()
    if not off:
        return plan, decisions
    return dataclasses.replace(plan, switches_off=off), [*decisions, _switches(off, kind)]


def _deterministic(plan: Plan, decisions: list[Decision]) -> tuple[Plan, list[Decision]]:
    """The plan where its road can keep the promise. Raises PlanError where it cannot."""
    if plan.device_kind == "cuda":
        reason = (
            "asked for: every product and all attention run in one tile shape and one order of sums, prompts and decode "
            "alike, so a token's bits depend on the tokens before it alone"
        )
    elif plan.road in _EXACT_CPU_ROADS:
        reason = (
            f"asked for: {plan.road} computes each row by itself and in one order as it is, and loses nothing by it"
        )
    else:
        raise PlanError(
            f"--deterministic cannot be kept on the road {plan.road}: its library sums in another order for another batch; "
            "leave --deterministic out, or use a CUDA device or the CPU's compiled kernels (a C++ compiler and a supported "
            "model are what they need)"
        )
    told = Decision("deterministic", "yes", reason)
    return dataclasses.replace(plan, deterministic=True), [*decisions, told]


def _switches(off: tuple[str, ...], kind: str) -> Decision:
    flags = ", ".join("--pal off" if name == "pal" else f"--pal-{name.replace('_', '-')} off" for name in off)
    if kind == "cpu":
        reason = "a CPU plan has no such part, so this is the same plan as without"
    elif off == ("pal",):
        reason = "the one fixed configuration for all devices: nothing but sizes is planned from the profile"
    else:
        reason = "what these parts would decide keeps its fixed form; everything else is planned from the profile"
    return Decision("switches", flags, f"asked for: {reason}")
