"""Remembers recent placements and tells, when asked, how each agent was weighed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dragoman_controller.agent_view import Score, Shape
from dragoman_controller.candidates import Snapshot
from dragoman_controller.quote import Quote

MAX_NUM_PLACEMENTS = 2048


class PlacementRecord(NamedTuple):
    """One placement with everything it was decided from."""

    request_id: str
    model: str
    shape: Shape
    snapshot: Snapshot
    cached_tokens: Mapping[str, int]
    excluded: Mapping[str, str]
    chosen_agent_id: str
    num_ties: int
    queue_seconds: float
    quote: Quote


@dataclass(frozen=True, slots=True)
class Weighed:
    """One agent as it was weighed; `excluded_because` empty: it could have been chosen."""

    agent_id: str
    score: Score
    excluded_because: str


class Placements:
    """A bounded ring of the latest placements. Every grant adds one, and few are ever asked for."""

    def __init__(self, max_num_placements: int = MAX_NUM_PLACEMENTS) -> None:
        self._records: deque[PlacementRecord] = deque(maxlen=max_num_placements)
        self.add = self._records.append
        """Remembers a placement and forgets the oldest beyond the limit."""

    def find(self, request_id: str) -> PlacementRecord | None:
        """The latest placement of a request, if it is recent."""
        return next((record for record in reversed(self._records) if record.request_id == request_id), None)


def weigh(record: PlacementRecord) -> list[Weighed]:
    """Every candidate of a placement, the best first, the excluded last."""
    weighed = [
        Weighed(
            view.agent_id,
            view.score(record.shape, record.cached_tokens.get(view.agent_id, 0)),
            record.excluded.get(view.agent_id, "") or view.refusal(record.shape),
        )
        for view in record.snapshot.views()
    ]
    return sorted(weighed, key=lambda one: (bool(one.excluded_because), one.score.finish_seconds))


def reason(record: PlacementRecord) -> str:
    """Why the chosen agent was chosen, in plain words."""
    weighed = weigh(record)
    chosen = next(one for one in weighed if one.agent_id == record.chosen_agent_id)
    able = [one for one in weighed if not one.excluded_because]
    others = [one for one in able if one is not chosen]
    score = chosen.score
    parts = (
        f"{score.finish_seconds:.3f} s predicted: {score.queue_seconds:.3f} s wait, {score.prefill_seconds:.3f} s prefill "
        f"({score.cached_tokens} of {record.shape.prompt_tokens} prompt tokens cached), {score.decode_seconds:.3f} s decode"
    )
    if not others:
        return f"{chosen.agent_id} is the only agent that can take it; {parts}"
    if record.num_ties > 1:
        return f"{chosen.agent_id} is one of {record.num_ties} agents within 2 % of the earliest finish; {parts}"
    return (
        f"{chosen.agent_id} finishes first; {parts}; next is {others[0].agent_id} "
        f"with {others[0].score.finish_seconds:.3f} s"
    )
