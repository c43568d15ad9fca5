"""What a plan is bounded by: the operator's limits, the road of the weights, and the error of a plan that cannot be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.changes import Change
from dragoman_agent.pal.decisions import Decision, Input
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.words import value_text

_LEAST = 1e-30  # a value below it is none of a device, and quotients by it are not finite


class PlanError(Exception):
    """No plan is possible. The message gives the numbers and the changes that would make one possible.

    `changes` are the same changes one by one, where memory is what is missing.
    """

    def __init__(self, message: str, changes: tuple[Change, ...] = ()) -> None:
        super().__init__(message)
        self.changes = changes


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator asked for; None derives it."""

    max_context_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_waiting: int = 256
    memory_utilization: float | None = None  # share of *free* memory
    num_threads: int | None = None
    latency_target_seconds: float | None = None  # of a step in which others' prompts are computed
    kv_host_bytes: int | None = None  # of the tier in host memory
    kv_disk_bytes: int = 0  # of the tier on disk; 0 is none
    host_free_bytes: int | None = None  # host memory that is free; None where the device is not of this machine
    kv_dtype: str = "auto"  # "auto", "bf16" or "fp8"
    all_at_once: bool = False  # `max_num_seqs` sequences of `max_context_tokens` each are to be kept together
    deterministic: bool = False  # a request's tokens must not depend on what else runs, nor on where it was interrupted


@dataclass(frozen=True, slots=True)
class Road:
    """How the weights are computed with on a CPU: decided by the device, an input here."""

    name: str  # "native-int8", "native-float32", "torch-float32"
    reason: str
    weight_bytes: int  # resident
    kv_dtype: str
    ops_rate_factor: float  # matrix rate over the profile's float32 rate


def need(profile: Profile, name: str) -> float:
    """A positive, finite value of `profile`. Raises PlanError naming the value that is missing or cannot be used."""
    try:
        value = profile.number(name)
    except KeyError:
        raise PlanError(
            f"the profile {profile.name} lacks {name}, which a plan for a {profile.device.kind} device is made from; "
            "probe the device again with `dragoman probe`, or name another profile"
        ) from None
    except TypeError:
        raise PlanError(
            f"the profile {profile.name} says {name} = {profile.values[name].value!r}, a number was expected; "
            "probe the device again with `dragoman probe`"
        ) from None
    if not math.isfinite(value) or value < _LEAST:
        raise PlanError(
            f"the profile {profile.name} says {name} = {value}, which nothing can be planned from: it must be finite and "
            "over 0; probe the device again with `dragoman probe`"
        )
    return value


def need_count(profile: Profile, name: str) -> int:
    """A count of `profile`, at least 1. Raises PlanError naming the value that is missing or cannot be used."""
    value = need(profile, name)
    if value < 1:
        raise PlanError(
            f"the profile {profile.name} says {name} = {value}, which nothing can be planned from: it must be 1 or more; "
            "probe the device again with `dragoman probe`"
        )
    return int(value)


def optional(profile: Profile, name: str) -> float | None:
    """A value that a profile may lack: None then. Raises PlanError where it is there and cannot be used."""
    return need(profile, name) if name in profile.values else None


def profile_input(profile: Profile, name: str) -> Input:
    """A profile value as the input of a decision."""
    value = profile.values[name]
    return Input(name, value_text(value), value.provenance)


def profile_inputs(profile: Profile, *names: str) -> tuple[Input, ...]:
    """Those of `names` that the profile has, as inputs of a decision."""
    return tuple(profile_input(profile, name) for name in names if name in profile.values)


def choose_context(model: ModelConfig, limits: Limits) -> tuple[int, Decision]:
    """The longest sequence: asked for, or the model's own."""
    asked = limits.max_context_tokens
    if asked is not None and asked > model.max_context_tokens:
        raise PlanError(
            f"--max-context {asked} is over the {model.max_context_tokens} tokens that {model.name} was trained for; "
            "ask for at most that"
        )
    chosen = asked or model.max_context_tokens
    reason = "asked for" if asked else "the model's own"
    return chosen, Decision("max-context", str(chosen), reason, unit="tokens")


def check_dtype(dtype: str, kind: str, device_name: str) -> None:
    """`--dtype` is a choice of the CPU alone. Raises PlanError elsewhere."""
    if dtype != "auto" and kind != "cpu":
        raise PlanError(
            f"--dtype {dtype} is for the CPU, {device_name} computes in bfloat16; leave --dtype out, or serve on the CPU with "
            "--device cpu"
        )
