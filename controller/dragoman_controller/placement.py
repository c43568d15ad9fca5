"""Picks an agent for a request by predicted seconds: wait at the agent, prefill of uncached tokens, decode. Pure.

The agents lie in blocks (candidates.py) with a lower bound each; only blocks that could hold the best, a tie or the second
are looked at, and in them each agent exactly. The choice is the one that a look at every agent would give.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import NamedTuple, TypeAlias

from dragoman_controller.candidates import Candidates, Score, Shape

TIE_RATIO = 1.02

Weighed: TypeAlias = tuple[float, int]
"""Predicted seconds, and the agent's index. Equal seconds come in the order of the agents."""

_NOBODY: Weighed = (math.inf, -1)


class Placement(NamedTuple):
    """Where a request goes: indices into the candidates. `num_ties`: agents within 2 % of the best, with it."""

    chosen: int
    score: Score
    fallback: int | None
    num_ties: int


def place(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    rng: Random,
    excluded: Iterable[str] = (),
) -> Placement | None:
    """The agent that finishes first, within 2 %; None when no agent may take the request.

    Agents within 2 % of the best count as equal: of two of them drawn by `rng` the faster is taken, so that many
    controllers with one view do not all choose the same. The fallback is the best of the others. Agents whose context
    holds the whole output go before all others.
    """
    barred = frozenset(excluded)
    weighed = _near(candidates, shape, cached_tokens, shape.wanted_context_tokens, barred)
    if not weighed and candidates.smallest_context < shape.wanted_context_tokens:
        weighed = _near(candidates, shape, cached_tokens, shape.min_context_tokens, barred)
    if not weighed:
        return None
    weighed.sort()
    num_ties = bisect_right(weighed, (weighed[0][0] * TIE_RATIO, len(candidates)))
    chosen = weighed[0][1]
    if num_ties > 1:
        chosen = _choose_of_two(sorted(weighed[:num_ties], key=_index), rng)
    fallback = next((index for _, index in weighed[:2] if index != chosen), None)
    view = candidates.views[chosen]
    return Placement(chosen, view.score(shape, cached_tokens.get(view.agent_id, 0)), fallback, num_ties)


def _seconds(weighed: Weighed) -> float:
    return weighed[0]


def _index(weighed: Weighed) -> int:
    return weighed[1]


def _choose_of_two(ties: list[Weighed], rng: Random) -> int:
    # int(random() * n) is several times cheaper than randrange, and the bias of 2**-53 is of no matter here.
    first = int(rng.random() * len(ties))
    second = int(rng.random() * (len(ties) - 1))
    second += second >= first
    # Of equals the one drawn first, or the last in the order would never be chosen.
    return min(ties[first], ties[second], key=_seconds)[1]


def _near(
    candidates: Candidates,
    shape: Shape,
    cached_tokens: Mapping[str, int],
    context_tokens: int,
    barred: Collection[str],
) -> list[Weighed]:
    """The best, its ties, the second and some others of the agents with so much context."""
    candidates.tighten()
    if shape.num_choices > 1:
        return _all(candidates, shape, cached_tokens, context_tokens, barred)
    found = _holders(candidates, shape, cached_tokens, context_tokens, barred)
    skipped = {index for _, index in found}
    is_picky = bool(skipped or barred) or candidates.smallest_context < context_tokens
    u, o, x = shape.prompt_tokens, shape.output_tokens - 1, shape.mean_context_tokens
    floors = [
        (q + (b if u * p < b else u * p) + o * (step + slope * x), block)
        for block, (q, b, p, step, slope) in enumerate(candidates.floors)
    ]
    floors.sort()
    best = second = _NOBODY
    for one in found:
        best, second = _two_best(best, second, one)
    for floor, block in floors:
        # Rounding may leave a floor a hair above an agent; a tie is far wider.
        if floor > best[0] * TIE_RATIO and floor > second[0]:
            break
        members = candidates.blocks[block]
        if is_picky:
            views = candidates.views
            members = [
                index
                for index in members
                if index not in skipped
                and views[index].max_context_tokens >= context_tokens
                and views[index].agent_id not in barred
            ]
        fresh = _weigh(candidates, members, u, o, x)
        for one in fresh:
            if one < second:
                best, second = _two_best(best, second, one)
        found += fresh
    return found


def _two_best(best: Weighed, second: Weighed, one: Weighed) -> tuple[Weighed, Weighed]:
    if one < best:
        return one, best
    return best, min(one, second)


def _weigh(candidates: Candidates, members: Iterable[int], u: int, o: int, x: float) -> list[Weighed]:
    """AgentView.finish_seconds of each member for a request of one choice, written out: it is most of a decision."""
    all_terms, weighed = candidates.terms, []
    for index in members:
        queue, base, per_token, others, share, contexts, times, slopes = all_terms[index]
        context = others + share * x
        segment = bisect_right(contexts, context, 1, len(contexts) - 1) - 1
        step = times[segment] + (context - contexts[segment]) * slopes[segment]
        if step < 0.0:
            step = 0.0
        prefill = u * per_token
        weighed.append((queue + (base if prefill < base else prefill) + o * step, index))
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
