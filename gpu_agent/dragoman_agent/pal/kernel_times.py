"""Seconds of kernel calls: measured where they were timed, else predicted and corrected by their family's measurements."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

from dragoman_agent.pal.kernel_calls import KernelCall, parse_key, predicted_seconds
from dragoman_agent.pal.rates import Rates
from dragoman_agent.pal.timings import Timings

STEP_KIND = "decode-step"
_STEP_KEY = re.compile(rf"{STEP_KIND}/(.+)/b(\d{{1,9}})/c(\d{{1,9}})")


class KernelTimes:
    """Answers for one device. Without timings it is the analytic prediction alone."""

    def __init__(self, rates: Rates, timings: Timings | None = None) -> None:
        """Keys of `timings` that this version does not know are passed over: they are another version's."""
        self.rates = rates
        self._timings = timings
        self._ratios: dict[str, dict[int, dict[int, float]]] = {}  # family -> rows -> context -> measured / predicted
        self._steps: dict[str, dict[int, dict[int, float]]] = {}  # model -> batch -> context -> measured seconds
        self._seconds: dict[str, float] = {}
        self._sums: dict[Hashable, float] = {}
        for key, seconds in (timings.seconds if timings is not None else {}).items():
            self._add(key, seconds)

    @property
    def has_measurements(self) -> bool:
        """Whether anything of this version's kernels was timed."""
        return bool(self._ratios or self._steps)

    def measured(self, call: KernelCall) -> float | None:
        """Seconds of exactly this call, None where it was not timed."""
        return None if self._timings is None else self._timings.get(call.key)

    def seconds(self, call: KernelCall) -> float:
        """Measured seconds, else the prediction times measured / predicted of its family, interpolated."""
        key = call.key
        if key not in self._seconds:
            measured = self.measured(call)
            self._seconds[key] = (
                predicted_seconds(self.rates, call) * self.ratio(call) if measured is None else measured
            )
        return self._seconds[key]

    def once(self, key: Hashable, work: Callable[[], float]) -> float:
        """What `work` gives, made once a key: a sum of this device's times."""
        if key not in self._sums:
            self._sums[key] = work()
        return self._sums[key]

    def ratio(self, call: KernelCall) -> float:
        """Measured / predicted of the call's family at its rows and context; 1 where nothing of it was timed."""
        grid = self._ratios.get(call.family)
        return 1.0 if grid is None else _at(grid, *call.point)

    def step_ratio(
        self, model_name: str, predicted: Sequence[tuple[int, int, float]], batch: int, context: int
    ) -> float:
        """Measured / predicted of whole decode steps of `model_name` at (batch, context).

        `predicted` has (batch, context, seconds) for every step that `timed_steps` names. 1 where none was timed.
        """
        held = self._steps.get(model_name)
        if held is None:
            return 1.0
        grid: dict[int, dict[int, float]] = {}
        for rows, tokens, seconds in predicted:
            grid.setdefault(rows, {})[tokens] = held[rows][tokens] / seconds
        return _at(grid, batch, context)

    def timed_steps(self, model_name: str) -> list[tuple[int, int]]:
        """(batch, context) of the whole steps that were timed."""
        return [(batch, context) for batch, row in self._steps.get(model_name, {}).items() for context in row]

    def _add(self, key: str, seconds: float) -> None:
        step = _STEP_KEY.fullmatch(key)
        if step is not None:
            self._steps.setdefault(step[1], {}).setdefault(int(step[2]), {})[int(step[3])] = seconds
            return
        call = parse_key(key)
        if call is None:
            return
        predicted = predicted_seconds(self.rates, call)
        if math.isfinite(predicted):
            rows, context = call.point
            self._ratios.setdefault(call.family, {}).setdefault(rows, {})[context] = seconds / predicted


def step_key(model_name: str, batch: int, context: int) -> str:
    """The key of a whole decode step on the device: `batch` sequences of `context` tokens."""
    return f"{STEP_KIND}/{model_name}/b{batch}/c{context}"


def _at(grid: dict[int, dict[int, float]], rows: int, context: int) -> float:
    """Linear in context and in the logarithm of rows; beyond the edges the edge holds."""
    axis = sorted(grid)
    low, high, weight = _bracket([math.log(max(entry, 1)) for entry in axis], math.log(max(rows, 1)))
    ends = []
    for index in (low, high):
        row = grid[axis[index]]
        contexts = sorted(row)
        left, right, share = _bracket(contexts, context)
        ends.append(row[contexts[left]] + share * (row[contexts[right]] - row[contexts[left]]))
    return ends[0] + weight * (ends[1] - ends[0])


def _bracket(axis: Sequence[float], value: float) -> tuple[int, int, float]:
    """Indices of the points around `value` and the weight of the second."""
    index = bisect_left(axis, value)
    if index == 0:
        return 0, 0, 0.0
    if index == len(axis):
        return len(axis) - 1, len(axis) - 1, 0.0
    return index - 1, index, (value - axis[index - 1]) / (axis[index] - axis[index - 1])
