"""Plan fields, memory and decisions in words. Pure: takes protocol messages, gives text; `plan` and `explain` share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dragoman_cli.ready import human_bytes

_PROVENANCE = {0: "unknown", 1: "measured", 2: "reported", 3: "spec", 4: "derived"}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(value: float, unit: str) -> str:
    """A number with its unit for a person: seconds as ms or us, bytes as GiB, rates with a prefix."""
    if unit == "s" and value:
        scale, name = next((entry for entry in _SECONDS if abs(value) >= entry[0]), _SECONDS[-1])
        return f"{value / scale:.3g} {name}"
    if unit == "bytes":
        return human_bytes(value)
    if unit.endswith("/s") and unit[0] in "bf":  # bytes/s, flop/s
        scale, prefix = next((entry for entry in _THOUSANDS if abs(value) >= entry[0]), (1.0, ""))
        return f"{value / scale:.3g} {prefix}{'B' if unit[0] == 'b' else 'FLOP'}/s"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,} {unit}".strip()
    return f"{value:.4g} {unit}".strip()


def field_text(entry: Any) -> str:
    """The value of a `PlanField`; a list with labels tells only where it changes, such as "to 8: 16, to 64: 4"."""
    match entry.WhichOneof("value"):
        case "number":
            return quantity(entry.number, entry.unit)
        case "text":
            return str(entry.text)
        case "flag":
            return "yes" if entry.flag else "no"
        case "numbers":
            return _list_text(list(entry.numbers.values), list(entry.numbers.labels))
        case _:
            return ""


def _list_text(values: Sequence[float], labels: Sequence[str]) -> str:
    if not values:
        return "none"
    if not labels:
        return ", ".join(quantity(value, "") for value in values)
    ends = [index for index in range(len(values)) if index + 1 == len(values) or values[index + 1] != values[index]]
    if len(ends) == 1:
        return quantity(values[0], "")
    parts = [f"to {labels[index]}: {quantity(values[index], '')}" for index in ends[:-1]]
    return ", ".join([*parts, f"above: {quantity(values[ends[-1]], '')}"])


def newest(decisions: Iterable[Any]) -> dict[str, Any]:
    """The newest decision on each subject, in the order in which the subjects first came."""
    found: dict[str, Any] = {}
    for decision in decisions:
        found[decision.subject] = decision
    return found


def paragraph(decision: Any) -> str:
    """One decision in plain words: what was chosen, why, among what, from which values, and what then happened."""
    sentences = [f"{decision.subject}: {_chosen(decision)}. Because: {decision.reason.rstrip('.')}."]
    others = [entry for entry in decision.candidates if entry.rejected_because]
    if others:
        sentences.append("Not taken: " + "; ".join(_candidate(entry, decision.unit) for entry in others) + ".")
    if decision.inputs:
        told = (f"{entry.name} = {entry.value} ({_PROVENANCE[entry.provenance]})" for entry in decision.inputs)
        sentences.append("It rests on " + ", ".join(told) + ".")
    sentences.append(_outcome(decision))
    return " ".join(sentence for sentence in sentences if sentence)


def _chosen(decision: Any) -> str:
    among = [entry.name for entry in decision.candidates]
    unit = "" if not decision.unit or not decision.chosen.replace(".", "").isdigit() else _count_unit(decision)
    text = f"{decision.chosen}{unit}"
    return f"{text}, chosen among {', '.join(among)}" if len(among) > 1 else text


def _count_unit(decision: Any) -> str:
    """The unit belongs to the prediction where there is one; a choice of plain tokens carries it itself."""
    return "" if decision.HasField("predicted") else f" {decision.unit}"


def _candidate(entry: Any, unit: str) -> str:
    predicted = f" ({quantity(entry.predicted, unit)} predicted)" if entry.HasField("predicted") else ""
    return f"{entry.name}{predicted}: {entry.rejected_because.rstrip('.')}"


def _outcome(decision: Any) -> str:
    predicted, measured = decision.HasField("predicted"), decision.HasField("measured")
    if predicted and measured:
        ratio = f", {decision.measured / decision.predicted:.2f} times the prediction" if decision.predicted else ""
        return (
            f"Predicted {quantity(decision.predicted, decision.unit)}, "
            f"measured {quantity(decision.measured, decision.unit)}{ratio}."
        )
    if predicted:
        return f"Predicted {quantity(decision.predicted, decision.unit)}; not measured yet."
    return f"Measured {quantity(decision.measured, decision.unit)}." if measured else ""
