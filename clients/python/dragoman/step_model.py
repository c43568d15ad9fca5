"""Predicted step times of one model on one device: bilinear over a grid of batch size and context length.

One file for the agent, the controller, the simulator and the null device, so that a prediction is the same everywhere.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.v1 import hardware_pb2


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of a decode step at each (batch size, mean context), row-major, and the speed of prefill.

    Outside the grid the nearest edge's slope is continued, so that a longer context never looks free.
    """

    batch_sizes: tuple[int, ...]
    context_tokens: tuple[int, ...]
    decode_seconds_grid: tuple[float, ...]
    prefill_tokens_per_second: float
    prefill_base_seconds: float

    def __post_init__(self) -> None:
        expected = len(self.batch_sizes) * len(self.context_tokens)
        if not expected or len(self.decode_seconds_grid) != expected:
            raise ValueError(f"step model: {len(self.decode_seconds_grid)} times for a grid of {expected}")
        for name, axis in (("batch_sizes", self.batch_sizes), ("context_tokens", self.context_tokens)):
            if any(a >= b for a, b in itertools.pairwise(axis)) or axis[0] < 0:
                raise ValueError(f"step model: {name} must ascend from a value >= 0, got {list(axis)}")
        if not self.prefill_tokens_per_second > 0:
            raise ValueError(
                f"step model: prefill_tokens_per_second is {self.prefill_tokens_per_second}, must be over 0"
            )

    def decode_step_seconds(self, batch_size: float, mean_context: float) -> float:
        """Seconds of one decode step of `batch_size` sequences whose contexts average `mean_context` tokens."""
        row, row_weight = _bracket(self.batch_sizes, max(batch_size, 1.0))
        column, column_weight = _bracket(self.context_tokens, max(mean_context, 0.0))
        width = len(self.context_tokens)

        def at(r: int) -> float:
            left = self.decode_seconds_grid[r * width + column]
            if width == 1:
                return left
            return left + column_weight * (self.decode_seconds_grid[r * width + column + 1] - left)

        low = at(row)
        if len(self.batch_sizes) == 1:
            return max(low, 0.0)
        return max(low + row_weight * (at(row + 1) - low), 0.0)

    def prefill_seconds(self, num_tokens: float) -> float:
        """Seconds to compute `num_tokens` prompt tokens; 0 tokens take none."""
        if num_tokens <= 0:
            return 0.0
        return max(self.prefill_base_seconds, num_tokens / self.prefill_tokens_per_second)

    def slower(self, factor: float) -> StepModel:
        """The model of a device on which everything takes `factor` times as long."""
        return StepModel(
            self.batch_sizes,
            self.context_tokens,
            tuple(seconds * factor for seconds in self.decode_seconds_grid),
            self.prefill_tokens_per_second / factor,
            self.prefill_base_seconds * factor,
        )

    def to_proto(self) -> hardware_pb2.StepModel:
        """The message sent at registration."""
        return hardware_pb2.StepModel(
            batch_sizes=self.batch_sizes,
            context_tokens=self.context_tokens,
            decode_seconds=self.decode_seconds_grid,
            prefill_tokens_per_second=self.prefill_tokens_per_second,
            prefill_base_seconds=self.prefill_base_seconds,
        )

    @classmethod
    def from_proto(cls, message: hardware_pb2.StepModel) -> StepModel:
        """The model of a message. Raises ValueError when its grid is not one."""
        return cls(
            batch_sizes=tuple(message.batch_sizes),
            context_tokens=tuple(message.context_tokens),
            decode_seconds_grid=tuple(message.decode_seconds),
            prefill_tokens_per_second=message.prefill_tokens_per_second,
            prefill_base_seconds=message.prefill_base_seconds,
        )


def _bracket(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Index of the grid point below `value` and the weight of the next one; over 1 beyond the edge."""
    if len(axis) == 1:
        return 0, 0.0
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])
