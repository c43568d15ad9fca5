"""How a GPU's prefill attention runs: which of its launches, by pointers or by tensor descriptors, with the decision. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dragoman_agent.pal import pal_off, step_cost
from dragoman_agent.pal.candidates import prefill_points, prefill_shortlist
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_calls import KernelCall
from dragoman_agent.pal.limits import PlanError, profile_inputs
from dragoman_agent.pal.plan import PrefillAttention
from dragoman_agent.pal.planner_attention import INPUTS, Maker, launch_of, no_launch
from dragoman_kernels.triton.launches import PREFILL_LAUNCHES, TMA_PREFILL_LAUNCHES, WS_PREFILL_LAUNCHES, PrefillLaunch

_TELLS_APART = 0.05  # what is predicted within it goes by the order of the table
# By head size: the quickest on an H200 of fifteen forms over prompts of 512 to 8,192 tokens, or next to it, for cards of its compute
# capability that were not timed themselves (benchmarks/NOTES.md, "Prompts").
_KNOWN_CAPABILITY = 9
_KNOWN = {128: PrefillLaunch(128, 64, 12, 4, tma=True), 64: PrefillLaunch(64, 64, 4, 5, tma=True)}


def choose_prefill(maker: Maker, page_size: int, off: str | None) -> tuple[PrefillAttention, Decision]:
    """The quickest launch for a prompt of usual length and, where that was timed, a part of a long one: of those by tensor
    descriptors only what was timed, here or on a card with the same instructions.
    """
    if off:
        fixed = pal_off.PREFILL_ATTENTION
        call = _prefill_call(maker, page_size, fixed, prefill_points(maker.model.max_context_tokens)[0])
        if maker.times.seconds(call) == float("inf"):
            raise PlanError(no_launch(maker, "prefill"))
        return fixed, Decision("prefill-attention", _prefill_word(fixed), off)
    options = prefill_shortlist(maker.times, maker.model, page_size)
    if not options:
        raise PlanError(no_launch(maker, "prefill"))
    points = prefill_points(maker.model.max_context_tokens)
    judged = _timed_prefill(maker, page_size, options, points) or _timed_prefill(maker, page_size, options, points[:1])
    timed = bool(judged)
    if not timed and (known := _known(maker, options)) is not None:
        return _untimed(maker, page_size, known, options, points[0])
    if not timed:
        judged = {
            option: [maker.times.seconds(_prefill_call(maker, page_size, option, points[0]))]
            for option in options
            if not option.tma
        }
    shortest = [min(column) for column in zip(*judged.values(), strict=True)]
    # In units of the shortest at each point, so that a long prompt does not decide alone.
    costs = {option: sum(s / t for s, t in zip(each, shortest, strict=True)) for option, each in judged.items()}
    best = min(costs.values())
    near = 1.0 if timed else 1 + _TELLS_APART
    chosen = min(
        (option for option, cost in costs.items() if cost <= near * best),
        key=lambda one: (*PREFILL_LAUNCHES, *TMA_PREFILL_LAUNCHES, *WS_PREFILL_LAUNCHES).index(launch_of(one)),
    )
    candidates = tuple(
        Candidate(_prefill_word(option), each[0], "" if option == chosen else f"{costs[option] / best - 1:+.1%}")
        for option, each in judged.items()
    )
    how = "measured on the device" if timed else "predicted from tile, occupancy and matrix rate"
    inputs = profile_inputs(maker.profile, "compute.matmul_bfloat16", *INPUTS)
    long = "".join(f" and the last {tokens} of {context}" for tokens, context in points[1 : len(shortest)])
    reason = f"the shortest for a prompt of {points[0][0]} tokens{long}, {how}"
    return chosen, Decision(
        "prefill-attention", _prefill_word(chosen), reason, inputs, candidates, shortest[0], unit="s"
    )


def _known(maker: Maker, options: Sequence[PrefillAttention]) -> PrefillAttention | None:
    """Of `options` the one that was the quickest on a card with this one's instructions."""
    launch = _KNOWN.get(maker.model.head_dim) if maker.times.rates.capability[0] == _KNOWN_CAPABILITY else None
    return next((option for option in options if launch_of(option) == launch), None)


def _untimed(
    maker: Maker,
    page_size: int,
    chosen: PrefillAttention,
    options: Sequence[PrefillAttention],
    point: tuple[int, int],
) -> tuple[PrefillAttention, Decision]:
    """The choice of `chosen`, beside which nothing can be told of those by tensor descriptors."""
    predicted = {option: maker.times.seconds(_prefill_call(maker, page_size, option, point)) for option in options}
    candidates = tuple(
        Candidate(_prefill_word(option), each, "" if option == chosen else "slower on an H200")
        for option, each in predicted.items()
        if option == chosen or not option.tma
    )
    reason = (
        f"the quickest on an H200 for heads of {maker.model.head_dim}, whose instructions this card has; nothing was timed here, "
        "which --tune now does"
    )
    inputs = profile_inputs(maker.profile, "compute.matmul_bfloat16", *INPUTS)
    word = _prefill_word(chosen)
    return chosen, Decision("prefill-attention", word, reason, inputs, candidates, predicted[chosen], unit="s")


def _prefill_call(maker: Maker, page_size: int, option: PrefillAttention, point: tuple[int, int]) -> KernelCall:
    return step_cost.prefill_attention_call(maker.model, page_size, option, *point)


def _timed_prefill(
    maker: Maker, page_size: int, options: Sequence[PrefillAttention], points: Sequence[tuple[int, int]]
) -> dict[PrefillAttention, list[float]]:
    """Seconds at `points` of those options that were timed at all of them."""
    measured = {
        option: [maker.times.measured(_prefill_call(maker, page_size, option, point)) for point in points]
        for option in options
    }
    return {
        option: [seconds for seconds in each if seconds is not None]
        for option, each in measured.items()
        if None not in each
    }


def _prefill_word(option: PrefillAttention) -> str:
    tma = "-tma" if option.tma else ""
    return f"m{option.block_m}-n{option.block_n}-w{option.num_warps}-g{option.num_stages}{tma}"
