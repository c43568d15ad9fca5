"""The indices from the engine's frames and the device's counters: sums between two looks, then values. No effects."""

from __future__ import annotations

import time
from collections.abc import Callable

from dragoman_agent.engine.index_actions import Act, IndexActions, Knobs
from dragoman_agent.engine.indices import (
    CacheView,
    IndexSample,
    StepFacts,
    compute_saturation,
    link_score,
    memory_pressure,
)
from dragoman_agent.engine.messages import Step
from dragoman_agent.engine.traffic import Traffic, TrafficModel, traffic_model
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.counters import Reading, l2_hit_ratio
from dragoman_agent.pal.live import Sample
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner_kv import kv_model
from dragoman_agent.pal.profile import Profile

# What the counters see is the whole device's: with this much memory held by others the traffic may be theirs.
MAX_FOREIGN_SHARE = 0.02
MIN_BUSY_SHARE = 0.5  # of an interval: what a shorter one asked for says little of its counters
_STEP_WORDS = 9  # of 4 bytes that a token of a step sends over the link, one more for each page of its context


class IndexWatch:
    """Fed with every frame and every look. Used from one event loop."""

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        model: ModelConfig | None,
        actions: IndexActions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` None, or a device that is no GPU: the L2 hit rate has no model, and MPI's factor is 1."""
        self._plan = plan
        self._actions = actions
        self._clock = clock
        self._traffic = _traffic_model(plan, profile, model)
        self._link_rate = _link_rate(profile)
        self._eviction_seconds = 0.0
        self._cache = CacheView()
        self._link: IndexSample | None = None
        self._mpi: IndexSample | None = None
        self._csl_sum = 0.0
        self._csl_count = 0
        self._csl: IndexSample | None = None
        self._seen = Traffic()
        self._busy_seconds = 0.0
        self._link_bytes = 0.0
        self._since = clock()
        self.sm_ratio: float | None = None
        self.hit_ratios: dict[str, float] = {}

    @property
    def knobs(self) -> Knobs:
        """What the actions have turned."""
        return self._actions.knobs

    def rebase(self, plan: Plan) -> None:
        """A new plan is in force."""
        self._plan = plan
        self._actions.rebase(Knobs(plan.max_company_tokens, prefetch_ahead=plan.prefetch))

    def current(self) -> list[IndexSample]:
        """The indices as of the last look; those that nothing is known of are left out."""
        return [index for index in (self._mpi, self._csl, self._link) if index is not None]

    def take_step(self, step: Step) -> Act | None:
        """One frame; an idle tick says nothing."""
        load = step.load
        evicting = load.eviction_seconds - self._eviction_seconds
        self._eviction_seconds = load.eviction_seconds
        if not (load.decode_tokens or load.prefill_tokens):
            return None
        facts = StepFacts(
            load.decode_tokens,
            load.prefill_tokens,
            load.running,
            load.running_context_tokens,
            load.pending_prefill_tokens,
            step.step_seconds,
            step.host_seconds,
            load.unused_blocks,
            load.total_blocks,
            load.max_step_tokens,
            evicting,
        )
        self._add(facts)
        mpi = memory_pressure(load.total_blocks - load.unused_blocks, load.total_blocks, self._cache)
        csl = compute_saturation(self._plan.step_model, facts)
        self._mpi = mpi
        self._csl_sum += csl.value
        self._csl_count += 1
        indices = (mpi, csl) if self._link is None else (mpi, csl, self._link)
        return self._actions.take(facts, indices, self._cache, self._plan.step_model)

    def _add(self, facts: StepFacts) -> None:
        self._busy_seconds += facts.step_seconds
        if self._traffic is None:
            return
        self._seen = self._seen + self._traffic.step(facts.decode_tokens, facts.prefill_tokens, facts.context_tokens)
        words = _STEP_WORDS * facts.num_tokens + facts.context_tokens / self._plan.page_size
        self._link_bytes += 4 * words

    def take_sample(self, sample: Sample, reading: Reading | None, profile: Profile) -> None:
        """One look: what the counters say of the time since the last one. `profile` is the overlaid one."""
        now = self._clock()
        seconds = max(now - self._since, 1e-6)
        self._link_rate = _link_rate(profile)
        self.sm_ratio = reading.sm_ratio if reading is not None else None
        if self._csl_count:
            self._csl = IndexSample("csl", self._csl_sum / self._csl_count, "model")
        self._cache = self._look_at_cache(sample, reading, seconds)
        self.hit_ratios = {}
        if self._cache.predicted is not None:
            self.hit_ratios["model"] = self._cache.predicted
        if self._cache.observed is not None:
            self.hit_ratios[self._cache.source] = self._cache.observed
        if reading is not None and reading.l2_hit_ratio is not None:
            self.hit_ratios["cupti-sectors"] = reading.l2_hit_ratio
        self._link = self._look_at_link(sample, reading, seconds)
        self._seen, self._busy_seconds, self._link_bytes, self._since = Traffic(), 0.0, 0.0, now
        self._csl_sum, self._csl_count = 0.0, 0

    def _look_at_cache(self, sample: Sample, reading: Reading | None, seconds: float) -> CacheView:
        predicted = self._seen.hit_ratio
        if predicted is None:
            return CacheView()
        is_shared = (sample.foreign_memory_bytes or 0) > MAX_FOREIGN_SHARE * (sample.total_memory_bytes or 0) > 0
        rate = reading.dram_bytes_per_second if reading is not None else None
        is_idle = self._busy_seconds < MIN_BUSY_SHARE * seconds
        if reading is None or rate is None or is_shared or is_idle or not self._seen.is_certain:
            return CacheView(predicted=predicted)
        observed = l2_hit_ratio(rate, self._seen.asked_bytes / seconds)
        excess = max(rate - self._seen.dram_bytes / seconds, 0.0)
        return CacheView(reading.source, predicted, observed, excess)

    def _look_at_link(self, sample: Sample, reading: Reading | None, seconds: float) -> IndexSample | None:
        """None where the device has no link, or nothing measured it."""
        if self._link_rate is None:
            return None
        for source, receive, send in (
            (reading.source if reading else "", *_rates(reading)),
            (sample.source, sample.receive_bytes_per_second, sample.send_bytes_per_second),
        ):
            if receive is not None or send is not None:
                return link_score(max(receive or 0.0, send or 0.0), self._link_rate, source)
        return link_score(self._link_bytes / seconds, self._link_rate, "model")


def _rates(reading: Reading | None) -> tuple[float | None, float | None]:
    return (None, None) if reading is None else (reading.receive_bytes_per_second, reading.send_bytes_per_second)


def _link_rate(profile: Profile) -> float | None:
    """The slower direction: what a transfer can rely on."""
    names = [name for name in ("link.h2d_pinned", "link.d2h_pinned") if name in profile.values]
    return min(profile.number(name) for name in names) if names else None


def _traffic_model(plan: Plan, profile: Profile, model: ModelConfig | None) -> TrafficModel | None:
    if model is None or plan.device_kind != "cuda":
        return None
    weights = next((line.size_bytes for line in plan.memory if line.name == "weights"), 2 * model.num_parameters)
    l2 = next((profile.number(name) for name in ("memory.l2_knee", "memory.l2_size") if name in profile.values), 0.0)
    return traffic_model(kv_model(model, plan.kv_dtype), weights, l2)
