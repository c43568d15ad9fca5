"""The agents of one model as placement sees them, with lower bounds of their seconds that are quick to search."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dragoman_controller.agent_view import AgentView, Shape, Terms
from dragoman_controller.floors import Floors
from dragoman_controller.native.library import Library, SearchTable
from dragoman_controller.tuples import new

# The usual context follows the last hundred requests or so.
_USUAL_WEIGHT = 0.02
_FIRST_USUAL_CONTEXT = 1024.0
# Most requests lie within this factor of it, and share bounds, which are made anew when it has drifted by the other.
_USUAL_SPREAD, _USUAL_DRIFT = 3.0, 1.4
_MAX_NUM_REPLACED = 256
_NONE: frozenset[int] = frozenset()


class Snapshot(NamedTuple):
    """The views at one instant: a copy of an earlier list, and the first so many replacements since, shared with others."""

    base: tuple[AgentView, ...]
    replaced: list[tuple[int, AgentView]]
    num_replaced: int

    def views(self) -> list[AgentView]:
        """The views, in the order of the candidates."""
        views = list(self.base)
        for index, view in self.replaced[: self.num_replaced]:
            views[index] = view
        return views


@dataclass(slots=True)
class _Range:
    """The floors for requests whose own mean context lies from `low` to `high`; those of `dirty` agents are old."""

    floors: Floors
    low: float
    high: float
    dirty: set[int]


class Candidates:
    """The agents of one model in parallel lists, replaced view by view as loads change.

    With a `library` their numbers also lie in a table that C++ searches; without, in `terms` and lower bounds of them.
    """

    __slots__ = (
        "_base",
        "_position",
        "_ranges",
        "_ranges_for",
        "_replaced",
        "_small",
        "_states",
        "_usual_context",
        "_winners",
        "largest_context",
        "num_able",
        "num_free",
        "num_places",
        "smallest_context",
        "table",
        "terms",
        "views",
    )

    def __init__(self, library: Library | None = None) -> None:
        self.table = SearchTable(library) if library is not None else None
        self.views: list[AgentView] = []
        self.terms: list[Terms] = []
        """Of each view; empty where C++ searches."""
        self.smallest_context = 0
        self.largest_context = 0
        self.num_able = 0
        """Agents that may be given a request now."""
        self.num_places = self.num_free = 0
        """Requests that the serving agents can run at once, and how many more they could."""
        self._usual_context = _FIRST_USUAL_CONTEXT
        self._ranges_for = self._usual_context
        self._winners: dict[tuple[int, int], list[int]] = {}
        self._small: dict[int, frozenset[int]] = {}
        self._base: tuple[AgentView, ...] = ()
        self._replaced: list[tuple[int, AgentView]] = []
        self._states: Counter[str] = Counter()
        self._position: dict[str, int] = {}
        self._divide()

    def __len__(self) -> int:
        return len(self.views)

    def position(self, agent_id: str) -> int | None:
        """Index of an agent in `views`, `terms` and the floors."""
        return self._position.get(agent_id)

    def num_in_state(self, state: str) -> int:
        """Agents in a state, such as "serving"."""
        return self._states[state]

    def with_less_context(self, context_tokens: int) -> frozenset[int]:
        """Positions of the agents with a smaller context."""
        if self.smallest_context >= context_tokens:
            return _NONE
        return self._small.get(max((size for size in self._small if size < context_tokens), default=0), _NONE)

    def put(self, view: AgentView) -> None:
        """Adds an agent or replaces its view."""
        index = self._position.get(view.agent_id)
        if index is None:
            index = self._position[view.agent_id] = len(self.views)
            self.views.append(view)
            if self.table is None:
                self.terms.append(view.terms())
            self._states[view.state] += 1
            self._count(view, 1)
            self._members_changed()
            if self.table is not None:
                self._lay_out(self.table, index, view)
            return
        before = self.views[index]
        if before.state == view.state == "serving" and before.is_able and view.is_able:
            # As most times: it could be chosen, and can be.
            more_places = view.max_running_requests - before.max_running_requests
            self.num_places += more_places
            self.num_free += more_places + before.num_running - view.num_running
        else:
            self._states[before.state] -= 1
            self._states[view.state] += 1
            self._count(before, -1)
            self._count(view, 1)
        self.views[index] = view
        self._replaced.append((index, view))
        if self.table is not None:
            self._lay_out(self.table, index, view)
        else:
            self.terms[index] = view.terms()
            for part in self._ranges:
                part.dirty.add(index)
        if before.max_context_tokens != view.max_context_tokens:
            self._members_changed()

    def remove(self, agent_id: str) -> None:
        """Drops an agent; the last one takes its place."""
        index = self._position.pop(agent_id, None)
        if index is None:
            return
        self._states[self.views[index].state] -= 1
        self._count(self.views[index], -1)
        view = self.views.pop()
        terms = self.terms.pop() if self.table is None else None
        if view.agent_id != agent_id:
            self.views[index] = view
            self._position[view.agent_id] = index
            if terms is not None:
                self.terms[index] = terms
            elif self.table is not None:
                self._lay_out(self.table, index, view)
        self._members_changed()

    def _lay_out(self, table: SearchTable, index: int, view: AgentView) -> None:
        """As `AgentView.terms`, in the table."""
        if view.excluded_because or view.num_free_slots <= 0:
            table.close(index)
            return
        batch_size, most = view.num_running + 1, view.max_running_requests
        batch_size = most if batch_size > most else batch_size
        steps, pace = view.steps, view.pace
        table.put(
            index,
            view.queue_seconds,
            steps.base_seconds * pace,
            steps.seconds_per_prompt_token * pace,
            view.mean_context_tokens * (batch_size - 1) / batch_size,
            1 / batch_size,
            pace,
            view.max_context_tokens,
            view.row,
        )

    def snapshot(self) -> Snapshot:
        """What the views are now, without a copy of all of them each time."""
        if len(self._replaced) > _MAX_NUM_REPLACED:
            self._base, self._replaced = tuple(self.views), []
        return new(Snapshot, (self._base, self._replaced, len(self._replaced)))

    def learn(self, shape: Shape) -> None:
        """Lets the usual context follow the requests: bounds are nearest there. It shapes the work of a search alone."""
        if self.table is not None:
            return
        self._usual_context += _USUAL_WEIGHT * (shape.mean_context_tokens - self._usual_context)
        if not _USUAL_DRIFT > self._usual_context / self._ranges_for > 1 / _USUAL_DRIFT:
            self._divide()

    def floors(self, shape: Shape) -> Floors:
        """The bounds for requests like this one, up to date."""
        x = shape.mean_context_tokens
        low, usual, high = self._ranges
        part = usual if low.high < x <= usual.high else low if x <= low.high else high
        if part.dirty:
            for index in part.dirty:
                self._bound(part, index)
            part.dirty.clear()
        return part.floors

    def recent_winners(self, shape: Shape) -> list[int]:
        """Agents that were the best for the last request of about this size, to begin a search with. Any will do."""
        return self._winners.get(_size_class(shape), [])

    def note_winners(self, shape: Shape, indices: list[int]) -> None:
        """The best agents for this request."""
        self._winners[_size_class(shape)] = indices

    def _count(self, view: AgentView, sign: int) -> None:
        if view.num_free_slots > 0 and not view.excluded_because:
            self.num_able += sign
        if view.state == "serving":
            most = view.max_running_requests
            self.num_places += sign * most
            self.num_free += sign * (most - view.num_running)

    def _members_changed(self) -> None:
        contexts = sorted({view.max_context_tokens for view in self.views})
        self.smallest_context, self.largest_context = (contexts[0], contexts[-1]) if contexts else (0, 0)
        self._small = {
            size: frozenset(index for index, view in enumerate(self.views) if view.max_context_tokens <= size)
            for size in contexts
        }
        self._base, self._replaced = tuple(self.views), []
        self._winners.clear()
        self._divide()

    def _divide(self) -> None:
        """Makes the ranges anew: a line is the nearer to a row, the shorter the stretch that it is below it for."""
        if self.table is not None:
            self.table.resize(len(self.views))
            self._ranges = []
            return
        usual = self._ranges_for = self._usual_context
        edges = (0.0, usual / _USUAL_SPREAD, usual * _USUAL_SPREAD, math.inf)
        num, most = len(self.views), max(self.largest_context, 1)
        self._ranges = [_Range(Floors(num, most), low, high, set(range(num))) for low, high in pairwise(edges)]

    def _bound(self, part: _Range, index: int) -> None:
        view = self.views[index]
        if not view.is_able:
            part.floors.close(index)
            return
        queue, base, per_token, others, share, _, _, _, pace = self.terms[index]
        row = view.row
        if part.high < math.inf:
            intercept, slope = row.floor_between(others + share * part.low, others + share * part.high)
        else:
            intercept, slope = row.floor
        part.floors.put(index, queue, base, per_token, pace * (intercept + slope * others), pace * slope * share)


def _size_class(shape: Shape) -> tuple[int, int]:
    return shape.prompt_tokens.bit_length(), shape.output_tokens.bit_length()
