"""What a user of a plan will see: time to the first token, time a token, tokens a second. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.pal.limits import PlanError
from dragoman_agent.pal.plan import Plan


@dataclass(frozen=True, slots=True)
class Prediction:
    """For requests of `context` prompt tokens, `concurrency` of them at once."""

    num_running: int  # of them that run at once; the others wait
    ttft_seconds: float  # of the first token where all arrive together: the mean over those that run
    tpot_seconds: float  # a token of one stream, while all run
    tokens_per_second: float  # all streams together


def predict(plan: Plan, context: int, concurrency: int) -> Prediction:
    """Predict from the plan's step model. Raises PlanError where `context` does not fit in a sequence."""
    if not 0 < context <= plan.max_context_tokens:
        raise PlanError(
            f"a context of {context} tokens is outside what the plan allows, 1 to {plan.max_context_tokens}; "
            "ask for less, or plan with a larger --max-context"
        )
    if concurrency < 1:
        raise PlanError(f"a concurrency of {concurrency} is none; ask for 1 or more")
    blocks_each = -(-context // plan.page_size)
    running = max(min(concurrency, plan.max_num_seqs, (plan.num_blocks - 1) // blocks_each), 1)
    model = plan.step_model
    tpot = model.decode_step_seconds(running, context)
    # First come, first served: the i-th of n prompts is done after i of them; the mean is (n + 1) / 2.
    ttft = model.prefill_seconds(context * (running + 1) / 2)
    return Prediction(running, ttft, tpot, running / tpot)
