"""How many bits K and V are kept in on a GPU: sixteen, or eight where more is asked for than fits otherwise. Pure."""

from __future__ import annotations

from dataclasses import replace

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.changes import bytes_text
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import Limits, PlanError, profile_inputs
from dragoman_agent.pal.plan import KV_FLOAT8
from dragoman_agent.pal.planner_memory import sequence_bytes, spare_bytes
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of

KV_BFLOAT16 = "bfloat16"
KV_DTYPES = {"bf16": KV_BFLOAT16, "fp8": KV_FLOAT8}  # by the words of --kv-dtype, beside "auto"
_CAPABILITY = (8, 9)  # the first whose instructions convert e4m3


def choose_kv_dtype(profile: Profile, model: ModelConfig, limits: Limits) -> tuple[str, Decision]:
    """What was asked for; else bfloat16, unless the context and the sequences that were asked for fit in eight bits only.

    Raises PlanError where eight bits are asked for and the device cannot convert them, and for another word.
    """
    capability = rates_of(profile).capability
    inputs = profile_inputs(profile, "compute.capability", "memory.free")
    if limits.kv_dtype not in ("auto", *KV_DTYPES):
        raise PlanError(f"--kv-dtype {limits.kv_dtype} is not one of auto, {', '.join(KV_DTYPES)}")
    if limits.kv_dtype == "fp8" and capability < _CAPABILITY:
        raise PlanError(
            f"--kv-dtype fp8 needs compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}, whose instructions convert e4m3; "
            f"{profile.device.name} has {capability[0]}.{capability[1]} (compute.capability). Leave --kv-dtype out"
        )
    if limits.kv_dtype != "auto":
        reason = "asked for"
        if limits.kv_dtype == "fp8":
            reason += ": half the memory and half the reads of a context, at three bits of mantissa"
        return KV_DTYPES[limits.kv_dtype], Decision("kv-dtype", KV_DTYPES[limits.kv_dtype], reason, inputs)
    tokens, words = _asked_for(model, limits)
    if not tokens:
        reason = "as exact as the computation; nothing was asked for that needs more room (--kv-dtype fp8 halves KV)"
        return KV_BFLOAT16, Decision("kv-dtype", KV_BFLOAT16, reason, inputs)
    room = _room(profile, model, limits)
    wanted = {name: tokens * kv_model(model, name).kv_bytes_per_token for name in (KV_BFLOAT16, KV_FLOAT8)}
    only_in_eight = wanted[KV_FLOAT8] <= room < wanted[KV_BFLOAT16]
    chosen = KV_FLOAT8 if only_in_eight and capability >= _CAPABILITY else KV_BFLOAT16
    texts = {name: bytes_text(round(size)) for name, size in {**wanted, "room": room}.items()}
    if chosen == KV_FLOAT8:
        reason = f"{words} take {texts[KV_BFLOAT16]} in bfloat16 and {texts[KV_FLOAT8]} in eight bits; {texts['room']} are free"
        if limits.all_at_once:
            reason += "; an agent is asked for it by --kv-dtype fp8"
    elif only_in_eight:
        reason = f"{words} would fit in eight bits only, and the device has no instruction that converts them"
    elif room < wanted[KV_BFLOAT16]:
        reason = f"{words} do not fit in eight bits either ({texts[KV_FLOAT8]}; {texts['room']} are free)"
    else:
        reason = f"{words} fit as they are: {texts[KV_BFLOAT16]} of {texts['room']}"
    why_not = {KV_BFLOAT16: "does not fit", KV_FLOAT8: "three bits of mantissa, and nothing needs the room"}
    candidates = tuple(Candidate(name, size, "" if name == chosen else why_not[name]) for name, size in wanted.items())
    return chosen, Decision("kv-dtype", chosen, reason, inputs, candidates, float(wanted[chosen]), unit="bytes")


def kv_model(model: ModelConfig, kv_dtype: str) -> ModelConfig:
    """The model as memory and reads of its context are counted under `kv_dtype`."""
    return replace(model, kv_item_bytes=1) if kv_dtype == KV_FLOAT8 else model


def _asked_for(model: ModelConfig, limits: Limits) -> tuple[int, str]:
    """(tokens that must be kept at once, in words): one sequence of the longest; every sequence where all at once was asked
    for, which an agent does not promise: its blocks are taken as contexts grow. 0 where the operator named no context.
    """
    context = limits.max_context_tokens or 0
    count = (limits.max_num_seqs or 1) if limits.all_at_once else 1
    return count * context, f"{count} x {context:,} tokens"


def _room(profile: Profile, model: ModelConfig, limits: Limits) -> float:
    """Bytes for KV beside weights, context and what the sequences themselves take."""
    spare = spare_bytes(profile, model, limits, rates_of(profile))
    return max(spare - (limits.max_num_seqs or 1) * sequence_bytes(model), 0.0)
