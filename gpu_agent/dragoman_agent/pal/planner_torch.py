"""The plan of a card on which none of our kernels was ever timed (hip, xpu): sizes from the profile, launches fixed. Pure."""

from __future__ import annotations

import dataclasses

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.limits import Limits, PlanError, need, profile_inputs
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner_cuda import plan_cuda
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_kernels.triton.launches import OTHER_LAUNCHES

_FIXED = "switched off by --pal-launch-tuning off"


def plan_torch(profile: Profile, model: ModelConfig, limits: Limits, switches: Switches) -> tuple[Plan, list[Decision]]:
    """The plan in bfloat16 with the launches that were compiled for the card's group of threads, and nothing of NVIDIA's own.

    Raises PlanError where there is none.
    """
    kind, group = profile.device.kind, int(need(profile, "compute.warp_size"))
    if group not in OTHER_LAUNCHES:
        known = ", ".join(map(str, OTHER_LAUNCHES))
        raise PlanError(
            f"{group} threads of a {kind} device run in step (compute.warp_size); our kernels were compiled for {known}; "
            "use --device cpu"
        )
    decode, prefill = OTHER_LAUNCHES[group]
    plan, decisions = plan_cuda(profile, model, limits, dataclasses.replace(switches, launch_tuning=False))
    assert plan.prefill_attention is not None
    made = dataclasses.replace(
        plan,
        device_kind=kind,
        decode_attention=tuple(
            dataclasses.replace(bucket, **dataclasses.asdict(decode)) for bucket in plan.decode_attention
        ),
        prefill_attention=dataclasses.replace(plan.prefill_attention, **dataclasses.asdict(prefill)),
        gemm_decode=(),
        dependent_max_batch=0,
    )
    return made, [
        *(_told(each, kind, made) for each in decisions),
        Decision(
            "untested-backend",
            f"tiles of {decode.block_n} keys in {decode.num_warps} warps",
            f"the largest that were compiled for groups of {group} threads without spilling registers; the {kind} backend "
            "has never run on such a device, so compare its answers with --device cpu",
            profile_inputs(profile, "compute.warp_size", "memory.shared_per_block"),
        ),
    ]


def _told(decision: Decision, kind: str, plan: Plan) -> Decision:
    """The decision in this plan's words, where it is one that its launches decide."""
    if decision.reason != _FIXED:
        return decision
    chosen = decision.chosen
    if decision.subject == "decode-attention":
        chosen = ", ".join(
            f"to {b.max_batch}: s{b.num_splits}-n{b.block_n}-w{b.num_warps}-g{b.num_stages}"
            for b in plan.decode_attention
        )
    elif decision.subject == "prefill-attention" and plan.prefill_attention is not None:
        p = plan.prefill_attention
        chosen = f"m{p.block_m}-n{p.block_n}-w{p.num_warps}-g{p.num_stages}"
    reason = (
        "NVIDIA's own"
        if decision.subject == "dependent-launch"
        else f"fixed: no kernel was ever timed on a {kind} device"
    )
    return dataclasses.replace(decision, chosen=chosen, reason=reason)
