"""Metrics of the device: base units, and nothing for what cannot be read."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from dragoman.metric_samples import snapshot
from dragoman_agent.engine.indices import IndexSample
from dragoman_agent.live_metrics import LiveMetrics
from dragoman_agent.pal.live import Sample


def shown(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_only_what_was_read_is_shown() -> None:
    registry = CollectorRegistry()
    metrics = LiveMetrics(registry)
    assert shown(registry) == {}
    metrics.take_sample(Sample("nvml", temperature_celsius=45, link_width=16, utilization_ratio=0.9), 0.7)
    metrics.take_indices([IndexSample("mpi", 0.6, "gpm")], {"model": 0.2, "gpm": 0.1})
    assert shown(registry) == {
        "dragoman_device_temperature_celsius": 45,
        "dragoman_link_width": 16,
        "dragoman_gpu_utilization_ratio": 0.7,
        'dragoman_index{name="mpi",source="gpm"}': 0.6,
        'dragoman_l2_hit_ratio{source="model"}': 0.2,
        'dragoman_l2_hit_ratio{source="gpm"}': 0.1,
    }
    metrics.forget_sample()
    assert "dragoman_device_temperature_celsius" not in shown(registry)


def test_events_and_faults_are_counted_and_unknown_faults_share_a_label() -> None:
    registry = CollectorRegistry()
    metrics = LiveMetrics(registry)
    metrics.count_event("clock")
    for xid in (48, 9001, 9002):
        metrics.count_fault(xid)
    seen = shown(registry)
    assert seen['dragoman_live_events_total{quantity="clock"}'] == 1
    assert seen['dragoman_device_faults_total{xid="48"}'] == 1
    assert seen['dragoman_device_faults_total{xid="other"}'] == 2


def test_the_same_values_go_out_as_messages() -> None:
    registry = CollectorRegistry()
    LiveMetrics(registry).take_sample(Sample("os", clock_hertz=2e9), None)
    (sample,) = [s for s in snapshot(registry.collect(), ["dragoman_device"]).samples if s.name.endswith("clock_hertz")]
    assert sample.gauge == 2e9
