"""Plan fields, memory and decisions in words. Pure: takes protocol messages, gives text; `plan` and `explain` share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dragoman_agent.pal.words import quantity

_PROVENANCE = {0: "unknown", 1: "measured", 2: "reported", 3: "spec", 4: "derived"}


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
    if not all(label.isdigit() for label in labels):  # what each value is for, and not up to where it holds
        return ", ".join(f"{label}: {quantity(value, '')}" for label, value in zip(labels, values, strict=True))
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
