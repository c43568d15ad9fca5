from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import generate_latest

from dragoman.metric_samples import snapshot
from dragoman.v1 import error_pb2
from dragoman_agent.engine.messages import Failed, Finished, Load, Step, TierCounts, TierReport
from dragoman_agent.metrics import AgentMetrics
from dragoman_cli.process import MetricsServer


@pytest.fixture
def metrics() -> AgentMetrics:
    return AgentMetrics(device_kind="null", waiting_by_class=lambda: (1, 2, 3))


def value(metrics: AgentMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def load(**changes: int) -> Load:
    fields = {
        "running": 2, "waiting": 1, "free_blocks": 5, "cached_blocks": 3, "total_blocks": 9,
        "pending_prefill_tokens": 0, "running_context_tokens": 0, "preemptions": 0, "step_count": 1,
    }  # fmt: skip
    return Load(**{**fields, **changes})


def finished(**changes: object) -> Finished:
    fields: dict[str, object] = {
        "request_id": "a", "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 6,
        "queue_seconds": 0.01, "first_token_seconds": 0.05, "total_seconds": 0.30,
    }  # fmt: skip
    return Finished(**{**fields, **changes})  # type: ignore[arg-type]


def test_names_of_the_control_plane_are_there(metrics: AgentMetrics) -> None:
    text = generate_latest(metrics.registry).decode()
    names = [
        "requests_total",
        "requests_running",
        "requests_waiting",
        "queue_seconds",
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "prompt_tokens_total",
        "cached_prompt_tokens_total",
        "output_tokens_total",
        "kv_blocks",
        "kv_releases_total",
        "kv_tier_blocks",
        "kv_tier_bytes_total",
        "kv_tier_seconds_total",
        "kv_tier_hit_blocks_total",
        "kv_dropped_blocks_total",
        "kv_tier_declined_total",
        "preemptions_total",
        "engine_step_seconds",
        "engine_host_step_seconds",
        "hints_total",
        "tickets_total",
        "resumes_total",
        "build_info",
    ]
    for name in names:
        family = name.removesuffix("_total")
        assert f"# HELP dragoman_{name} " in text or f"# HELP dragoman_{family} " in text, name
    assert "_created" not in text


def test_a_finished_request_is_counted_once_everywhere(metrics: AgentMetrics) -> None:
    metrics.request_finished(finished(), longest_choice_tokens=6)
    assert value(metrics, "dragoman_requests_total", outcome="finished") == 1
    assert value(metrics, "dragoman_prompt_tokens_total") == 10
    assert value(metrics, "dragoman_cached_prompt_tokens_total") == 4
    assert value(metrics, "dragoman_time_to_first_token_seconds_sum") == pytest.approx(0.05)
    assert value(metrics, "dragoman_time_per_output_token_seconds_sum") == pytest.approx(0.05)
    assert value(metrics, "dragoman_time_to_first_token_seconds_bucket", le="0.06") == 1
    assert value(metrics, "dragoman_time_to_first_token_seconds_bucket", le="0.04") == 0


def test_cancelled_and_failed_teach_no_times(metrics: AgentMetrics) -> None:
    metrics.request_finished(finished(cancelled=True), longest_choice_tokens=6)
    metrics.request_failed(Failed("a", int(error_pb2.ERROR_REASON_CREDIT_TIMEOUT), "slow"))
    assert value(metrics, "dragoman_requests_total", outcome="cancelled") == 1
    assert value(metrics, "dragoman_requests_total", outcome="credit_timeout") == 1
    assert value(metrics, "dragoman_time_to_first_token_seconds_count") == 0


def test_steps_set_the_gauges_and_idle_ticks_are_no_steps(metrics: AgentMetrics) -> None:
    metrics.take_step(Step(1, [], load(decode_tokens=2, preemptions=3), 0.004, 0.0002), 3)
    metrics.take_step(Step(1, [], load(preemptions=4), 0.0, 0.0), 0)
    assert value(metrics, "dragoman_engine_step_seconds_count") == 1
    assert value(metrics, "dragoman_engine_host_step_seconds_sum") == pytest.approx(0.0002)
    assert value(metrics, "dragoman_output_tokens_total") == 3
    assert value(metrics, "dragoman_preemptions_total") == 4
    assert value(metrics, "dragoman_kv_releases_total", reason="preempted") == 4
    assert value(metrics, "dragoman_kv_blocks", state="free") == 5
    metrics.take_step(Step(1, [], load(total_blocks=20, lost_blocks=2, waste_tokens=7), 0.0, 0.0), 0)
    assert value(metrics, "dragoman_kv_fragmentation_ratio") == 0.1
    assert value(metrics, "dragoman_kv_page_waste_tokens") == 7
    assert value(metrics, "dragoman_requests_waiting", **{"class": "standard"}) == 2


def test_stream_messages_have_each_buckets_own_count(metrics: AgentMetrics) -> None:
    for seconds in (0.0005, 0.03, 0.03, 99.0):
        metrics.request_finished(finished(first_token_seconds=seconds), longest_choice_tokens=1)
    samples = snapshot(metrics.registry.collect(), ["dragoman_time_to_first_token"]).samples
    assert [sample.name for sample in samples] == ["dragoman_time_to_first_token_seconds"]
    histogram = samples[0].histogram
    assert len(histogram.bucket_counts) == len(histogram.upper_bounds) + 1
    counts = dict(zip([*histogram.upper_bounds, "over"], histogram.bucket_counts, strict=True))
    assert (counts[0.001], counts[0.04], counts["over"], sum(counts.values())) == (1, 2, 1, 4)
    assert histogram.sum == pytest.approx(99.0605)


def test_http_exposition_and_a_port_that_is_taken(metrics: AgentMetrics) -> None:
    server = MetricsServer(metrics.registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as response:
            assert response.status == 200
            assert b"dragoman_build_info" in response.read()
        with pytest.raises(OSError):
            MetricsServer(metrics.registry, "127.0.0.1", server.port)
    finally:
        server.close()


def test_tiers_are_counted_from_sums(metrics: AgentMetrics) -> None:
    metrics.take_tiers(TierReport([TierCounts("host", 10, 4, 100, 0.5, 0, 0.0, 0)], 1, 0))
    metrics.take_tiers(TierReport([TierCounts("host", 10, 6, 150, 0.75, 50, 0.25, 2)], 3, 4))
    assert value(metrics, "dragoman_kv_tier_blocks", tier="host", state="held") == 6
    assert value(metrics, "dragoman_kv_tier_blocks", tier="host", state="total") == 10
    assert value(metrics, "dragoman_kv_tier_bytes_total", tier="host", direction="out") == 150
    assert value(metrics, "dragoman_kv_tier_bytes_total", tier="host", direction="in") == 50
    assert value(metrics, "dragoman_kv_tier_seconds_total", tier="host", direction="out") == 0.75
    assert value(metrics, "dragoman_kv_tier_hit_blocks_total", tier="host") == 2
    assert value(metrics, "dragoman_kv_dropped_blocks_total") == 3
    assert value(metrics, "dragoman_kv_tier_declined_total") == 4
