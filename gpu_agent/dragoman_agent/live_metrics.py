"""Metrics of the device and of the indices. What cannot be read has no sample: a zero would be a lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman_agent.engine.indices import IndexSample
from dragoman_agent.pal.live import Quantity, Sample
from dragoman_agent.pal.xid import is_known

_HELP = {
    "dragoman_device_temperature_celsius": "Temperature of the device.",
    "dragoman_device_power_watts": "Power drawn.",
    "dragoman_device_power_limit_watts": "Power limit enforced.",
    "dragoman_device_clock_hertz": "Clock of the multiprocessors or cores.",
    "dragoman_device_memory_clock_hertz": "Clock of the device's memory.",
    "dragoman_link_width": "Lanes of the link to the device.",
    "dragoman_link_generation": "Generation of the link to the device.",
    "dragoman_link_receive_bytes_per_second": "Traffic to the device.",
    "dragoman_link_send_bytes_per_second": "Traffic from the device.",
    "dragoman_device_free_memory_bytes": "Memory free on the device.",
    "dragoman_device_foreign_memory_bytes": "Memory used by other processes.",
    "dragoman_device_cpu_share_ratio": "Share of the usable cores that other processes leave.",
    "dragoman_device_memory_stall_ratio": "Share of the time in which all tasks waited for memory.",
    "dragoman_gpu_utilization_ratio": "Share of the multiprocessors at work.",
}


class LiveMetrics(Collector):
    """Written on the event loop; a scrape reads what is there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._values: dict[str, float] = {}
        self._indices: dict[str, IndexSample] = {}
        self._hit_ratios: dict[str, float] = {}
        registry.register(self)
        self.events = Counter(
            "dragoman_live_events", "Live limits that passed their threshold.", ["quantity"], registry=registry
        )
        self.replans = Counter("dragoman_replans", "Plans made anew while running.", ["result"], registry=registry)
        self.faults = Counter("dragoman_device_faults", "Faults that the driver reported.", ["xid"], registry=registry)
        self.actions = Counter(
            "dragoman_index_actions", "Actions of the indices, by outcome.", ["action", "outcome"], registry=registry
        )

    def take_sample(self, sample: Sample, sm_ratio: float | None) -> None:
        """The newest sample; `sm_ratio` is the counters' utilisation, which is finer than the driver's."""
        found = {
            "dragoman_device_temperature_celsius": sample.temperature_celsius,
            "dragoman_device_power_watts": sample.power_watts,
            "dragoman_device_power_limit_watts": sample.power_limit_watts,
            "dragoman_device_clock_hertz": sample.clock_hertz,
            "dragoman_device_memory_clock_hertz": sample.memory_clock_hertz,
            "dragoman_link_width": sample.link_width,
            "dragoman_link_generation": sample.link_generation,
            "dragoman_link_receive_bytes_per_second": sample.receive_bytes_per_second,
            "dragoman_link_send_bytes_per_second": sample.send_bytes_per_second,
            "dragoman_device_free_memory_bytes": sample.free_memory_bytes,
            "dragoman_device_foreign_memory_bytes": sample.foreign_memory_bytes,
            "dragoman_device_cpu_share_ratio": sample.cpu_share_ratio,
            "dragoman_device_memory_stall_ratio": sample.memory_stall_ratio,
        }
        if sample.source == "nvml":
            found["dragoman_gpu_utilization_ratio"] = sample.utilization_ratio if sm_ratio is None else sm_ratio
        self._values = {name: float(value) for name, value in found.items() if value is not None}

    def forget_sample(self) -> None:
        """The source is gone: what it said last is not true any more."""
        self._values = {}

    def take_indices(self, indices: Iterable[IndexSample], hit_ratios: dict[str, float]) -> None:
        """The indices, and L2 hit rates by source: "model" is the predicted one."""
        self._indices = {index.name: index for index in indices}
        self._hit_ratios = dict(hit_ratios)

    def count_event(self, quantity: Quantity) -> None:
        """A limit passed its threshold."""
        self.events.labels(quantity).inc()

    def count_fault(self, xid: int) -> None:
        """A fault; those that the table does not know share a label."""
        self.faults.labels(str(xid) if is_known(xid) else "other").inc()

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        for name, value in self._values.items():
            family = GaugeMetricFamily(name, _HELP[name])
            family.add_metric([], value)
            yield family
        indices = GaugeMetricFamily("dragoman_index", "Live indices: mpi, csl and pbs.", labels=["name", "source"])
        for index in self._indices.values():
            indices.add_metric([index.name, index.source], index.value)
        yield indices
        ratios = GaugeMetricFamily(
            "dragoman_l2_hit_ratio", "L2 hit rate; model is the predicted one.", labels=["source"]
        )
        for source, ratio in self._hit_ratios.items():
            ratios.add_metric([source], ratio)
        yield ratios
