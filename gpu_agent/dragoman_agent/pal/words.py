"""Numbers with their units as a person reads them. Pure."""

from __future__ import annotations

from dragoman_agent.pal.analysis import UPPER_BOUND
from dragoman_agent.pal.profile import Value

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SHORT = {"bytes/s": "B/s", "flop/s": "FLOP/s", "operations/s": "operations/s", "Hz": "Hz"}


def quantity(value: float, unit: str) -> str:
    """A number with its unit: seconds as ms or us, bytes as GiB, rates with a decimal prefix."""
    if unit == "s" and value:
        scale, name = next((entry for entry in _SECONDS if abs(value) >= entry[0]), _SECONDS[-1])
        return f"{value / scale:.3g} {name}"
    if unit == "bytes":
        size, name = next((entry for entry in _BINARY if abs(value) >= entry[0]), (1, "B"))
        return f"{value / size:.1f} {name}" if size > 1 else f"{value:.0f} B"
    if unit in _SHORT:
        scale, prefix = next((entry for entry in _DECIMAL if abs(value) >= entry[0]), (1.0, ""))
        return f"{value / scale:.3g} {prefix}{_SHORT[unit]}"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,} {unit}".strip()
    return f"{value:.4g} {unit}".strip()


def value_text(value: Value) -> str:
    """A value of a profile."""
    match value.value:
        case bool():
            return "yes" if value.value else "no"
        case str():
            return value.value
        case tuple():
            labels = value.labels or ("",) * len(value.value)
            named = zip(labels, value.value, strict=True)
            return ", ".join(f"{label}: {quantity(number, value.unit)}".removeprefix(": ") for label, number in named)
        case number:
            return f"{'at most ' if is_bound(value) else ''}{quantity(number, value.unit)}"


def is_bound(value: Value) -> bool:
    """Whether the value is no cost but what a cost lies below, see `analysis.measured_cost`."""
    return value.provenance == "derived" and value.note.startswith(UPPER_BOUND)
