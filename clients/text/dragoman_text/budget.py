"""What one rendering of a template may use, and the checks that keep it there."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

MAX_INTEGER_BITS = 8192


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may use. Input text is allowed on top, four times over, in `max_chars`."""

    max_source_chars: int = 1 << 20
    max_steps: int = 1_000_000  # loop passes, calls and container items
    max_seconds: float = 2.0  # of this thread's CPU time
    max_chars: int = 4 << 20  # of the output and of any value on the way


class LimitExceeded(Exception):
    """A template wanted more than its limits. The message names the limit."""


class TemplateRefusal(Exception):
    """The template itself called `raise_exception`. The message is the template's."""


class Budget:
    """What is left of the limits in one rendering."""

    def __init__(self, limits: TemplateLimits, num_input_chars: int) -> None:
        self.max_chars = limits.max_chars + 4 * num_input_chars
        self._limits = limits
        self._steps = 0
        self._next_clock = 0
        self._end = time.thread_time() + limits.max_seconds

    def step(self, count: int = 1) -> None:
        """Count work. Raises LimitExceeded when there has been too much."""
        self._steps += count
        if self._steps > self._limits.max_steps:
            raise LimitExceeded(
                f"more than {self._limits.max_steps} steps; a loop in the template does not end in time"
            )
        if self._steps >= self._next_clock:
            self._next_clock = self._steps + 64
            if time.thread_time() > self._end:
                raise LimitExceeded(f"more than {self._limits.max_seconds:g} seconds")

    def size(self, num_chars: int) -> None:
        """Raises LimitExceeded when a value of `num_chars` characters would be too large."""
        if num_chars > self.max_chars:
            raise LimitExceeded(f"a text of {num_chars} characters, at most {self.max_chars} are allowed")

    def measure(self, value: Any) -> int:
        """Characters and items in a value and all it holds, shared parts counted each time they appear."""
        total, pending = 0, [value]
        while pending:
            item = pending.pop()
            total += 1
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                self.step(len(item) + 1)
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, (list, tuple)):
                self.step(len(item) + 1)
                pending.extend(item)
            if total > self.max_chars:
                self.size(total)
        return total


current_budget: ContextVar[Budget] = ContextVar("budget")
WIDE_FORMAT = re.compile(r"\{[^{}]*[:!][^{}]*(\d{4,}|\{)")
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")


def check_method(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.size(args[0])
    elif name == "expandtabs":
        width = args[0] if args and isinstance(args[0], int) else 8
        budget.size(len(text) + text.count("\t") * width)
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        budget.size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        budget.size(budget.measure(args[0]) + len(text) * len(args[0]))


def check_binop(budget: Budget, operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        check_percent(budget, left, right)
    elif operator == "+" and isinstance(left, (str, list, tuple)):
        budget.size(budget.measure(left) + budget.measure(right))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, (str, list, tuple)):
            left, right = right, left
        if isinstance(left, (str, list, tuple)) and isinstance(right, int):
            budget.size(budget.measure(left) * right)
        elif isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() * max(right, 0))


def check_bits(num_bits: int) -> None:
    if num_bits > MAX_INTEGER_BITS:
        raise LimitExceeded(f"an integer of {num_bits} bits, at most {MAX_INTEGER_BITS} are allowed")


def check_percent(budget: Budget, pattern: str, values: Any) -> None:
    if _WIDE_PERCENT.search(pattern):
        raise LimitExceeded("a format with a width above 999 or a computed width")
    budget.size(len(pattern) + pattern.count("%") * budget.measure(values))
