"""What happens before the engine starts: look at the devices, choose one, profile it, plan. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.decisions import Decision, DecisionLog
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, plan_cpu
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import DeviceFacts, Profile, fingerprint, now
from dragoman_agent.pal.select import Needs, choose_device
from dragoman_agent.pal.view import HardwareView

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource


@dataclass(frozen=True, slots=True)
class PalResult:
    """The choice and everything that led to it. `reason` is one line for a person."""

    plan: Plan
    view: HardwareView
    log: DecisionLog
    device_name: str
    reason: str


def start_on_device(model: ModelSource, requested: str, dtype: str, limits: Limits, cache_dir: Path) -> PalResult:
    """Choose a device for `model`, profile it and plan. Raises NoDeviceError or PlanError."""
    from dragoman_agent.device.cpu import choose_cpu_road

    inventory = take_inventory()
    needs = Needs(model.name, model.total_bytes, model.config.kv_bytes_per_token * 256)
    selection = choose_device(inventory, requested, needs)
    chosen = selection.chosen
    log = DecisionLog()
    log.record(Decision("device", chosen.device.facts.name, chosen.reason))
    profile, _ = profile_device(chosen.device, cache_dir)
    if chosen.device.facts.kind == "cuda":
        plan, decisions = plan_cuda(profile, model.config, limits)
    else:
        plan, decisions = plan_cpu(profile, model.config, choose_cpu_road(model, dtype, cache_dir), limits)
    for decision in decisions:
        log.record(decision)
    view = HardwareView(profile, selection, plan, log)
    return PalResult(plan, view, log, chosen.device.facts.name, chosen.reason)


def start_on_null(plan: Plan) -> PalResult:
    """The null device has nothing to measure: its plan is given."""
    facts = DeviceFacts("null", 0, "null device", "none", 0, "null")
    profile = Profile("null", facts, fingerprint(["null"]), now())
    log = DecisionLog()
    log.record(
        Decision("device", facts.name, "--device null was asked for: it computes nothing and keeps every contract")
    )
    return PalResult(plan, HardwareView(profile, None, plan, log), log, facts.name, "--device null was asked for")
