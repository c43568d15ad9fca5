"""Which device to use, and why not the others. Pure: an inventory and the model's needs in, a reasoned choice out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dragoman_agent.pal.changes import (
    MemoryNeed,
    Options,
    OtherDevice,
    Part,
    bytes_text,
    cheapest_changes,
    describe_changes,
)
from dragoman_agent.pal.found import SUPPORTED_KINDS, UNTESTED_KINDS, FoundDevice, Inventory
from dragoman_agent.pal.needs import KindNeeds, Needs
from dragoman_agent.pal.profile import Value

__all__ = ["KindNeeds", "Needs", "NoDeviceError", "Selection", "Verdict", "choose_device"]

# First compute capability that multiplies a type on tensor cores, for the words of a refusal.
_FIRST_CAPABILITY = {"bfloat16": "8.0", "float8": "8.9"}


class NoDeviceError(Exception):
    """No device fits. The message says what was found, why each was refused, and what to do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One device and what was decided about it. `step` is where it was refused: "probe", "match" or "runtime"."""

    device: FoundDevice
    chosen: bool
    reason: str
    step: str = ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen device first, the others with their reasons."""

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict:
        """The verdict on the chosen device."""
        return self.verdicts[0]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a device cannot be used; `missing_memory` where more free memory would change that."""

    step: str
    reason: str
    missing_memory: bool = False


def choose_device(inventory: Inventory, requested: str, needs: Needs) -> Selection:
    """Pick a device in three steps: probed, matched with the model, runtime valid.

    `requested` is "auto" or a kind such as "cpu". A discrete device is preferred to an integrated one, one with room for
    long sequences to one without, then the faster memory bus, then a PCIe link with all its lanes, then most free memory.
    Raises NoDeviceError.
    """
    refusals = [(device, refusal_of(device, requested, needs)) for device in inventory.devices]
    fitting = [device for device, refusal in refusals if refusal is None]
    if not fitting:
        raise NoDeviceError(_nothing_fits(inventory, requested, refusals, needs))
    best = max(fitting, key=lambda device: _preference(device, needs))
    others = [
        Verdict(device, False, refusal.reason, refusal.step)
        if refusal
        else Verdict(device, False, _passed_over(device, best, needs))
        for device, refusal in refusals
        if device is not best
    ]
    reason = _praise(best, fitting, inventory, requested, needs, refusals)
    if best.facts.kind in UNTESTED_KINDS:
        reason += f"; untested: the {best.facts.kind} backend has never run on such a device"
    return Selection((Verdict(best, True, reason), *others))


def refusal_of(device: FoundDevice, requested: str, needs: Needs) -> _Refusal | None:
    """The first of the three steps that says no, and why; None when none does."""
    kind = device.facts.kind
    if device.problem:
        return _Refusal("probe", device.problem)
    if requested not in ("auto", kind):
        return _Refusal("match", f"--device {requested} was asked for")
    if kind not in SUPPORTED_KINDS and kind not in UNTESTED_KINDS:
        return _Refusal("match", f"this version has no {kind} backend")
    return _match(device, needs) or (_Refusal("runtime", device.runtime_problem) if device.runtime_problem else None)


def _match(device: FoundDevice, needs: Needs) -> _Refusal | None:
    """Number format and memory."""
    if problem := dtype_problem(needs, device.facts.kind, device.values):
        return _Refusal("match", problem)
    wanted = needs.of(device.facts.kind)
    free, need = _free_bytes(device), wanted.weight_bytes + needs.min_kv_bytes
    if need <= free:
        return None
    held = sum(holder.held_bytes for holder in device.holders)
    by = f", other processes hold {bytes_text(held)}" if held else ""
    return _Refusal(
        "match",
        f"{needs.model_name} needs {bytes_text(need)} for weights and one short sequence, {bytes_text(free)} are free{by}",
        missing_memory=True,
    )


def dtype_problem(needs: Needs, kind: str, values: Mapping[str, Value]) -> str:
    """Why a device with these values cannot multiply in the model's number format; empty where it can, or does not say."""
    dtype, dtypes = needs.of(kind).dtype, values.get("compute.dtypes")
    if not dtype or dtypes is None or dtype in str(dtypes.value).split():
        return ""
    capability = values.get("compute.capability")
    has = f"this card has {capability.value}" if capability else "this card is older"
    first = _FIRST_CAPABILITY.get(dtype, "newer")
    return f"{needs.model_name} is computed in {dtype}, which needs compute capability {first}; {has}"


def _preference(device: FoundDevice, needs: Needs) -> tuple[bool, bool, bool, float, float, float]:
    return (
        device.facts.kind != "cpu",
        not device.integrated,
        _is_roomy(device, needs),
        _bus_bandwidth(device),
        _link_share(device),
        _free_bytes(device),
    )


def _is_roomy(device: FoundDevice, needs: Needs) -> bool:
    return _free_bytes(device) >= needs.of(device.facts.kind).weight_bytes + needs.roomy_kv_bytes


def _free_bytes(device: FoundDevice) -> float:
    """Free memory; all of it where the device does not tell."""
    free = device.values["memory.free"].value if "memory.free" in device.values else device.facts.memory_bytes
    return float(free) if isinstance(free, int | float) else 0.0


def _bus_bandwidth(device: FoundDevice) -> float:
    """What the memory bus could carry, by the driver's clock and width; 0 where the driver does not tell."""
    value = device.values.get("memory.bus_bandwidth")
    return float(value.value) if value is not None and isinstance(value.value, int | float) else 0.0


def _link_share(device: FoundDevice) -> float:
    """Lanes in use over the lanes there could be; 1 where the driver does not tell."""
    width, most = (device.values.get(f"link.{name}") for name in ("width", "max_width"))
    if width is None or most is None or not isinstance(width.value, int) or not isinstance(most.value, int):
        return 1.0
    return width.value / most.value if 0 < width.value < most.value else 1.0


def _passed_over(device: FoundDevice, best: FoundDevice, needs: Needs) -> str:
    """Why a device that fits was not taken: the first thing in which the best one is better."""
    name = best.facts.name
    if device.facts.kind == "cpu":
        return f"{name} is quicker"
    if device.integrated and not best.integrated:
        return f"it is integrated, {name} is not"
    if _is_roomy(best, needs) and not _is_roomy(device, needs):
        return f"{name} has room for long sequences, here {bytes_text(_free_bytes(device))} are free"
    ours, theirs = _bus_bandwidth(device), _bus_bandwidth(best)
    if ours < theirs:
        return f"the memory bus of {name} carries {theirs / 1e9:,.0f} GB/s, this one {ours / 1e9:,.0f} GB/s"
    if _link_share(device) < _link_share(best):
        width, most = (device.values[f"link.{part}"].value for part in ("width", "max_width"))
        return f"its PCIe link runs at x{width} of x{most}, that of {name} does not"
    if _free_bytes(device) < _free_bytes(best):
        return f"{name} has more free memory"
    return f"{name} is its equal and comes first"


def _praise(
    best: FoundDevice,
    fitting: list[FoundDevice],
    inventory: Inventory,
    requested: str,
    needs: Needs,
    refusals: list[tuple[FoundDevice, _Refusal | None]],
) -> str:
    if requested != "auto" and len(fitting) == 1:
        return f"--device {requested} was asked for"
    if best.facts.kind != "cpu":
        rivals = [device for device in fitting if device is not best and device.facts.kind != "cpu"]
        return _ahead_of(best, rivals, needs) if rivals else "the only GPU that fits"
    refused = [(device, refusal) for device, refusal in refusals if refusal and device.facts.kind in SUPPORTED_KINDS]
    if inventory.cuda_problem:
        return f"no GPU: {inventory.cuda_problem}"
    if refused:
        device, refusal = refused[0]
        return f"no GPU can be used: {device.facts.name}: {refusal.reason}"
    return "no GPU can be used"


def _ahead_of(best: FoundDevice, rivals: list[FoundDevice], needs: Needs) -> str:
    """In what the best is ahead of the next best."""
    second = max(rivals, key=lambda device: _preference(device, needs))
    if second.integrated and not best.integrated:
        return "the discrete GPU"
    if _is_roomy(best, needs) and not _is_roomy(second, needs):
        return f"room for long sequences: {bytes_text(_free_bytes(best))} free"
    if _bus_bandwidth(second) < _bus_bandwidth(best):
        return f"the fastest memory bus of {len(rivals) + 1} GPUs that fit: {_bus_bandwidth(best) / 1e9:,.0f} GB/s"
    if _link_share(second) < _link_share(best):
        return "the only one of equal GPUs whose PCIe link has all its lanes"
    if _free_bytes(second) < _free_bytes(best):
        return "most free memory"
    return f"the first of {len(rivals) + 1} equal GPUs"


def _nothing_fits(
    inventory: Inventory, requested: str, refusals: list[tuple[FoundDevice, _Refusal | None]], needs: Needs
) -> str:
    kinds = {device.facts.kind for device in inventory.devices}
    lines = [f"{device.facts.name} ({device.facts.kind}): {refusal.reason}" for device, refusal in refusals if refusal]
    if requested == "cuda" and "cuda" not in kinds:
        lines.insert(0, inventory.cuda_problem or "no CUDA device was found")
    return f"no device can run this: {'; '.join(lines)}. What to do: {_remedy(requested, refusals, needs)}"


def _remedy(requested: str, refusals: list[tuple[FoundDevice, _Refusal | None]], needs: Needs) -> str:
    """The three cheapest changes for the device that is nearest to fitting; else another `--device`."""
    short = [device for device, refusal in refusals if refusal and refusal.missing_memory]
    if not short:
        return "use --device auto, or --device cpu" if requested not in ("auto", "cpu") else "see the reasons above"
    nearest = max(short, key=lambda device: _free_bytes(device) / (needs.of(device.facts.kind).weight_bytes or 1))
    wanted = needs.of(nearest.facts.kind)
    need = MemoryNeed(
        needs.model_name,
        (Part("weights", wanted.weight_bytes, ("weights",)), Part("kv", needs.min_kv_bytes)),
        context_tokens=1,
    )
    others = tuple(
        OtherDevice(device.facts.name, int(_free_bytes(device)), f"--device {device.facts.kind}")
        for device, refusal in refusals
        if device is not nearest and requested != "auto" and refusal_of(device, "auto", needs) is None
    )
    options = Options(wanted.formats, needs.models, nearest.holders, others)
    changes = cheapest_changes(need, int(_free_bytes(nearest)), options)
    return f"on {nearest.facts.name}, cheapest first: {describe_changes(changes)}"
