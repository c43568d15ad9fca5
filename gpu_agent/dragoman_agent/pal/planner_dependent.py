"""Whether kernels may start while the one before ends (programmatic dependent launch). Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
_INPUTS = ("compute.dependent_launch", "compute.capability", "scheduling.dependent_launch_gain")

Gains = tuple[tuple[int, float], ...]


def choose_dependent_launch(
    profile: Profile, model: ModelConfig, timed: Sequence[tuple[int, float, float]], off: str | None
) -> tuple[bool, Gains, Decision]:
    """Whether, the seconds a step is shorter by batch, and why.

    `timed` are (batch, seconds of a step's layers without, with): where there are any they decide, for a kernel that
    starts early takes bandwidth and L2 from the one that still runs. Else what was measured between empty kernels does.
    """
    if off:
        return False, (), Decision("dependent-launch", "no", off)
    capable = profile.values.get("compute.dependent_launch")
    inputs = profile_inputs(profile, *_INPUTS)
    if not (bool(capable.value) if capable is not None else rates_of(profile).capability >= (9, 0)):
        reason = "the device has no programmatic dependent launch (compute capability 9.0 and later)"
        return False, (), Decision("dependent-launch", "no", reason, inputs, _candidates(None), unit="s")
    if timed:
        chosen, gains, reason = _by_layers(timed)
    else:
        chosen, gains, reason = _by_nodes(profile, model)
    gain = gains[0][1] if gains else None
    decision = Decision(
        "dependent-launch", "yes" if chosen else "no", reason, inputs, _candidates(gain),
        -gain if chosen and gain else None, unit="s",
    )  # fmt: skip
    return chosen, gains if chosen else (), decision


def _by_layers(timed: Sequence[tuple[int, float, float]]) -> tuple[bool, Gains, str]:
    """Every batch counts alike: the mean share of a step's layers that is saved or lost."""
    share = sum((plain - dependent) / plain for _, plain, dependent in timed) / len(timed)
    each = ", ".join(f"{(plain - dependent) / plain:+.1%} at {batch}" for batch, plain, dependent in timed)
    gains = tuple((batch, plain - dependent) for batch, plain, dependent in timed)
    return share > 0, gains, f"whole layers timed on the device, shorter by batch: {each}"


def _by_nodes(profile: Profile, model: ModelConfig) -> tuple[bool, Gains, str]:
    value = profile.values.get("scheduling.dependent_launch_gain")
    seconds = float(value.value) if value is not None and isinstance(value.value, int | float) else None
    if seconds is not None and seconds <= 0:
        return False, (), "it was measured to cost more than it saves"
    count = model.num_layers * len(_IN_LAYER) + 1
    each = "" if seconds is None else f"; {1e6 * seconds:.2f} us each as measured between empty ones"
    reason = f"{count} kernels of a step wait for the one before by themselves, so they may start while it ends{each}"
    return True, ((1, count * seconds),) if seconds else (), reason


def _candidates(gain: float | None) -> tuple[Candidate, ...]:
    return Candidate("no", 0.0), Candidate("yes", None if gain is None else -gain)
