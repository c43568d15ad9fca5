"""Whether kernels may start while the one before ends (programmatic dependent launch). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import DEPENDENT_KERNELS

_IN_LAYER = [
    name
    for name in DEPENDENT_KERNELS
    if name in ("triton.rms_norm", "triton.silu_mul", "triton.rope_cache", "triton.decode_split")
]  # two norms a layer, but the library's products between them wait for the end
_MIN_GAIN = 0.01  # of the layers
_INPUTS = ("compute.dependent_launch", "compute.capability", "scheduling.dependent_launch_gain")

Gains = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Dependent:
    """Decode batches up to `max_batch` use it (0: none); seconds a step is shorter by batch."""

    max_batch: int = 0
    gains: Gains = ()


def choose_dependent_launch(
    profile: Profile, model: ModelConfig, timed: Sequence[tuple[int, float, float]], off: str | None
) -> tuple[Dependent, Decision]:
    """Up to which batch, and why.

    `timed` are (batch, seconds of a step's layers without, with): a kernel that starts early takes bandwidth and L2 from the
    one that still runs, so only whole layers tell. What empty kernels gain is no ground to turn it on.
    """
    if off:
        return Dependent(), Decision("dependent-launch", "no", off)
    inputs = profile_inputs(profile, *_INPUTS)
    if not has_dependent_launch(profile):
        reason = "the device has no programmatic dependent launch (compute capability 9.0 and later)"
        return Dependent(), Decision("dependent-launch", "no", reason, inputs, _candidates(None), unit="s")
    if not timed:
        reason = f"not timed on this device; {_of_empty_kernels(profile, model)}"
        return Dependent(), Decision("dependent-launch", "no", reason, inputs, _candidates(None), unit="s")
    chosen = _by_layers(timed)
    each = ", ".join(f"{(plain - dependent) / plain:+.1%} at {batch}" for batch, plain, dependent in timed)
    gain = timed[0][1] - timed[0][2]
    decision = Decision(
        "dependent-launch",
        f"to {chosen.max_batch} sequences" if chosen.max_batch else "no",
        f"whole layers timed on the device, shorter by batch: {each}",
        inputs, _candidates(gain), -gain if chosen.max_batch else None, unit="s",
    )  # fmt: skip
    return chosen, decision


def has_dependent_launch(profile: Profile) -> bool:
    """Whether the device can start a kernel while the one before ends."""
    told = profile.values.get("compute.dependent_launch")
    return bool(told.value) if told is not None else rates_of(profile).capability >= (9, 0)


def _by_layers(timed: Sequence[tuple[int, float, float]]) -> Dependent:
    """As long as it gains at every smaller batch too, by more than measurements scatter."""
    gains = []
    for batch, plain, dependent in timed:
        if dependent > (1 - _MIN_GAIN) * plain:
            break
        gains.append((batch, plain - dependent))
    if not gains:
        return Dependent()
    return Dependent(gains[-1][0], (*gains, (gains[-1][0] + 1, 0.0)))


def _of_empty_kernels(profile: Profile, model: ModelConfig) -> str:
    value = profile.values.get("scheduling.dependent_launch_gain")
    if value is None or not isinstance(value.value, int | float):
        return "what it gains between kernels that stream weights shows only in whole layers"
    count = model.num_layers * len(_IN_LAYER) + 1
    return (
        f"{count} kernels of a step could start early, {1e6 * float(value.value):.2f} us each between empty ones, but one "
        "that does takes bandwidth from the one before"
    )


def _candidates(gain: float | None) -> tuple[Candidate, ...]:
    return Candidate("no", 0.0), Candidate("yes", None if gain is None else -gain)
