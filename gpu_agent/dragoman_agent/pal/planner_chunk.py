"""Tokens of a step on a GPU: of prompts alone, and of prompts beside sequences that decode. Each with its decision. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dragoman_agent.pal import pal_off, step_cost
from dragoman_agent.pal.candidates import PROMPT_TOKENS
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import Limits, profile_inputs
from dragoman_agent.pal.plan import LibraryPrefill, PrefillForms, full_tokens
from dragoman_agent.pal.planner_batch import LATENCY_TARGET_SECONDS, SHORT_CONTEXT, STALL_STEPS, StepShape
from dragoman_agent.pal.planner_memory import spare_bytes, token_bytes
from dragoman_agent.pal.profile import Profile

PATIENCE = 3.0  # times the target, for who comes while prompts alone are computed: nobody's stream waits
_CHUNKS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
# Of the best prefill rate. A longer chunk leaves fewer short ones behind it, which are slower, but delays others.
_NEAR_BEST, _NEAR_BEST_BESIDE = 0.995, 0.99
_CHUNK_SHARE = 8  # of the memory that weights leave, at most one part for a chunk's activations


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a step: of prompts alone, and of prompts beside sequences that decode."""

    alone: int
    company: int

    @property
    def full(self) -> tuple[int, ...]:
        """See Plan.full_tokens."""
        return full_tokens(self.alone, self.company)


def choose_chunk(
    shape: StepShape,
    prefill: PrefillForms,
    max_num_seqs: int,
    limits: Limits,
    profile: Profile,
    off: str | None,
    library: LibraryPrefill | None = None,
) -> tuple[Chunk, list[Decision]]:
    """Tokens of a step: the fewest that reach nearly the best prefill rate (compute-limited), and room for a prompt beside a full
    batch; beside streams no more than the latency target leaves (S2 of the product: min of both).
    """
    floor = 2 * max_num_seqs
    if off:
        chosen = max(pal_off.MAX_BATCH_TOKENS, floor)
        both = [Decision(subject, f"{chosen}", off, unit="tokens") for subject in ("step-tokens", "company-tokens")]
        return Chunk(chosen, chosen), both
    model, times = shape.model, shape.times
    step = partial(_step_seconds, shape, times, prefill, library)
    seconds = {tokens: step(tokens) for tokens in _CHUNKS}
    rates = _steady_rates(shape, prefill)
    best_rate = max(rates.values())
    handover = step_cost.handover_seconds(times.rates, model, model.num_layers if library else 0)
    by_host = next((tokens for tokens, each in seconds.items() if each >= handover), _CHUNKS[-1])
    by_library = library.min_tokens if library else 0  # else it would never be used
    spare = spare_bytes(profile, model, limits, times.rates) / _CHUNK_SHARE
    by_memory = max((tokens for tokens in _CHUNKS if tokens * token_bytes(model) <= spare), default=_CHUNKS[0])
    target = limits.latency_target_seconds or LATENCY_TARGET_SECONDS
    target = max(target, STALL_STEPS * shape.seconds(1, SHORT_CONTEXT))
    patience = PATIENCE * target

    def wanted(near: float) -> int:
        return max(next(t for t, rate in rates.items() if rate >= near * best_rate), by_host, by_library)

    def within(most: float) -> int:
        return max((tokens for tokens, each in seconds.items() if each <= most), default=_CHUNKS[0])

    chosen = max(min(wanted(_NEAR_BEST), within(patience), by_memory), floor)
    company = max(min(chosen, wanted(_NEAR_BEST_BESIDE), within(target)), floor)
    free_tokens = times.rates.matmul_rate / times.rates.read_bandwidth  # of two bytes and two operations a weight
    reason = (
        f"min of {wanted(_NEAR_BEST):,} (fewest tokens within {1 - _NEAR_BEST:.1%} of the best prefill rate by the profile, that take the "
        f"device longer than the {1e3 * handover:.1f} ms in which the host hands a step over"
        f"{f' and reach the {by_library:,} of the library' if library else ''}), {within(patience):,} "
        f"(most tokens within {1e3 * patience:.0f} ms a step, of which who comes waits for two at most) and {by_memory:,} (whose activations take an eighth of the "
        f"memory that weights leave), at least {floor:,} for a prompt beside a full batch; "
        f"up to {free_tokens:,.0f} tokens hide behind reading the weights"
    )
    beside = (
        f"min of {chosen:,} (of a step of prompts alone), {wanted(_NEAR_BEST_BESIDE):,} (as there, but within "
        f"{1 - _NEAR_BEST_BESIDE:.1%} of the best prefill rate) and {within(target):,} (most tokens within {1e3 * target:.0f} ms a step, which a stream may "
        f"wait between two tokens), at least {floor:,}"
    )
    why_not = {tokens: _why_not(rates[tokens] / best_rate, each, patience) for tokens, each in seconds.items()}
    candidates = tuple(Candidate(f"{t}", each, "" if t == chosen else why_not[t]) for t, each in seconds.items())
    inputs = profile_inputs(profile, "compute.matmul_bfloat16", "memory.read_bandwidth", "scheduling.phase")
    return Chunk(chosen, company), [
        Decision("step-tokens", f"{chosen}", reason, inputs, candidates, step(chosen), unit="s"),
        Decision("company-tokens", f"{company}", beside, inputs, predicted=step(company), unit="s"),
    ]


def _step_seconds(
    shape: StepShape, times: KernelTimes, prefill: PrefillForms, library: LibraryPrefill | None, tokens: int
) -> float:
    return step_cost.prefill_step_seconds(
        times, shape.model, shape.page_size, prefill, tokens, PROMPT_TOKENS, library, shape.fixed
    )


def _steady_rates(shape: StepShape, prefill: PrefillForms) -> dict[int, float]:
    """Prompt tokens a second by chunk, from the profile's rates alone: what kernels take when they are timed one by one says as
    much of the card's power limit, which the long ones run into, as of their length. By the launch of the longest alone, since what
    another is predicted to take is not to be told from what a chunk's length does.
    """
    times = KernelTimes(shape.times.rates)
    one = PrefillForms(prefill.of(PROMPT_TOKENS, PROMPT_TOKENS, _CHUNKS[-1] / PROMPT_TOKENS))
    return {tokens: tokens / _step_seconds(shape, times, one, None, tokens) for tokens in _CHUNKS}


def _why_not(share: float, step: float, target: float) -> str:
    return f"over {1e3 * target:.0f} ms a step" if step > target else f"{share:.0%} of the best rate"
