"""How a GPU's prefill attention runs: which of its launches, by pointers or by tensor descriptors, with the decision. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dragoman_agent.pal import pal_off
from dragoman_agent.pal.candidates import PrefillPoint, prefill_points, prefill_shortlist
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import PlanError, profile_inputs
from dragoman_agent.pal.plan import PrefillAttention, PrefillForms
from dragoman_agent.pal.planner_attention import INPUTS, Maker, launch_of, no_launch, prefill_word
from dragoman_agent.pal.planner_long import Judged, choose_forms, one_launch
from dragoman_kernels.triton.launches import PREFILL_LAUNCHES, TMA_PREFILL_LAUNCHES, WS_PREFILL_LAUNCHES, PrefillLaunch

_MEASURED, _PREDICTED = "measured on the device", "predicted from tile, occupancy and matrix rate"
_TELLS_APART = 0.05  # what is predicted within it goes by the order of the table
# By head size: the quickest on an H200 of fifteen forms over prompts of 512 to 8,192 tokens, or next to it, for cards of its compute
# capability that were not timed themselves (benchmarks/NOTES.md, "Prompts").
_KNOWN_CAPABILITY = 9
_KNOWN = {128: PrefillLaunch(128, 64, 12, 4, tma=True), 64: PrefillLaunch(64, 64, 4, 5, tma=True)}


def choose_prefill(
    maker: Maker, page_size: int, max_context_tokens: int, off: str | None, together: str | None
) -> tuple[PrefillForms, list[Decision]]:
    """The quickest launch for usual prompts, one and many, and, where that was timed, a part of a long one, or one for each of
    both unless `together` says why not: of those by tensor descriptors only what was timed, here or on a card with the same
    instructions.
    """
    if off:
        fixed = pal_off.PREFILL_ATTENTION
        usual = prefill_points(max_context_tokens)[0]
        if maker.times.seconds(usual.call(maker.model, page_size, fixed)) == float("inf"):
            raise PlanError(no_launch(maker, "prefill"))
        return PrefillForms(fixed), [Decision("prefill-attention", prefill_word(fixed), off), one_launch(off)]
    options = prefill_shortlist(maker.times, maker.model, page_size)
    if not options:
        raise PlanError(no_launch(maker, "prefill"))
    limit = _timed_limit(maker, page_size, options, max_context_tokens)
    points = prefill_points(limit)
    judged = _timed_prefill(maker, page_size, options, points)
    if not judged:
        untimed = one_launch("no launch was timed on this device")
        known = _known(maker, options)
        if known is not None:
            return PrefillForms(known), [_untimed(maker, page_size, known, options, points[0]), untimed]
        plain = [option for option in options if not option.tma]
        judged = {
            option: {points[0]: maker.times.seconds(points[0].call(maker.model, page_size, option))} for option in plain
        }
        alone = _quickest(judged, 1 + _TELLS_APART)
        return PrefillForms(alone), [_decision(maker, alone, judged, how=_PREDICTED), untimed]
    alone = _quickest(judged, 1.0)
    if limit != max_context_tokens and not together:
        together = f"launches were not timed for contexts up to {max_context_tokens:,} tokens, which --tune now does"
    if together:
        return PrefillForms(alone), [_decision(maker, alone, judged), one_launch(together)]
    forms, points, told = choose_forms(maker, page_size, max_context_tokens, alone, judged)
    judged = {option: {point: each[point] for point in points} for option, each in judged.items()}
    return forms, [_decision(maker, forms.usual, judged), told]


def _costs(judged: Judged) -> dict[PrefillAttention, float]:
    """Seconds in units of the shortest at each point, so that a long prompt does not decide alone."""
    shortest = {point: min(each[point] for each in judged.values()) for point in next(iter(judged.values()))}
    return {option: sum(each[point] / shortest[point] for point in shortest) for option, each in judged.items()}


def _quickest(judged: Judged, near: float) -> PrefillAttention:
    """Of those that are within `near` of the best the first of the table."""
    costs = _costs(judged)
    best = min(costs.values())
    return min(
        (option for option, cost in costs.items() if cost <= near * best),
        key=lambda one: (*PREFILL_LAUNCHES, *TMA_PREFILL_LAUNCHES, *WS_PREFILL_LAUNCHES).index(launch_of(one)),
    )


def _decision(maker: Maker, chosen: PrefillAttention, judged: Judged, how: str = _MEASURED) -> Decision:
    """Of `chosen` among all that were judged."""
    costs = _costs(judged)
    best = min(costs.values())
    points = list(judged[chosen])
    candidates = tuple(
        Candidate(prefill_word(option), each[points[0]], "" if option == chosen else f"{costs[option] / best - 1:+.1%}")
        for option, each in judged.items()
    )
    inputs = profile_inputs(maker.profile, "compute.matmul_bfloat16", *INPUTS)
    reason = f"the shortest for {', for '.join(map(str, points))}, {how}"
    shortest = min(each[points[0]] for each in judged.values())
    return Decision("prefill-attention", prefill_word(chosen), reason, inputs, candidates, shortest, unit="s")


def _known(maker: Maker, options: Sequence[PrefillAttention]) -> PrefillAttention | None:
    """Of `options` the one that was the quickest on a card with this one's instructions."""
    launch = _KNOWN.get(maker.model.head_dim) if maker.times.rates.capability[0] == _KNOWN_CAPABILITY else None
    return next((option for option in options if launch_of(option) == launch), None)


def _untimed(
    maker: Maker,
    page_size: int,
    chosen: PrefillAttention,
    options: Sequence[PrefillAttention],
    point: PrefillPoint,
) -> Decision:
    """The choice of `chosen`, beside which nothing can be told of those by tensor descriptors."""
    predicted = {option: maker.times.seconds(point.call(maker.model, page_size, option)) for option in options}
    candidates = tuple(
        Candidate(prefill_word(option), each, "" if option == chosen else "slower on an H200")
        for option, each in predicted.items()
        if option == chosen or not option.tma
    )
    reason = (
        f"the quickest on an H200 for heads of {maker.model.head_dim}, whose instructions this card has; nothing was timed here, "
        "which --tune now does"
    )
    inputs = profile_inputs(maker.profile, "compute.matmul_bfloat16", *INPUTS)
    word = prefill_word(chosen)
    return Decision("prefill-attention", word, reason, inputs, candidates, predicted[chosen], unit="s")


def _timed_limit(maker: Maker, page_size: int, options: Sequence[PrefillAttention], max_context_tokens: int) -> int:
    """`max_context_tokens` of the plan, or the model's where more was timed for those: kernels are timed for the limit of then."""

    def num_timed(limit: int) -> int:
        return len(next(iter(_timed_prefill(maker, page_size, options, prefill_points(limit)).values()), ()))

    return max(max_context_tokens, maker.model.max_context_tokens, key=num_timed)


def _timed_prefill(
    maker: Maker, page_size: int, options: Sequence[PrefillAttention], points: Sequence[PrefillPoint]
) -> Judged:
    """Seconds of those options that were timed at all `points`, else at the first two, else at the first: another version timed
    fewer.
    """
    for number in range(len(points), 0, -1):
        measured = {
            option: [maker.times.measured(point.call(maker.model, page_size, option)) for point in points[:number]]
            for option in options
        }
        found = {
            option: {point: each for point, each in zip(points, row, strict=False) if each is not None}
            for option, row in measured.items()
            if None not in row
        }
        if found:
            return found
    return {}
