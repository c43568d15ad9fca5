"""A step model read many times: one decode row a batch size, and straight lines below it that bound it."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

from dragoman.step_model import StepModel

# Agents are put in order of pace by one decode step of this kind: the order only decides how much work a search takes.
_PACE_CONTEXT_TOKENS = 1024


class DecodeRow:
    """Seconds of a decode step at one batch size over the mean context: piecewise linear, never below 0."""

    __slots__ = ("_packed", "address", "contexts", "floor", "seconds", "slopes")

    def __init__(self, contexts: Sequence[int], seconds: Sequence[float]) -> None:
        """`contexts` ascend; one time a context, none below 0."""
        if len(contexts) == 1:
            # Flat: a second knot spares everyone the question whether there is a segment.
            contexts, seconds = (contexts[0], contexts[0] + 1), (seconds[0], seconds[0])
        self.contexts, self.seconds = tuple(contexts), tuple(seconds)
        self.slopes = tuple(
            [
                (right - left) / (end - start)
                for start, end, left, right in zip(contexts, contexts[1:], seconds, seconds[1:], strict=False)
            ]
        )
        """Of the segment that starts at each knot but the last, which goes on for ever; the first one comes from 0."""
        self.floor = self._floor()
        """(intercept, slope) of a line that is nowhere above the row."""
        self._packed = array("d", (len(self.contexts), *self.contexts, *self.seconds, *self.slopes))
        self.address = self._packed.buffer_info()[0]
        """Where native code reads the row: number of knots, contexts, seconds, slopes. Valid as long as this object lives."""

    def __reduce__(self) -> tuple[type[DecodeRow], tuple[tuple[int, ...], tuple[float, ...]]]:
        """Another process, or a copy, has the numbers at another address."""
        return DecodeRow, (self.contexts, self.seconds)

    def at(self, mean_context: float) -> float:
        """Seconds at a mean context in tokens; equals StepModel.decode_step_seconds."""
        contexts = self.contexts
        segment = bisect_right(contexts, mean_context, 1, len(contexts) - 1) - 1
        seconds = self.seconds[segment] + (mean_context - contexts[segment]) * self.slopes[segment]
        return seconds if seconds > 0.0 else 0.0

    def floor_between(self, low: float, high: float) -> tuple[float, float]:
        """(intercept, slope) of a line that is nowhere above the row from `low` to `high` > `low`, and near it there."""
        at_low, at_high = self.at(low), self.at(high)
        if not at_low or not at_high:
            return 0.0, 0.0  # the row bends up from 0 somewhere between its knots
        slope = (at_high - at_low) / (high - low)
        intercept = at_low - slope * low
        contexts = self.contexts
        for knot in range(bisect_right(contexts, low), len(contexts)):
            if contexts[knot] >= high:
                break
            intercept = min(intercept, self.seconds[knot] - slope * contexts[knot])
        return intercept, slope

    def _floor(self) -> tuple[float, float]:
        contexts, seconds = self.contexts, self.seconds
        # Past the last knot a steeper line would cross the row, and before the first one a flatter one would.
        slope = min((seconds[-1] - seconds[0]) / (contexts[-1] - contexts[0]), self.slopes[-1])
        at_zero = seconds[0] - contexts[0] * self.slopes[0]
        return min(
            at_zero, min([time - slope * context for context, time in zip(contexts, seconds, strict=True)])
        ), slope


class _Rows(dict[int, DecodeRow]):
    """The rows of a model by batch size, each built when it is first asked for."""

    def __init__(self, model: StepModel) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, batch_size: int) -> DecodeRow:
        row = self[batch_size] = _row_of(self._model, batch_size)
        return row


class StepTable:
    """A StepModel with its rows remembered by batch size."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.base_seconds = model.prefill_base_seconds
        self.seconds_per_prompt_token = 1.0 / model.prefill_tokens_per_second
        self.pace_seconds = model.decode_step_seconds(1, _PACE_CONTEXT_TOKENS)
        self.row: Callable[[int], DecodeRow] = _Rows(model).__getitem__
        """The decode row of a whole batch size. Asked for so often that a function around the dict would be most of it."""

    def __reduce__(self) -> tuple[type[StepTable], tuple[StepModel]]:
        """Another process builds its own rows."""
        return StepTable, (self.model,)

    def prefill_seconds(self, num_tokens: float) -> float:
        """As StepModel.prefill_seconds."""
        if num_tokens <= 0:
            return 0.0
        seconds = num_tokens * self.seconds_per_prompt_token
        return seconds if seconds > self.base_seconds else self.base_seconds


def _row_of(model: StepModel, batch_size: int) -> DecodeRow:
    """StepModel.decode_step_seconds at each context of the grid, with the batch sizes around found only once."""
    contexts, batches, grid = model.context_tokens, model.batch_sizes, model.decode_seconds_grid
    width = len(contexts)
    if len(batches) == 1:
        return DecodeRow(contexts, [max(seconds, 0.0) for seconds in grid])
    lower = bisect_right(batches, batch_size, 1, len(batches) - 1) - 1
    weight = (batch_size - batches[lower]) / (batches[lower + 1] - batches[lower])
    low, high = grid[lower * width : (lower + 1) * width], grid[(lower + 1) * width : (lower + 2) * width]
    # The unclamped line between two knots is what StepModel continues past the edge and clamps afterwards;
    # clamping the knots themselves differs only for a model that predicts negative times.
    return DecodeRow(contexts, [max(a + weight * (b - a), 0.0) for a, b in zip(low, high, strict=True)])
