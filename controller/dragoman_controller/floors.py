"""Lower bounds of every agent's seconds for one request, all computed at once. Pure.

The bound of an agent is a sum of four products, each of a number of the agent and a number of the request. The numbers of
all agents lie side by side in one big integer, 64 bits each, so that one multiplication of Python multiplies them all, in
a loop of C: a tenth of the time that a loop over the agents takes. Numbers are rounded down and cut to what fits, so a
bound may be low and is never high.
"""

from __future__ import annotations

from itertools import compress

_LANE_BYTES = 8
_LANE_BITS = 64
_UNITS_PER_SECOND = 1 << 40
# Four terms below this leave the top two bits of a lane free: one marks a closed agent, one is for comparing.
_MAX_TERM = 1 << 59
_CLOSED = 1 << 62
_MAX_SECONDS = (_CLOSED - 2) / _UNITS_PER_SECOND


class Floors:
    """Bounds of `num_agents` for requests of one choice whose prompt and output are at most `max_context_tokens` each.

    An agent's seconds are at least queue + max(base, u * per_token) + (o - 1) * (step + slope * x) for u uncached prompt
    tokens, o output tokens and a mean context of x of the request itself.
    """

    __slots__ = (
        "_base",
        "_lanes",
        "_limits",
        "_max_context",
        "_num",
        "_per_token",
        "_queue",
        "_slope",
        "_step",
        "_top",
    )

    def __init__(self, num_agents: int, max_context_tokens: int) -> None:
        self._num = num_agents
        self._max_context = max_context_tokens
        self._lanes = [(0, 0, 0, 0, 0)] * num_agents
        self._queue = self._base = self._per_token = self._step = self._slope = 0
        ones = sum(1 << (_LANE_BITS * index) for index in range(num_agents))
        self._limits, self._top = ones, ones << (_LANE_BITS - 1)

    def put(self, index: int, queue: float, base: float, per_token: float, step: float, slope: float) -> None:
        """The numbers of an agent; `queue`, `base` and `per_token` are not below 0."""
        most = _MAX_TERM // self._max_context
        if step < 0.0 or slope < 0.0:
            step = slope = 0.0  # no steps at all are a bound of any
        self._set(
            index,
            (
                _cut(queue * _UNITS_PER_SECOND, _MAX_TERM),
                _cut(base * _UNITS_PER_SECOND, _MAX_TERM),
                _cut(per_token * _UNITS_PER_SECOND, most),
                _cut(step * _UNITS_PER_SECOND, most),
                _cut(slope * _UNITS_PER_SECOND, most // (2 * self._max_context)),
            ),
        )

    def close(self, index: int) -> None:
        """An agent that may not be chosen."""
        self._set(index, (_CLOSED, 0, 0, 0, 0))

    def of(self, prompt_tokens: int, output_tokens: int, mean_context: float) -> int:
        """The bounds for a request, to be read by `lowest` and `within`."""
        u = min(prompt_tokens, self._max_context)
        o = min(max(output_tokens - 1, 0), self._max_context)
        x = min(int(mean_context), 2 * self._max_context)
        prefill = u * self._per_token
        # Either is a bound; the larger one of the last agent is taken as the nearer one of all.
        if prefill < self._base:
            prefill = self._base
        return self._queue + prefill + o * self._step + o * x * self._slope

    def lowest(self, bounds: int) -> int | None:
        """The agent with the lowest bound; None when none may be chosen."""
        lanes = memoryview(bounds.to_bytes(self._num * _LANE_BYTES, "little")).cast("Q").tolist()
        lowest = min(lanes, default=_CLOSED)
        return None if lowest >= _CLOSED else lanes.index(lowest)

    def within(self, bounds: int, seconds: float) -> list[int]:
        """The agents whose bound is at most so many seconds, in their order."""
        limit = int(seconds * _UNITS_PER_SECOND) + 1 if seconds < _MAX_SECONDS else _CLOSED - 1
        # With the top bit lent to each lane none borrows from its neighbour; it is there afterwards where limit >= bound.
        marks = (self._top + limit * self._limits - bounds) & self._top
        lanes = marks.to_bytes(self._num * _LANE_BYTES, "little")
        return list(compress(range(self._num), lanes[_LANE_BYTES - 1 :: _LANE_BYTES]))

    def _set(self, index: int, lane: tuple[int, int, int, int, int]) -> None:
        before = self._lanes[index]
        self._lanes[index] = lane
        shift = _LANE_BITS * index
        if lane[0] != before[0]:
            self._queue += (lane[0] - before[0]) << shift
        if lane[1] != before[1]:
            self._base += (lane[1] - before[1]) << shift
        if lane[2] != before[2]:
            self._per_token += (lane[2] - before[2]) << shift
        if lane[3] != before[3]:
            self._step += (lane[3] - before[3]) << shift
        if lane[4] != before[4]:
            self._slope += (lane[4] - before[4]) << shift


def _cut(units: float, most: int) -> int:
    return int(units) if units < most else most
