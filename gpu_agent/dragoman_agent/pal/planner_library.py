"""From how many prompt tokens on a step attends by a library instead of by our own kernel. Pure."""

from __future__ import annotations

from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import LIBRARY_CAPABILITY, library_points
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import LibraryPrefill, PrefillForms
from dragoman_agent.pal.planner_attention import Maker

_MAX_NUM_SEQS = 16  # prompts of a step: what the library is set up for costs blocks that find nothing to do
_WORTH = 0.97  # of our own kernel's seconds: the library's first use costs a start up to a second


def choose_library_prefill(
    maker: Maker, page_size: int, max_context_tokens: int, own: PrefillForms, off: str | None
) -> tuple[LibraryPrefill | None, Decision]:
    """The fewest tokens at which the library was timed quicker than `own`, and at which a step takes the device longer than
    the host takes to hand it over with the library's calls in it.
    """
    inputs = profile_inputs(maker.profile, "compute.matmul_bfloat16")
    subject = "library-prefill"
    if off:
        return None, Decision(subject, "none", off, inputs)
    if maker.times.rates.capability < LIBRARY_CAPABILITY:
        reason = (
            f"cuDNN's attention over pages needs compute capability {LIBRARY_CAPABILITY[0]}.{LIBRARY_CAPABILITY[1]}"
        )
        return None, Decision(subject, "none", reason, inputs)
    limits = (max_context_tokens, maker.model.max_context_tokens)  # it was timed for the limit of then
    compared = max((_compared(maker, page_size, limit, own) for limit in limits), key=len)
    if not compared:
        return None, Decision(subject, "none", "cuDNN's attention was not timed on this device", inputs)
    candidates = tuple(
        Candidate(f"{name} at {tokens}", seconds)
        for tokens, (theirs, ours) in compared.items()
        for name, seconds in (("cudnn", theirs), ("own", ours))
    )
    for tokens, (theirs, ours) in compared.items():
        if theirs <= _WORTH * ours and _is_handed_over(maker, page_size, own, tokens):
            reason = (
                f"timed {1 - theirs / ours:.0%} quicker than our kernel at {tokens} tokens, alone and at the end of a long "
                "prompt, where a step takes the device longer than the host needs to hand it over"
            )
            chosen = LibraryPrefill("cudnn", tokens, _MAX_NUM_SEQS)
            return chosen, Decision(subject, f"cudnn from {tokens}", reason, inputs, candidates, theirs, unit="s")
    reason = "our own kernel is as quick where a step takes the device longer than the host needs to hand it over"
    return None, Decision(subject, "none", reason, inputs, candidates)


def _compared(
    maker: Maker, page_size: int, max_context_tokens: int, own: PrefillForms
) -> dict[int, tuple[float, float]]:
    """(the library's seconds, ours) by tokens of one prompt in a step, over its contexts, where all were timed."""
    model, times = maker.model, maker.times
    found: dict[int, list[tuple[float | None, float]]] = {}
    for tokens, context in library_points(max_context_tokens):
        theirs = times.measured(step_cost.library_prefill_call(model, page_size, tokens, context))
        call = step_cost.prefill_attention_call(model, page_size, own.of(tokens, context), tokens, context)
        ours = times.seconds(call)
        found.setdefault(tokens, []).append((theirs, ours))
    return {
        tokens: (sum(theirs or 0.0 for theirs, _ in pairs), sum(ours for _, ours in pairs))
        for tokens, pairs in found.items()
        if all(theirs is not None for theirs, _ in pairs)
    }


def _is_handed_over(maker: Maker, page_size: int, own: PrefillForms, tokens: int) -> bool:
    """Whether a step of `tokens` takes the device longer than the host takes to hand it over with the library's calls."""
    model, times = maker.model, maker.times
    handover = step_cost.handover_seconds(times.rates, model, model.num_layers)
    return step_cost.prefill_step_seconds(times, model, page_size, own, tokens, tokens) >= handover
