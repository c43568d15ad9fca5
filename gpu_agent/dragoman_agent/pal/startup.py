"""What happens before the engine starts: look at the devices, choose one, profile it, plan. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.decisions import Decision, DecisionLog
from dragoman_agent.pal.forced import describe, find_profile, take_forced
from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.kernel_times import step_key
from dragoman_agent.pal.limits import check_dtype
from dragoman_agent.pal.needs import needs_of
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, Switches, plan_for, profile_input
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import DeviceFacts, Profile, fingerprint, now
from dragoman_agent.pal.select import choose_device
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuned import Tuning, timings_for
from dragoman_agent.pal.view import HardwareView

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource

logger = logging.getLogger(__name__)

MakePlan = Callable[[Profile], tuple[Plan, list[Decision]]]
TimedSteps = Sequence[tuple[int, int, float]]  # (batch, context, seconds on the device)


@dataclass(frozen=True, slots=True)
class PalResult:
    """The choice and everything that led to it. `reason` is one line for a person."""

    plan: Plan
    view: HardwareView
    log: DecisionLog
    device_name: str
    reason: str
    profile: Profile
    make_plan: MakePlan | None  # from another profile of the same device; None where the plan was given
    with_steps: Callable[[TimedSteps], MakePlan] | None = (
        None  # `make_plan` that also knows whole steps as they were timed
    )
    capability: str = ""  # of the chosen GPU itself, as "9.0": a forced profile may be of another


def start_on_device(
    model: ModelSource,
    requested: str,
    dtype: str,
    limits: Limits,
    cache_dir: Path,
    *,
    switches: Switches | None = None,
    profile: str = "",
    profile_force: bool = False,
    tuning: Tuning = "auto",
    before_measuring: Callable[[], None] = lambda: None,
) -> PalResult:
    """Choose a device for `model`, profile it and plan. `profile` names one to plan from instead of the measured one.

    `tuning`: see `timings_for`. `before_measuring` is called where something is measured, to end what would disturb it.

    Raises NoDeviceError, ProfileError, PlanError, TuningError or DeviceError.
    """
    from dragoman_agent.device.capabilities import capabilities_of, check_plan_fits
    from dragoman_agent.device.cpu import choose_cpu_road

    named = find_profile(profile) if profile else None  # before anything that takes long
    inventory = take_inventory()
    selection = choose_device(inventory, requested, needs_of(model))
    chosen = selection.chosen
    for note in chosen.device.notes:
        logger.warning("%s: %s", chosen.device.facts.name, note)
    log = DecisionLog()
    log.record(Decision("device", chosen.device.facts.name, chosen.reason))
    if named is None:
        held, decision = _measured(chosen.device, cache_dir, before_measuring)
    else:
        device = chosen.device
        held, decision = take_forced(named, device.facts, device.fingerprint, device.values, force=profile_force)
    log.record(decision)
    check_dtype(dtype, held.device.kind, chosen.device.facts.name)
    road = choose_cpu_road(model, dtype, cache_dir) if held.device.kind == "cpu" else None
    switches = switches or Switches()
    timings = None
    if named is None:
        if tuning == "now":
            before_measuring()
        timings, timed = timings_for(held, model.config, limits, switches, cache_dir, tuning)
        if timed is not None:
            log.record(timed)
    make = partial(plan_for, model=model.config, limits=limits, switches=switches, road=road)
    make_plan = partial(make, timings=timings)

    def with_steps(steps: TimedSteps) -> MakePlan:
        known = timings or Timings(held.fingerprint, "")
        named_steps = {step_key(model.config.name, batch, context): seconds for batch, context, seconds in steps}
        return partial(make, timings=known.with_seconds(named_steps))

    plan, decisions = make_plan(held)
    # Held against the device itself: a forced profile may be of a larger one.
    check_plan_fits(plan, capabilities_of(held.device.kind, {**held.values, **chosen.device.values}))
    for decision in (*decisions, _waiting_decision(plan), _load_decision(held, plan), _prefill_decision(plan)):
        log.record(decision)
    view = HardwareView(held, selection, plan, log)
    told = chosen.device.values.get("compute.capability")
    capability = str(told.value) if told is not None else ""
    name, reason = chosen.device.facts.name, chosen.reason
    return PalResult(plan, view, log, name, reason, held, make_plan, with_steps, capability)


def _measured(device: FoundDevice, cache_dir: Path, before_measuring: Callable[[], None]) -> tuple[Profile, Decision]:
    """The device's own profile."""
    profile, from_cache = profile_device(device, cache_dir, before_measuring=before_measuring)
    when = f"on {profile.created}, kept under its fingerprint {profile.fingerprint[:8]}" if from_cache else "now"
    return profile, Decision("profile", describe(profile), f"this device, measured {when}")


def start_on_null(plan: Plan) -> PalResult:
    """The null device has nothing to measure: its plan is given, and each decision says so."""
    facts = DeviceFacts("null", 0, "null device", "none", 0, "null")
    profile = Profile("null", facts, fingerprint(["null"]), now())
    log = DecisionLog()
    log.record(
        Decision("device", facts.name, "--device null was asked for: it computes nothing and keeps every contract")
    )
    for decision in (*_null_decisions(plan), _waiting_decision(plan), _prefill_decision(plan)):
        log.record(decision)
    view = HardwareView(profile, None, plan, log)
    return PalResult(plan, view, log, facts.name, "--device null was asked for", profile, None)


def _null_decisions(plan: Plan) -> list[Decision]:
    given = "the null device's own or asked for; nothing was measured"
    step_seconds = plan.step_model.decode_step_seconds(1, 64)
    told = [Decision("deterministic", "yes", "the null device computes nothing, so nothing can differ")]
    return [
        *(told if plan.deterministic else ()),
        Decision("road", plan.road, "the null device computes nothing"),
        Decision("attention-grouping", "none", "the null device computes nothing, so no sequences can share the work"),
        Decision("decode-work-list", "none", "the null device computes nothing, so no context holds others up"),
        Decision("page-size", str(plan.page_size), given, unit="tokens"),
        Decision("max-context", str(plan.max_context_tokens), given, unit="tokens"),
        Decision("step-tokens", str(plan.max_batch_tokens), given, unit="tokens"),
        Decision("max-seqs", str(plan.max_num_seqs), given),
        Decision("kv-blocks", str(plan.num_blocks), given, predicted=_memory(plan, "kv blocks"), unit="bytes"),
        Decision("host-tier", str(plan.kv_host_bytes), given, predicted=float(plan.kv_host_bytes), unit="bytes"),
        Decision("disk-tier", str(plan.kv_disk_bytes), given, predicted=float(plan.kv_disk_bytes), unit="bytes"),
        Decision("step-model", f"{1e3 * step_seconds:.2f} ms a token alone", given, predicted=step_seconds, unit="s"),
    ]


def _load_decision(profile: Profile, plan: Plan) -> Decision:
    """How weights come in, with the rate that the slowest measured part allows; a cold file can be slower still."""
    weight_bytes = _memory(plan, "weights")
    chosen = f"{weight_bytes / 1e9:.2f} GB, each tensor read once"
    if "link.h2d_pinned" in profile.values:
        name, share, reason = "link.h2d_pinned", 0.8, "through pinned buffers; four fifths of the link's rate"
    else:
        name, share, reason = (
            "memory.read_bandwidth",
            0.5,
            "read and written once in memory; opening the file and the kernels weighs more for a small model",
        )
    predicted = share * profile.number(name)
    return Decision("load", chosen, reason, inputs=(profile_input(profile, name),), predicted=predicted, unit="bytes/s")


def _waiting_decision(plan: Plan) -> Decision:
    reason = "--max-num-waiting: past it a request is refused here, so that it can go elsewhere"
    return Decision("max-waiting", str(plan.max_num_waiting), reason, unit="requests")


def _prefill_decision(plan: Plan) -> Decision:
    rate = plan.step_model.prefill_tokens_per_second
    reason = "the step model's rate for whole chunks of a prompt"
    return Decision("prefill-rate", f"{rate:,.0f} tokens/s", reason, predicted=rate, unit="tokens/s")


def _memory(plan: Plan, name: str) -> float:
    return float(next(line.size_bytes for line in plan.memory if line.name == name))
