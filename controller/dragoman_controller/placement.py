"""Picks an agent for a request by predicted seconds: wait at the agent, prefill of uncached tokens, decode. Pure.

Lower bounds of all agents are computed at once (floors.py); only agents that could be the best, a tie or the second by
their bound are computed exactly. The choice is the one that a look at every agent would give.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random
from typing import NamedTuple, TypeAlias

from dragoman_controller.agent_view import Score, Shape
from dragoman_controller.candidates import Candidates
from dragoman_controller.native.library import BARRED, SearchTable
from dragoman_controller.tuples import new

TIE_RATIO = 1.02
# Where the whole takes long, 2 % of it may be many times the wait for the first token, which a reader notices first.
FIRST_TOKEN_RATIO = 1.2

Weighed: TypeAlias = tuple[float, int]
"""Predicted seconds, and the agent's index. Equal seconds come in the order of the agents."""

_NUM_WINNERS = 4
_NONE: frozenset[int] = frozenset()
_NOBODY: frozenset[str] = frozenset()


class Placement(NamedTuple):
    """Where a request goes: indices into the candidates. `num_ties`: agents within 2 % of the best, with it."""

    chosen: int
    score: Score
    fallback: int | None
    num_ties: int


Choose: TypeAlias = Callable[[Candidates, Shape, Mapping[str, int], Random, Iterable[str]], "Placement | None"]
"""What `place` is; a simulator compares it with others."""


def place(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    rng: Random,
    excluded: Iterable[str] = (),
) -> Placement | None:
    """The agent that finishes first, within 2 %; None when no agent may take the request.

    Agents within 2 % of the best count as equal: of two of them drawn by `rng` the faster is taken, so that many
    controllers with one view do not all choose the same; but none whose first token comes much later. The fallback is the best of the others. Agents whose context
    holds the whole output go before all others.
    """
    barred = frozenset(excluded) if excluded else _NOBODY
    if candidates.table is not None and shape.num_choices == 1:
        return _search(candidates, candidates.table, shape, cached_tokens, rng, barred)
    weighed = _near(candidates, shape, cached_tokens, shape.wanted_context_tokens, barred)
    if not weighed and candidates.smallest_context < shape.wanted_context_tokens:
        weighed = _near(candidates, shape, cached_tokens, shape.min_context_tokens, barred)
    if not weighed:
        return None
    weighed.sort()
    candidates.note_winners(shape, [index for _, index in weighed[:_NUM_WINNERS]])
    num_ties = bisect_right(weighed, (weighed[0][0] * TIE_RATIO, len(candidates)))
    chosen = weighed[0][1]
    if num_ties > 1:
        chosen = _choose_of_two(candidates, shape, cached_tokens, weighed[:num_ties], rng)
    fallback = next((index for _, index in weighed[:2] if index != chosen), None)
    view = candidates.views[chosen]
    return Placement(chosen, view.score(shape, cached_tokens.get(view.agent_id, 0)), fallback, num_ties)


def _search(
    candidates: Candidates,
    table: SearchTable,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    rng: Random,
    barred: Collection[str],
) -> Placement | None:
    """The same choice, with the agents looked at by C++."""
    special: list[float] = []
    if cached_tokens or barred:
        position = candidates.position
        for agent_id, num_cached in cached_tokens.items():
            index = position(agent_id)
            if index is not None and agent_id not in barred:
                special += (index, num_cached)
        special += [part for index in map(position, barred) if index is not None for part in (index, BARRED)]
    num_ties = table.search(
        shape.prompt_tokens,
        shape.output_tokens,
        shape.mean_context_tokens,
        shape.wanted_context_tokens,
        shape.min_context_tokens,
        TIE_RATIO,
        FIRST_TOKEN_RATIO,
        special,
    )
    if not num_ties:
        return None
    if num_ties > 1:
        table.draw(rng.random(), rng.random())
    _, chosen, fallback, queue, prefill, step, modelled, cached = table.found()
    score = new(Score, (queue, prefill, (shape.output_tokens - 1) * step, step, int(cached), modelled))
    return new(Placement, (chosen, score, None if fallback < 0 else fallback, num_ties))


def _seconds(weighed: Weighed) -> float:
    return weighed[0]


def _index(weighed: Weighed) -> int:
    return weighed[1]


def _first_token(candidates: Candidates, index: int, shape: Shape, cached_tokens: Mapping[str, int]) -> float:
    view = candidates.views[index]
    return view.queue_seconds + view.prefill_seconds(shape, cached_tokens.get(view.agent_id, 0))


def _choose_of_two(
    candidates: Candidates, shape: Shape, cached_tokens: Mapping[str, int], ties: list[Weighed], rng: Random
) -> int:
    best = ties[0][1]
    ties.sort(key=_index)
    # int(random() * n) is several times cheaper than randrange, and the bias of 2**-53 is of no matter here.
    first = int(rng.random() * len(ties))
    second = int(rng.random() * (len(ties) - 1))
    second += second >= first
    # Of equals the one drawn first, or the last in the order would never be chosen.
    for _, index in sorted((ties[first], ties[second]), key=_seconds):
        if index == best:
            return best
        latest = _first_token(candidates, best, shape, cached_tokens) * FIRST_TOKEN_RATIO
        if _first_token(candidates, index, shape, cached_tokens) <= latest:
            return index
    return best


def _near(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    context_tokens: int,
    barred: Collection[str],
) -> list[Weighed]:
    """The best, its ties, the second and maybe others of the agents with so much context."""
    if shape.num_choices > 1:
        return _all(candidates, shape, cached_tokens, context_tokens, barred)
    u, o, x = shape.prompt_tokens, shape.output_tokens, shape.mean_context_tokens
    floors, views = candidates.floors(shape), candidates.views
    found: list[Weighed] = []
    skipped = candidates.with_less_context(context_tokens) if candidates.smallest_context < context_tokens else _NONE
    if cached_tokens or barred:
        found = _holders(candidates, shape, cached_tokens, context_tokens, barred)
        places = map(candidates.position, (*cached_tokens, *barred))
        skipped = skipped.union(index for index in places if index is not None)
    bounds = floors.of(u, o, x)
    likely = [index for index in candidates.recent_winners(shape) if views[index].is_able and index not in skipped]
    if len(likely) < 2 and (lowest := floors.lowest(bounds)) is not None and lowest not in skipped:
        likely = [lowest]
    found += _weigh(candidates, likely, u, o, x)
    # No agent whose bound is over the exact seconds of any two can be one of the best two, and none over a tie a tie.
    limit = math.inf
    if len(found) > 1:
        found.sort()
        limit = max(found[0][0] * TIE_RATIO, found[1][0])
    done = skipped.union(likely)
    return found + _weigh(candidates, [i for i in floors.within(bounds, limit) if i not in done], u, o, x)


def _weigh(candidates: Candidates, members: Iterable[int], u: int, output_tokens: int, x: float) -> list[Weighed]:
    """AgentView.finish_seconds of each member for a request of one choice, written out: it is most of a decision."""
    all_terms, weighed, o = candidates.terms, [], output_tokens - 1
    for index in members:
        queue, base, per_token, others, share, contexts, times, slopes, pace = all_terms[index]
        context = others + share * x
        segment = bisect_right(contexts, context, 1, len(contexts) - 1) - 1
        step = times[segment] + (context - contexts[segment]) * slopes[segment]
        if step < 0.0:
            step = 0.0
        prefill = u * per_token
        weighed.append((queue + (base if prefill < base else prefill) + o * (pace * step), index))
    return weighed


def _holders(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    context_tokens: int,
    barred: Collection[str],
) -> list[Weighed]:
    """The agents that hold a part of the prompt: the floors know nothing of that."""
    found = []
    for agent_id, num_cached in cached_tokens.items():
        index = candidates.position(agent_id)
        if index is None or agent_id in barred:
            continue
        view = candidates.views[index]
        if view.is_able and view.max_context_tokens >= context_tokens:
            found.append((view.finish_seconds(shape, num_cached), index))
    return found


def _all(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    context_tokens: int,
    barred: Collection[str],
) -> list[Weighed]:
    """Every agent that can take a request of several choices, which the terms do not describe."""
    return [
        (view.finish_seconds(shape, cached_tokens.get(view.agent_id, 0)), index)
        for index, view in enumerate(candidates.views)
        if view.max_context_tokens >= context_tokens and view.agent_id not in barred and not view.refusal(shape)
    ]
