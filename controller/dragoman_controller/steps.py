"""A step model read many times: one decode row a batch size, and a straight line below it that bounds it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from dragoman.step_model import StepModel


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Seconds of a decode step at one batch size over the mean context: piecewise linear, never below 0."""

    contexts: tuple[int, ...]
    seconds: tuple[float, ...]
    last_slope: float

    def at(self, mean_context: float) -> float:
        """Seconds at a mean context in tokens; equals StepModel.decode_step_seconds."""
        contexts, seconds = self.contexts, self.seconds
        if len(contexts) == 1:
            return seconds[0]
        index = min(max(bisect_right(contexts, mean_context) - 1, 0), len(contexts) - 2)
        left = seconds[index]
        weight = (mean_context - contexts[index]) / (contexts[index + 1] - contexts[index])
        return max(left + weight * (seconds[index + 1] - left), 0.0)

    def floor_from(self, mean_context: float) -> tuple[float, float]:
        """(seconds, slope) of a line through the row at `mean_context` that is nowhere above it to the right."""
        start = self.at(mean_context)
        slope = self.last_slope
        if start <= 0:
            # The clamp at 0 bends the row between knots, so a chord from here could lie above it.
            slope = min(slope, 0.0)
        for context, seconds in zip(self.contexts, self.seconds, strict=True):
            if context > mean_context:
                slope = min(slope, (seconds - start) / (context - mean_context))
        return start, slope


class StepTable:
    """A StepModel with its rows remembered by batch size."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.seconds_per_prompt_token = 1.0 / model.prefill_tokens_per_second
        self._rows: dict[int, DecodeRow] = {}

    def row(self, batch_size: int) -> DecodeRow:
        """The decode row of a whole batch size."""
        row = self._rows.get(batch_size)
        if row is None:
            row = self._rows[batch_size] = self._build(batch_size)
        return row

    def prefill_seconds(self, num_tokens: float) -> float:
        """As StepModel.prefill_seconds."""
        return self.model.prefill_seconds(num_tokens)

    def _build(self, batch_size: int) -> DecodeRow:
        contexts = self.model.context_tokens
        # The unclamped line between two knots is what StepModel continues past the edge and clamps afterwards;
        # clamping the knots themselves would differ only for a model that predicts negative times.
        seconds = tuple(self.model.decode_step_seconds(batch_size, context) for context in contexts)
        last_slope = (seconds[-1] - seconds[-2]) / (contexts[-1] - contexts[-2]) if len(contexts) > 1 else 0.0
        return DecodeRow(contexts, seconds, last_slope)
