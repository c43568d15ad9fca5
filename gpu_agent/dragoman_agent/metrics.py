"""The agent's metrics: one registry, fed by the engine's frames and by the requests' ends."""

from __future__ import annotations

import platform
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

import dragoman
from dragoman.errors import reason_name
from dragoman_agent.engine.messages import Failed, Finished, Load, Step, TierCounts, TierReport
from dragoman_agent.pal.decisions import Decision

# Buckets of the OpenTelemetry semantic conventions for generative AI, in seconds.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_HOST_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
CLASSES = ("interactive", "standard", "batch")


class TierMetrics:
    """The tiers below the device, from the engine's sums since its start."""

    def __init__(
        self, blocks: Gauge, moved: Counter, seconds: Counter, hits: Counter, drops: Counter, declined: Counter
    ) -> None:
        self._blocks, self._bytes, self._seconds = blocks, moved, seconds
        self._hits, self._drops, self._declined = hits, drops, declined
        self._last: dict[str, TierCounts] = {}
        self._last_drops = self._last_declined = 0

    def take(self, report: TierReport) -> None:
        """What the engine told."""
        for now in report.tiers:
            name = now.name
            before = self._last.get(name) or TierCounts(name, 0, 0, 0, 0.0, 0, 0.0, 0)
            self._last[name] = now
            self._blocks.labels(name, "held").set(now.held_blocks)
            self._blocks.labels(name, "total").set(now.capacity_blocks)
            self._bytes.labels(name, "out").inc(now.written_bytes - before.written_bytes)
            self._bytes.labels(name, "in").inc(now.read_bytes - before.read_bytes)
            self._seconds.labels(name, "out").inc(now.write_seconds - before.write_seconds)
            self._seconds.labels(name, "in").inc(now.read_seconds - before.read_seconds)
            self._hits.labels(name).inc(now.read_blocks - before.read_blocks)
        self._drops.inc(report.dropped_blocks - self._last_drops)
        self._declined.inc(report.declined - self._last_declined)
        self._last_drops, self._last_declined = report.dropped_blocks, report.declined


class AgentMetrics:
    """Every metric of one agent. Written on the event loop only."""

    def __init__(self, *, device_kind: str, waiting_by_class: Callable[[], tuple[int, int, int]]) -> None:
        """`waiting_by_class`: requests without a first token now, interactive, standard and batch."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("dragoman_requests", "Requests that ended, by outcome.", ["outcome"], registry=registry)
        self._load = Load(
            0, 0, 0, 0, 0, 0, 0, 0, 0
        )  # as last told: read when somebody asks, not written with each step
        running = Gauge("dragoman_requests_running", "Sequences in the running batch.", registry=registry)
        running.set_function(lambda: self._load.running)
        waiting = Gauge("dragoman_requests_waiting", "Requests that wait, by class.", ["class"], registry=registry)
        for index, name in enumerate(CLASSES):
            waiting.labels(name).set_function(lambda index=index: waiting_by_class()[index])  # type: ignore[misc]
        self._queue = _histogram("queue_seconds", "Acceptance to first computation.", _QUEUE_BUCKETS, registry)
        self._ttft = _histogram("time_to_first_token_seconds", "Acceptance to first token.", TTFT_BUCKETS, registry)
        self._tpot = _histogram("time_per_output_token_seconds", "Mean gap of a request.", TPOT_BUCKETS, registry)
        self._prompt_tokens = Counter("dragoman_prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._cached_tokens = Counter(
            "dragoman_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self._output_tokens = Counter("dragoman_output_tokens", "Tokens generated.", registry=registry)
        kv_blocks = Gauge("dragoman_kv_blocks", "KV blocks by state.", ["state"], registry=registry)
        kv_blocks.labels("free").set_function(lambda: self._load.free_blocks)
        kv_blocks.labels("cached").set_function(lambda: self._load.cached_blocks)
        kv_blocks.labels("total").set_function(lambda: self._load.total_blocks)
        fragmentation = Gauge(
            "dragoman_kv_fragmentation_ratio",
            "Share of the KV blocks that are neither free nor cached nor owned by a live request; 0 when nothing moves.",
            registry=registry,
        )
        fragmentation.set_function(lambda: self._load.lost_blocks / max(self._load.total_blocks, 1))
        waste = Gauge("dragoman_kv_page_waste_tokens", "Room in the last pages of live sequences.", registry=registry)
        waste.set_function(lambda: self._load.waste_tokens)
        self._kv_releases = Counter(
            "dragoman_kv_releases",
            "Times a request's KV blocks were released, by reason.",
            ["reason"],
            registry=registry,
        )
        tier_blocks = Gauge(
            "dragoman_kv_tier_blocks", "KV blocks of a tier below the device.", ["tier", "state"], registry=registry
        )
        moved = ["tier", "direction"]
        tier_bytes = Counter("dragoman_kv_tier_bytes", "KV moved, by tier and direction.", moved, registry=registry)
        tier_seconds = Counter("dragoman_kv_tier_seconds", "Time that KV took to move.", moved, registry=registry)
        tier_hits = Counter(
            "dragoman_kv_tier_hit_blocks", "KV blocks brought back to the device.", ["tier"], registry=registry
        )
        tier_drops = Counter("dragoman_kv_dropped_blocks", "KV blocks evicted that no tier kept.", registry=registry)
        tier_declined = Counter(
            "dragoman_kv_tier_declined",
            "Prefixes in a lower tier that were computed as that is quicker.",
            registry=registry,
        )
        self._tiers = TierMetrics(tier_blocks, tier_bytes, tier_seconds, tier_hits, tier_drops, tier_declined)
        self.take_tiers = self._tiers.take
        self._preemptions = Counter("dragoman_preemptions", "Sequences preempted.", registry=registry)
        self._step = _histogram("engine_step_seconds", "Device time of a step.", _STEP_BUCKETS, registry)
        self._host_step = _histogram(
            "engine_host_step_seconds", "Work of the engine's thread a step, sending included.", _HOST_BUCKETS, registry
        )
        self.tickets = Counter("dragoman_tickets", "Tickets shown, by result.", ["result"], registry=registry)
        self.resumes = Counter("dragoman_resumes", "Streams to continue, by result.", ["result"], registry=registry)
        self.hints = Counter("dragoman_hints", "Prefetch hints, by outcome.", ["outcome"], registry=registry)
        self._predicted = Gauge(
            "dragoman_decision_predicted", "What a decision predicted.", ["subject", "unit"], registry=registry
        )
        self._measured = Gauge(
            "dragoman_decision_measured", "What was then measured.", ["subject", "unit"], registry=registry
        )
        build = Gauge(
            "dragoman_build_info", "Version of this process.", ["version", "python", "device"], registry=registry
        )
        build.labels(dragoman.__version__, platform.python_version(), device_kind).set(1)

    def take_step(self, step: Step, output_tokens: int) -> None:
        """A step frame or an idle tick, and the tokens that came with it."""
        before, self._load = self._load, step.load
        load = step.load
        if load.preemptions > before.preemptions:
            preempted = load.preemptions - before.preemptions
            self._preemptions.inc(preempted)
            self._kv_releases.labels("preempted").inc(preempted)
        if load.decode_tokens or load.prefill_tokens:
            self._step.observe(step.step_seconds)
            self._host_step.observe(step.host_seconds)
        if output_tokens:
            self._output_tokens.inc(output_tokens)

    def take_decision(self, decision: Decision) -> None:
        """A decision with a prediction, or completed by what was measured."""
        for gauge, value in ((self._predicted, decision.predicted), (self._measured, decision.measured)):
            if value is not None:
                gauge.labels(decision.subject, decision.unit).set(value)

    def request_finished(self, event: Finished, *, longest_choice_tokens: int) -> None:
        """An accepted request came to its end or was cancelled."""
        outcome = "cancelled" if event.cancelled else "finished"
        self.requests.labels(outcome).inc()
        self._kv_releases.labels(outcome).inc()
        self._prompt_tokens.inc(event.prompt_tokens)
        self._cached_tokens.inc(event.cached_tokens)
        if event.cancelled:
            return
        self._queue.observe(event.queue_seconds)
        if event.output_tokens:
            self._ttft.observe(event.first_token_seconds)
        if longest_choice_tokens > 1:
            self._tpot.observe((event.total_seconds - event.first_token_seconds) / (longest_choice_tokens - 1))

    def request_failed(self, event: Failed) -> None:
        """An accepted request failed."""
        self.requests.labels(reason_name(event.reason)).inc()  # type: ignore[arg-type]
        self._kv_releases.labels("failed").inc()
        self._prompt_tokens.inc(event.prompt_tokens)
        self._cached_tokens.inc(event.cached_tokens)

    def embedding_finished(self, prompt_tokens: int) -> None:
        """One input was embedded."""
        self.requests.labels("finished").inc()
        self._kv_releases.labels("finished").inc()
        self._prompt_tokens.inc(prompt_tokens)


def _histogram(name: str, help: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"dragoman_{name}", help, buckets=buckets, registry=registry)
