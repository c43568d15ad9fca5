"""Compares what was observed with what a case expects. Pure.

A mapping expects each of its keys, a list its length and every element, anything else equality. A mapping whose keys
begin with `$` is an operator: $at_least, $at_most, $one_of, $matches (a regular expression, searched), $length, $near
([value, tolerance]), $has (each of these is an element), $same_as (a path such as calls.0.text).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MISSING = object()
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$at_least": lambda wanted, seen: seen >= wanted,
    "$at_most": lambda wanted, seen: seen <= wanted,
    "$one_of": lambda wanted, seen: seen in wanted,
    "$matches": lambda wanted, seen: re.search(wanted, seen) is not None,
    "$length": lambda wanted, seen: len(seen) == wanted,
    "$near": lambda wanted, seen: math.isclose(seen, wanted[0], rel_tol=0, abs_tol=wanted[1]),
    "$has": lambda wanted, seen: all(item in seen for item in wanted),
}


def differences(expected: Any, observed: Any, root: Any, path: str = "") -> list[str]:
    """One line a difference, with its path; empty when all is as expected. `root` is what $same_as looks into."""
    if isinstance(expected, Mapping):
        if expected and all(key.startswith("$") for key in expected):
            return _operate(expected, observed, root, path)
        if not isinstance(observed, Mapping):
            return [f"{path}: expected a mapping, saw {_short(observed)}"]
        found = []
        for key, value in expected.items():
            found += differences(value, observed.get(key, _MISSING), root, f"{path}.{key}" if path else str(key))
        return found
    if isinstance(expected, list) and isinstance(observed, Sequence) and not isinstance(observed, str):
        if len(expected) != len(observed):
            return [f"{path}: expected {len(expected)} entries, saw {len(observed)}: {_short(observed)}"]
        pairs = enumerate(zip(expected, observed, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, root, f"{path}[{index}]")]
    if observed is _MISSING:
        return [f"{path}: expected {_short(expected)}, saw nothing"]
    # 1 == True in Python, and a count is no truth.
    same = expected == observed and isinstance(expected, bool) == isinstance(observed, bool)
    return [] if same else [f"{path}: expected {_short(expected)}, saw {_short(observed)}"]


def _operate(expected: Mapping[str, Any], observed: Any, root: Any, path: str) -> list[str]:
    found = []
    for name, wanted in expected.items():
        if name == "$same_as":
            other = _at(root, wanted)
            if other is _MISSING or other != observed:
                found.append(f"{path}: expected the same as {wanted} = {_short(other)}, saw {_short(observed)}")
            continue
        if name not in _OPERATORS:
            raise ValueError(f"{path}: {name} is not an operator ({', '.join(_OPERATORS)}, $same_as)")
        try:
            holds = observed is not _MISSING and _OPERATORS[name](wanted, observed)
        except TypeError:
            holds = False
        if not holds:
            found.append(f"{path}: expected {name} {_short(wanted)}, saw {_short(observed)}")
    return found


def _at(root: Any, path: str) -> Any:
    value = root
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return _MISSING
    return value


def _short(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 240 else f"{text[:160]} ... {text[-60:]}"
