"""Whether steps with long contexts run another launch of prefill attention than the others, and from where on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dragoman_agent.pal.candidates import (
    MANY_PROMPTS,
    PREFILL_LONG_TOKENS,
    PROMPT_TOKENS,
    PrefillPoint,
    boundary_points,
    fewer_long_points,
    prefill_points,
)
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import LongPrefill, PrefillAttention, PrefillForms
from dragoman_agent.pal.planner_attention import INPUTS, Maker, prefill_word

_SUBJECT = "long-prefill"
_WORTH = 0.03  # that a second launch gains over one alone at its points: it costs graphs, and two timings differ by a hundredth or two

Judged = Mapping[PrefillAttention, Mapping[PrefillPoint, float]]  # measured seconds
Pair = tuple[PrefillAttention, PrefillAttention]  # the usual one, the other one


def one_launch(reason: str) -> Decision:
    """The decision where one serves all lengths."""
    return Decision(_SUBJECT, "none", reason)


def choose_forms(
    maker: Maker, page_size: int, max_context_tokens: int, alone: PrefillAttention, judged: Judged
) -> tuple[PrefillForms, list[PrefillPoint], Decision]:
    """(the launches, the points that the usual one is for, why): `alone` for all unless two gain over it what can be told.

    What divides them is either what a token sees, so that many usual prompts go with one of them, or how many tokens a step has,
    so that they go with a part of a long prompt.
    """
    points = list(next(iter(judged.values())))
    one, many = (
        [each for each in points if each.is_whole and (each.num_prompts > 1) == some] for some in (False, True)
    )
    long = [each for each in points if not each.is_whole]
    if not (many and long):
        reason = "many prompts and a part of a long one were not timed beside a usual one"
        if all(each.is_whole for each in prefill_points(max_context_tokens)):
            reason = f"prompts of up to {max_context_tokens:,} tokens are computed whole: none looks far back"
        return PrefillForms(alone), points, one_launch(reason)
    by_context, by_tokens = ([*one, *many], long), (one, [*many, *long])
    parts = min((by_context, by_tokens), key=lambda parts: sum(_cost(judged, part) for part in parts))
    pair = _best(judged, parts[0]), _best(judged, parts[1])
    gains = [_gain(judged, alone, own, part) for own, part in zip(pair, parts, strict=True)]
    if max(gains) <= _WORTH:
        return PrefillForms(alone), points, one_launch(
            f"another for {' and '.join(map(str, parts[0]))} or for {' and '.join(map(str, parts[1]))} would gain "
            f"{max(*gains, 0.0):.1%} over {prefill_word(alone)} alone, which is not worth graphs of its own"
        )  # fmt: skip
    chosen = (
        _split_by_context(maker, page_size, max_context_tokens, pair)
        if parts is by_context
        else _split_by_tokens(maker, page_size, max_context_tokens, pair)
    )
    return PrefillForms(pair[0], chosen), list(parts[0]), _decision(maker, alone, judged, pair, parts, chosen)


def _split_by_context(maker: Maker, page_size: int, max_context_tokens: int, pair: Pair) -> LongPrefill:
    points = boundary_points(max_context_tokens)
    fewest = _fewest_tokens(maker, page_size, max_context_tokens, pair)
    return LongPrefill(pair[1], fewest, _boundary(maker, page_size, points, pair))


def _split_by_tokens(maker: Maker, page_size: int, max_context_tokens: int, pair: Pair) -> LongPrefill:
    """Steps of few tokens that see much go with the large ones: their tiles are alike, so that few of them are enough."""
    points = boundary_points(max_context_tokens)
    whole = [point.tokens for point in points if point.is_whole and point.num_prompts == 1 and _is_quicker(maker, page_size, point, pair)]  # fmt: skip
    fewest = _fewest_tokens(maker, page_size, max_context_tokens, pair)
    few = [point for point in prefill_points(max_context_tokens) if point.num_prompts == 1]
    few += [point for point in fewer_long_points(max_context_tokens) if point.tokens >= fewest]
    boundary = _boundary(maker, page_size, few, pair)
    return LongPrefill(pair[1], fewest, boundary, min(whole, default=MANY_PROMPTS * PROMPT_TOKENS))


def _decision(
    maker: Maker, alone: PrefillAttention, judged: Judged, pair: Pair, parts: Sequence[Sequence[PrefillPoint]], chosen: LongPrefill
) -> Decision:  # fmt: skip
    usual, other = pair
    gains = [max(_gain(judged, alone, own, part), 0.0) for own, part in zip(pair, parts, strict=True)]
    first, second = (" and ".join(map(str, part)) for part in parts)
    reason = (
        f"{prefill_word(usual)} is the quickest for {first}, this one for {second}; one for all would be {prefill_word(alone)}, which takes "
        f"{gains[0]:.1%} and {gains[1]:.1%} longer. A launch takes so much a tile of queries and so much a key that they see, so what a token sees "
        "in the mean tells which is quicker, and how many tiles there are"
    )
    at = parts[1][-1]
    best = judged[other][at]
    candidates = tuple(
        Candidate(prefill_word(option), each[at], "" if option == other else f"{each[at] / best - 1:+.1%}")
        for option, each in judged.items()
    )
    inputs = profile_inputs(maker.profile, "compute.matmul_bfloat16", *INPUTS)
    words = (
        f"{prefill_word(other)} from {chosen.min_tokens:,} tokens that see {chosen.min_context_tokens:,} in the mean"
    )
    words += f", or {chosen.many_tokens:,} tokens" if chosen.many_tokens else ""
    return Decision(_SUBJECT, words, reason, inputs, candidates, best, unit="s")


def _cost(judged: Judged, points: Sequence[PrefillPoint]) -> float:
    """Of the best for `points`, each in units of the shortest there."""
    own = judged[_best(judged, points)]
    return sum(own[point] / min(each[point] for each in judged.values()) for point in points)


def _best(judged: Judged, points: Sequence[PrefillPoint]) -> PrefillAttention:
    """The quickest over `points`, each in units of the shortest there."""
    least = {point: min(each[point] for each in judged.values()) for point in points}
    return min(judged, key=lambda option: sum(judged[option][point] / least[point] for point in points))


def _gain(judged: Judged, alone: PrefillAttention, own: PrefillAttention, points: Sequence[PrefillPoint]) -> float:
    """Of `own` over `alone`, on average over `points`."""
    return sum(judged[alone][point] / judged[own][point] for point in points) / len(points) - 1


def _is_quicker(maker: Maker, page_size: int, point: PrefillPoint, pair: Pair) -> bool:
    """Whether both were timed at `point` and the second took less."""
    usual, other = (maker.times.measured(point.call(maker.model, page_size, option)) for option in pair)
    return usual is not None and other is not None and other < usual


def _fewest_tokens(maker: Maker, page_size: int, max_context_tokens: int, pair: Pair) -> int:
    """Of a part of a long prompt from which on the second was timed quicker."""
    fewest = min(PREFILL_LONG_TOKENS, max_context_tokens)
    for point in fewer_long_points(max_context_tokens)[::-1]:
        if not _is_quicker(maker, page_size, point, pair):
            break
        fewest = point.tokens
    return fewest


def _boundary(maker: Maker, page_size: int, points: Sequence[PrefillPoint], pair: Pair) -> int:
    """Tokens that a prompt token sees in the mean, from which on the second of `pair` is the quicker one.

    Where both were timed: between the two neighbours that divide the times best, at the place where a straight line through
    what a token takes longer by the first than by the second is 0.
    """
    groups: dict[float, list[tuple[int, float, float]]] = {}  # tokens and seconds of both, by what a token sees
    for point in dict.fromkeys(points):
        first, second = (maker.times.measured(point.call(maker.model, page_size, option)) for option in pair)
        if first is not None and second is not None:
            groups.setdefault(point.num_seen / point.num_tokens, []).append((point.num_tokens, first, second))
    means = sorted(groups)
    lost = [
        (
            sum(max(first / second - 1, 0.0) for _, first, second in groups[mean]),  # where the first is taken
            sum(max(second / first - 1, 0.0) for _, first, second in groups[mean]),
        )
        for mean in means
    ]
    nth = min(
        range(1, len(means)), key=lambda place: sum(by for by, _ in lost[:place]) + sum(by for _, by in lost[place:])
    )
    (low, high), (left, right) = (
        means[nth - 1 : nth + 1],
        [
            sum(first - second for _, first, second in groups[mean]) / sum(tokens for tokens, _, _ in groups[mean])
            for mean in means[nth - 1 : nth + 1]
        ],
    )
    if left >= 0 or right <= 0:  # no crossing between them: times of neighbours that contradict each other
        return math.ceil((low + high) / 2)
    return math.ceil(low + (high - low) * -left / (right - left))
