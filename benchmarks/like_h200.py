"""An agent on the null device whose steps take what they take on an H200, many times slower: a stand-in for `benchmarks.quote`.

What makes quotes hard on a GPU, and what the null device's own step model lacks: a step with prompt tokens is handed over
kernel by kernel and takes 8 ms or more however few they are, several times a decode step; and single steps are off by tens of
per cent. Where steps of few prompt tokens are graphs, that holds of longer ones alone, and the measured model does not know of it.
Started in place of `dragoman_agent.main`; the same file is its engine process.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace

from dragoman.step_model import StepModel
from dragoman_agent import startup
from dragoman_agent.device import null, null_model
from dragoman_agent.device.base import StepBatch
from dragoman_agent.pal.plan import Plan

MODULE = "benchmarks.like_h200"
# Decode steps of Qwen3-0.6B as recorded in results/h200.json (step_model); prompts at 450,000 tokens/s, handed over in 8 ms.
STEPS = StepModel(
    batch_sizes=(1, 8, 64, 256),
    context_tokens=(256, 1024, 4096),
    decode_seconds_grid=(
        0.001031, 0.001058, 0.001172,
        0.001162, 0.001320, 0.001960,
        0.001700, 0.002950, 0.007820,
        0.003273, 0.008189, 0.027511,
    ),
    prefill_tokens_per_second=450_000.0,
    prefill_base_seconds=0.008,
)  # fmt: skip
MAX_BATCH_TOKENS = 4096
NOISE = "STAND_IN_NOISE"
"""Environment variable: standard deviation of the logarithm of a step's time over what the step model says."""
GRAPHS = "STAND_IN_GRAPHS"
"""Environment variable: prompt tokens up to which a step is a graph; 0 for none."""
NUM_GRAPH_TOKENS = {"h200": 0, "h200-graphs": 512, "h200-graphs-2048": 2048}
"""By name of the stand-in. What such a graph takes, and up to how many tokens it is quicker, is predicted, not measured."""
# A graph with prompts takes this over the decode step or over its tokens. 64 tokens alone, as a device measures its base: 1.5 ms.
GRAPH_SECONDS, GRAPH_BASE_SECONDS = 0.0005, 0.0015


def step_model(num_graph_tokens: int) -> StepModel:
    """What the agent measured: a base of small prompts, which says nothing of larger ones."""
    return replace(STEPS, prefill_base_seconds=GRAPH_BASE_SECONDS) if num_graph_tokens else STEPS


def step_seconds(batch: StepBatch, plan: Plan, rng: random.Random, noise: float, num_graph_tokens: int) -> float:
    """A step of prompts and decode rows hides what the device computes behind the hand-over; null.py adds the two up."""
    counts = batch.query_starts[1:] - batch.query_starts[:-1]
    is_decode = counts == 1
    model, num_decodes, num_tokens = plan.step_model, int(is_decode.sum()), int(counts[~is_decode].sum())
    slower = STEPS.prefill_tokens_per_second / model.prefill_tokens_per_second
    seconds = 0.0
    if num_decodes:
        seconds = model.decode_step_seconds(num_decodes, float(batch.context_lens[is_decode].mean()))
    if num_tokens:
        computing = num_tokens / model.prefill_tokens_per_second
        if num_tokens <= num_graph_tokens:
            seconds = max(seconds, computing) + slower * GRAPH_SECONDS
        else:
            seconds = max(slower * STEPS.prefill_base_seconds, seconds + computing)
    return seconds * rng.lognormvariate(-noise * noise / 2, noise)


def main() -> None:
    """Entry point of the agent."""
    from dragoman_agent.main import main as agent

    made, plan_of = startup.engine_command, null_model.default_null_plan
    startup.engine_command = lambda *given: [
        part if part != "dragoman_agent.engine.process" else MODULE for part in made(*given)
    ]
    null_model.default_null_plan = lambda *given, **named: replace(
        plan_of(*given, **named), step_model=step_model(int(os.environ[GRAPHS])), max_batch_tokens=MAX_BATCH_TOKENS
    )
    agent()


def engine() -> int:
    """Entry point of the engine process."""
    from dragoman_agent.engine.process import main as process

    rng, noise, num_graph_tokens = random.Random(0), float(os.environ[NOISE]), int(os.environ[GRAPHS])
    null._step_seconds = lambda batch, plan: step_seconds(batch, plan, rng, noise, num_graph_tokens)
    return process()


if __name__ == "__main__":
    sys.exit(engine())
