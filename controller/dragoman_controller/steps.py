"""A step model read many times: one decode row a batch size, and straight lines below it that bound it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from dragoman.step_model import StepModel

# Agents are put in order of pace by one decode step of this kind: the order only decides how much work a search takes.
_PACE_CONTEXT_TOKENS = 1024


class DecodeRow:
    """Seconds of a decode step at one batch size over the mean context: piecewise linear, never below 0."""

    __slots__ = ("_hull", "contexts", "seconds", "slopes")

    def __init__(self, contexts: Sequence[int], seconds: Sequence[float]) -> None:
        """`contexts` ascend; one time a context, none below 0."""
        if len(contexts) == 1:
            # Flat: a second knot spares everyone the question whether there is a segment.
            contexts, seconds = (contexts[0], contexts[0] + 1), (seconds[0], seconds[0])
        self.contexts, self.seconds = tuple(contexts), tuple(seconds)
        knots = list(zip(contexts, seconds, strict=True))
        self.slopes = tuple(_slope(left, right) for left, right in pairwise(knots))
        """Of the segment that starts at each knot but the last, which goes on for ever; the first one comes from 0."""
        self._hull = _lower_hull(knots, self.slopes)

    def at(self, mean_context: float) -> float:
        """Seconds at a mean context in tokens; equals StepModel.decode_step_seconds."""
        contexts = self.contexts
        segment = bisect_right(contexts, mean_context, 1, len(contexts) - 1) - 1
        seconds = self.seconds[segment] + (mean_context - contexts[segment]) * self.slopes[segment]
        return seconds if seconds > 0.0 else 0.0

    def floor_at(self, mean_context: float) -> tuple[float, float]:
        """(intercept, slope) of a line over the context that is nowhere above the row, and near it at `mean_context`."""
        _, intercept, slope = self._hull[0]
        for start, base, rise in self._hull:
            if start > mean_context:
                break
            intercept, slope = base, rise
        return intercept, slope


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _lower_hull(knots: list[tuple[int, float]], slopes: Sequence[float]) -> tuple[tuple[float, float, float], ...]:
    """Segments (start, intercept, slope) of the lower convex hull of a row from 0 to any context, the first from 0."""
    points: list[tuple[float, float]] = [*knots]
    if knots[0][0] > 0:
        # Continued to the left without the clamp at 0, which the clamped row is nowhere below.
        points.insert(0, (0.0, knots[0][1] - knots[0][0] * slopes[0]))
    hull: list[tuple[float, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    # Past the last knot the row goes on with its last slope for ever: no steeper segment may come before.
    while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= slopes[-1]:
        hull.pop()
    rises = [*(_slope(left, right) for left, right in pairwise(hull)), slopes[-1]]
    segments = [(start, value - rise * start, rise) for (start, value), rise in zip(hull, rises, strict=True)]
    return ((0.0, *segments[0][1:]), *segments[1:])


class StepTable:
    """A StepModel with its rows remembered by batch size."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.base_seconds = model.prefill_base_seconds
        self.seconds_per_prompt_token = 1.0 / model.prefill_tokens_per_second
        self.pace_seconds = model.decode_step_seconds(1, _PACE_CONTEXT_TOKENS)
        self._rows: dict[int, DecodeRow] = {}

    def row(self, batch_size: int) -> DecodeRow:
        """The decode row of a whole batch size."""
        row = self._rows.get(batch_size)
        if row is None:
            row = self._rows[batch_size] = self._build(batch_size)
        return row

    def prefill_seconds(self, num_tokens: float) -> float:
        """As StepModel.prefill_seconds."""
        if num_tokens <= 0:
            return 0.0
        seconds = num_tokens * self.seconds_per_prompt_token
        return seconds if seconds > self.base_seconds else self.base_seconds

    def _build(self, batch_size: int) -> DecodeRow:
        contexts = self.model.context_tokens
        # The unclamped line between two knots is what StepModel continues past the edge and clamps afterwards;
        # clamping the knots themselves would differ only for a model that predicts negative times.
        return DecodeRow(contexts, [self.model.decode_step_seconds(batch_size, context) for context in contexts])
