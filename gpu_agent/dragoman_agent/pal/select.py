"""Which device to use, and why not the others. Pure: an inventory and the model's needs in, a reasoned choice out."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.pal.attributes import FoundDevice, Inventory

# Backends of this version. A device of another kind is listed and refused with that reason.
SUPPORTED_KINDS = ("cpu", "cuda")


class NoDeviceError(Exception):
    """No device fits. The message says what was found, why each was refused, and what to do."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model asks of a device."""

    model_name: str
    weight_bytes: int
    min_kv_bytes: int  # KV of one short sequence


@dataclass(frozen=True, slots=True)
class Verdict:
    """One device and what was decided about it."""

    device: FoundDevice
    chosen: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen device first, the others with their reasons."""

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict:
        """The verdict on the chosen device."""
        return self.verdicts[0]


def choose_device(inventory: Inventory, requested: str, needs: Needs) -> Selection:
    """Pick a device in three steps: probed, matched with the model, runtime valid.

    `requested` is "auto" or a kind such as "cpu". A discrete device is preferred to an integrated one, and among
    several the one with most free memory. Raises NoDeviceError.
    """
    refusals = [(device, _refusal(device, requested, needs)) for device in inventory.devices]
    fitting = [device for device, refusal in refusals if not refusal]
    if not fitting:
        raise NoDeviceError(_nothing_fits(inventory, requested, refusals))
    best = max(fitting, key=_preference)
    others = [
        Verdict(device, False, refusal or _passed_over(device, best))
        for device, refusal in refusals
        if device is not best
    ]
    return Selection((Verdict(best, True, _praise(best, fitting, inventory, requested)), *others))


def _refusal(device: FoundDevice, requested: str, needs: Needs) -> str:
    """Why a device cannot be used; empty when it can."""
    kind = device.facts.kind
    if device.problem:
        return device.problem
    if requested not in ("auto", kind):
        return f"--device {requested} was asked for"
    if kind not in SUPPORTED_KINDS:
        return f"this version has no {kind} backend"
    free, need = _free_bytes(device), needs.weight_bytes + needs.min_kv_bytes
    if need > free:
        return (
            f"{needs.model_name} needs {_gib(need)} for weights and one short sequence, {_gib(free)} are free; "
            "free memory, take a smaller model, or a smaller number format"
        )
    return ""


def _preference(device: FoundDevice) -> tuple[bool, bool, float]:
    return device.facts.kind != "cpu", not device.integrated, _free_bytes(device)


def _free_bytes(device: FoundDevice) -> float:
    """Free memory; all of it where the device does not tell."""
    free = device.values["memory.free"].value if "memory.free" in device.values else device.facts.memory_bytes
    return float(free) if isinstance(free, int | float) else 0.0


def _passed_over(device: FoundDevice, best: FoundDevice) -> str:
    if device.facts.kind == "cpu":
        return f"{best.facts.name} is quicker"
    if device.integrated and not best.integrated:
        return f"it is integrated, {best.facts.name} is not"
    return f"{best.facts.name} has more free memory"


def _praise(best: FoundDevice, fitting: list[FoundDevice], inventory: Inventory, requested: str) -> str:
    if requested != "auto":
        return f"--device {requested} was asked for"
    if best.facts.kind != "cpu":
        return "the only GPU that fits" if sum(d.facts.kind != "cpu" for d in fitting) == 1 else "most free memory"
    if inventory.cuda_problem:
        return f"no GPU: {inventory.cuda_problem}"
    return "no GPU can be used"


def _nothing_fits(inventory: Inventory, requested: str, refusals: list[tuple[FoundDevice, str]]) -> str:
    kinds = {device.facts.kind for device in inventory.devices}
    lines = [f"{device.facts.name} ({device.facts.kind}): {refusal}" for device, refusal in refusals]
    if requested == "cuda" and "cuda" not in kinds:
        lines.insert(0, inventory.cuda_problem or "no CUDA device was found")
    remedy = "use --device auto, or --device cpu" if requested not in ("auto", "cpu") else "see the reasons above"
    return f"no device can run this: {'; '.join(lines)}. What to do: {remedy}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
