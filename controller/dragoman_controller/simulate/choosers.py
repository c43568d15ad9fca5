"""Other ways to pick an agent, to compare `placement.place` with. Pure but for the random numbers they are given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random

from dragoman_controller.agent_view import AgentView, Shape
from dragoman_controller.candidates import Candidates
from dragoman_controller.placement import Choose, Placement, place
from dragoman_controller.simulate.agent import SimulatedAgent

OURS = "dragoman"


def _able(candidates: Candidates, shape: Shape, excluded: Iterable[str]) -> list[int]:
    """The agents that can take the request; those whose context holds all of it, where there are any."""
    barred: Collection[str] = frozenset(excluded)
    able = [
        index for index, view in enumerate(candidates.views) if view.agent_id not in barred and not view.refusal(shape)
    ]
    views = candidates.views
    return [i for i in able if views[i].max_context_tokens >= shape.wanted_context_tokens] or able


def _placement(
    candidates: Candidates, shape: Shape, cached_tokens: Mapping[str, int], chosen: int, fallback: int | None
) -> Placement:
    view = candidates.views[chosen]
    return Placement(chosen, view.score(shape, cached_tokens.get(view.agent_id, 0)), fallback, 1)


def choose_random(
    candidates: Candidates, shape: Shape, cached_tokens: Mapping[str, int], rng: Random, excluded: Iterable[str] = ()
) -> Placement | None:
    """Any agent with room."""
    able = _able(candidates, shape, excluded)
    if not able:
        return None
    chosen, *rest = rng.sample(able, min(len(able), 2))
    return _placement(candidates, shape, cached_tokens, chosen, rest[0] if rest else None)


def choose_least_loaded(
    candidates: Candidates, shape: Shape, cached_tokens: Mapping[str, int], rng: Random, excluded: Iterable[str] = ()
) -> Placement | None:
    """The agent with the fewest requests, as balancers do that take all agents for equal; ties at random."""
    able = _able(candidates, shape, excluded)
    if not able:
        return None
    ranked = sorted((_num_requests(candidates.views[index]), rng.random(), index) for index in able)
    fallback = ranked[1][2] if len(ranked) > 1 else None
    return _placement(candidates, shape, cached_tokens, ranked[0][2], fallback)


def _num_requests(view: AgentView) -> int:
    return view.num_slots - view.num_free_slots


def oracle(agents: Mapping[str, SimulatedAgent], clock: Callable[[], float]) -> Choose:
    """Picks by the agents' true state at this instant and the true number of tokens; nobody knows what comes after."""

    def choose(
        candidates: Candidates,
        shape: Shape,
        cached_tokens: Mapping[str, int],
        rng: Random,
        excluded: Iterable[str] = (),
    ) -> Placement | None:
        now = clock()
        ranked = sorted(
            (forecast(agents[view.agent_id], shape, cached_tokens, now), index)
            for index in _able(candidates, shape, excluded)
            if (view := candidates.views[index]).agent_id in agents
        )
        if not ranked:
            return None
        fallback = ranked[1][1] if len(ranked) > 1 else None
        return _placement(candidates, shape, cached_tokens, ranked[0][1], fallback)

    return choose


def forecast(agent: SimulatedAgent, shape: Shape, cached_tokens: Mapping[str, int], now: float) -> float:
    """Seconds of a request at an agent by its true state."""
    cached = cached_tokens.get(agent.agent_id, 0)
    return agent.forecast(shape.prompt_tokens, shape.output_tokens, cached, now)


CHOOSERS: Mapping[str, Choose | None] = {
    OURS: place,
    "random": choose_random,
    "least-loaded": choose_least_loaded,
    "oracle": None,
}
"""By name; the oracle is made for each cell."""
