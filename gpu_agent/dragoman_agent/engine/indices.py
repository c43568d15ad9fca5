"""The three live indices: memory pressure (MPI), compute saturation (CSL) and the PCIe score (PBS). Pure.

Definitions of the product's requirement S3; each value names the source that it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

from dragoman.step_model import StepModel

# Counters are this exact: a difference within it is none (their bytes were within 10 % of a profiler's).
COUNTER_ERROR = 0.10
PENALTY_BELOW = 0.75  # of the predicted hit rate
MIN_OBSERVED_SHARE = 0.1  # of the predicted hit rate: below it the factor would run away


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step did, from its frame. Seconds and tokens of this step alone."""

    decode_tokens: int
    prefill_tokens: int
    running: int
    context_tokens: int
    pending_prefill_tokens: int
    step_seconds: float
    host_seconds: float
    unused_blocks: int
    total_blocks: int
    max_step_tokens: int
    eviction_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def seconds(self) -> float:
        """Device and host time: what a step costs where the two do not overlap."""
        return self.step_seconds + self.host_seconds


@dataclass(frozen=True, slots=True)
class CacheView:
    """L2 hit rate of the last interval: predicted for its steps, and observed where counters could be read."""

    source: str = "model"  # "cupti", "gpm" or "model"
    predicted: float | None = None
    observed: float | None = None  # None with source "model"
    excess_bytes_per_second: float = 0.0  # from memory, beyond what was predicted


@dataclass(frozen=True, slots=True)
class IndexSample:
    """One index at one time."""

    name: str  # "mpi", "csl" or "pbs"
    value: float
    source: str


def cache_factor(predicted: float | None, observed: float | None) -> float:
    """max(1, predicted / observed hit rate), with a penalty that grows once observed is under 75 % of predicted.

    1 where one of them is not known, and where they differ by less than the counters' error.
    """
    if (
        predicted is None
        or observed is None
        or predicted <= 0
        or predicted - observed <= COUNTER_ERROR * (1 - predicted)
    ):
        return 1.0
    share = max(observed / predicted, MIN_OBSERVED_SHARE)
    factor = max(1.0, 1.0 / share)
    return factor if share >= PENALTY_BELOW else factor * (1.0 + PENALTY_BELOW - share)


def memory_pressure(used_blocks: int, total_blocks: int, cache: CacheView) -> IndexSample:
    """MPI = used / total x the cache's factor. Cached blocks count as used: releasing them is what lowers it."""
    used = used_blocks / total_blocks if total_blocks else 0.0
    return IndexSample("mpi", used * cache_factor(cache.predicted, cache.observed), cache.source)


def bound_seconds(model: StepModel, facts: StepFacts) -> float:
    """The step model's time for what this step computed."""
    seconds = model.prefill_seconds(facts.prefill_tokens)
    if facts.decode_tokens:
        mean_context = facts.context_tokens / max(facts.running, 1)
        seconds += model.decode_step_seconds(facts.decode_tokens, mean_context)
    return seconds


def compute_saturation(model: StepModel, facts: StepFacts) -> IndexSample:
    """CSL = the step model's bound for this batch / measured step time; 0 for a step without time."""
    value = bound_seconds(model, facts) / facts.step_seconds if facts.step_seconds > 0 else 0.0
    return IndexSample("csl", value, "model")


def link_score(transfer_bytes_per_second: float, link_bytes_per_second: float, source: str) -> IndexSample:
    """PBS = transfer rate / measured link rate."""
    value = transfer_bytes_per_second / link_bytes_per_second if link_bytes_per_second > 0 else 0.0
    return IndexSample("pbs", value, source)
