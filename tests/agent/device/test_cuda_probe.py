"""Every step of the GPU probe on a simulated card: what it reports are the card's constants, and a wrong result is no value."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.simulated_gpu import Card, SimulatedGpu

from dragoman_agent.device import cuda_probe
from dragoman_agent.device import cuda_probe_launch as launch
from dragoman_agent.device import cuda_probe_link as link
from dragoman_agent.device import cuda_probe_memory as memory
from dragoman_agent.device.cuda_probe_bench import Bench, StepError
from dragoman_agent.device.partition import PartitionLimits
from dragoman_agent.pal.profile import Value
from dragoman_agent.pal.profile_schema import check_labels, check_name, check_spread, check_value

MakeBench = Callable[..., Bench]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binaries compiled once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_bench(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[MakeBench]:
    """A bench on a simulated card."""
    bindings = pytest.importorskip("cuda.bindings")
    pytest.importorskip("cuda.bindings.nvrtc")

    def make(card: Card | None = None, *, full: bool = True, memory_bytes: int | None = None) -> Bench:
        gpu = SimulatedGpu(card or Card())
        monkeypatch.setattr(bindings, "driver", gpu, raising=False)
        return Bench(0, full=full, limits=PartitionLimits(memory_bytes=memory_bytes), cache_dir=cache)

    yield make


def number(values: dict[str, Value], name: str) -> float:
    value = values[name].value
    assert isinstance(value, float | int)
    return float(value)


def check_form(values: dict[str, Value]) -> None:
    """A profile takes them."""
    for name, value in values.items():
        check_name(name)
        check_value(name, value.value, value.unit, value.provenance)
        check_spread(name, value.spread)
        check_labels(name, value.labels, value.value)


def test_streams_find_the_rates(make_bench: MakeBench) -> None:
    bench = make_bench()
    values = memory.read(bench) | memory.copy(bench)
    check_form(values)
    assert number(values, "memory.read_bandwidth") == pytest.approx(4.6e12, rel=0.01)
    assert number(values, "memory.copy_bandwidth") == pytest.approx(4.3e12, rel=0.01)
    assert "in flight" in values["memory.copy_bandwidth"].note


def test_a_quick_copy_takes_half_the_memory_and_finds_the_same_rate(make_bench: MakeBench) -> None:
    quick, full = (memory.copy(make_bench(full=full))["memory.copy_bandwidth"] for full in (False, True))
    assert quick.note.startswith("2048 MiB") and full.note.startswith("8192 MiB")
    assert quick.value == pytest.approx(full.value, rel=0.01)
    with pytest.raises(StepError, match="wrong sum"):
        memory.copy(make_bench(Card(bad_sum=True), full=False))


def test_the_drivers_copy_is_named_where_it_is_quicker(make_bench: MakeBench) -> None:
    values = memory.copy(make_bench(Card(driver_copy=4.4e12)))
    assert number(values, "memory.copy_bandwidth") == pytest.approx(4.4e12, rel=0.01)
    assert "the driver's copy" in values["memory.copy_bandwidth"].note


def test_a_wrong_sum_is_no_rate(make_bench: MakeBench) -> None:
    bench = make_bench(Card(bad_sum=True))
    with pytest.raises(StepError, match="wrong sum"):
        memory.read(bench)
    with pytest.raises(StepError, match="wrong sum"):
        memory.copy(bench)


@pytest.mark.parametrize("full", [False, True])
def test_the_phase_is_the_intercept_and_its_rate_the_slope(make_bench: MakeBench, full: bool) -> None:
    values = memory.phase(make_bench(full=full))
    check_form(values)
    assert number(values, "scheduling.phase") == pytest.approx(2.1e-6, rel=0.01)
    assert number(values, "scheduling.phase_rate") == pytest.approx(4.6e12, rel=0.01)


def test_rates_by_size_include_the_launch(make_bench: MakeBench) -> None:
    values = memory.read_by_size(make_bench())
    check_form(values)
    value = values["memory.read_by_size"]
    assert isinstance(value.value, tuple)
    assert value.labels[0] == str(2 << 20) and len(value.labels) == 7
    assert value.value[0] == pytest.approx((2 << 20) / (2.1e-6 + (2 << 20) / 4.6e12), rel=0.01)


def test_the_knee_is_found(make_bench: MakeBench) -> None:
    values = memory.level_two(make_bench())
    check_form(values)
    assert number(values, "memory.l2_knee") == pytest.approx(30 << 20, rel=0.1)
    assert number(values, "memory.l2_bandwidth") == pytest.approx(7e12, rel=0.01)


def test_a_card_without_a_knee_has_no_value(make_bench: MakeBench) -> None:
    with pytest.raises(ValueError, match="no knee"):
        memory.level_two(make_bench(Card(l2_rate=4.7e12)))


def test_latencies(make_bench: MakeBench) -> None:
    values = memory.latency(make_bench())
    check_form(values)
    assert number(values, "memory.latency") == pytest.approx(650e-9, rel=0.01)
    assert number(values, "memory.l2_latency") == pytest.approx(260e-9, rel=0.01)


def test_regions_alike_are_said_to_be_alike_and_others_to_differ(make_bench: MakeBench) -> None:
    alike = memory.latency_by_region(make_bench())
    check_form(alike)
    assert "not significant" in alike["memory.latency_by_region"].note
    assert len(alike["memory.latency_by_region"].labels) == 16
    differ = memory.latency_by_region(make_bench(Card(far_latency=700e-9)))
    assert "difference significant" in differ["memory.latency_by_region"].note


def test_nodes_launches_and_barriers(make_bench: MakeBench) -> None:
    bench = make_bench()
    values = launch.graph_node(bench) | launch.stream_launch(bench) | launch.grid_barrier(bench)
    check_form(values)
    assert number(values, "scheduling.graph_node") == pytest.approx(0.55e-6)
    assert number(values, "scheduling.graph_node_dependent") == pytest.approx(0.475e-6)
    assert number(values, "scheduling.dependent_launch_gain") == pytest.approx(0.075e-6)
    assert number(values, "scheduling.stream_launch") == pytest.approx(1.2e-6)
    assert number(values, "scheduling.host_launch") > 0
    assert number(values, "scheduling.grid_barrier") == pytest.approx(0.94e-6)
    assert "wait on the counter" in values["scheduling.grid_barrier"].note


def test_older_cards_have_neither_dependent_launch_nor_wide_exchanges(make_bench: MakeBench) -> None:
    bench = make_bench(Card(capability=(8, 9)))
    assert set(launch.graph_node(bench)) == {"scheduling.graph_node"}
    assert launch.atomics(bench)["scheduling.atomics"].labels == ("32", "64")


def test_a_barrier_that_does_not_wait_is_no_barrier(make_bench: MakeBench) -> None:
    with pytest.raises(StepError, match="let 1 blocks pass early"):
        launch.grid_barrier(make_bench(Card(early_barrier=True)))


def test_events_and_atomics(make_bench: MakeBench) -> None:
    bench = make_bench()
    values = launch.events(bench) | launch.atomics(bench)
    check_form(values)
    assert number(values, "scheduling.event_record") == pytest.approx(0.3e-6)
    assert number(values, "scheduling.event_wait") == pytest.approx(1.5e-6)
    assert values["scheduling.atomics"].labels == ("32", "64", "128")


def test_a_record_too_cheap_to_tell_is_a_bound_and_no_measurement(make_bench: MakeBench) -> None:
    values = launch.events(make_bench(Card(record=0.0)))
    check_form(values)
    record = values["scheduling.event_record"]
    assert record.provenance == "derived" and record.note.startswith(
        "an upper bound: below what was resolved (5 ns); on"
    )
    assert number(values, "scheduling.event_record") == pytest.approx(5e-9), "half a microsecond over a hundred records"


def test_nodes_that_take_no_time_are_an_error(make_bench: MakeBench) -> None:
    with pytest.raises(ValueError, match="nothing was resolved"):
        launch.graph_node(make_bench(Card(node=0.0)))


def test_links(make_bench: MakeBench) -> None:
    values = link.pinned(make_bench()) | link.pageable(make_bench())
    check_form(values)
    assert number(values, "link.h2d_pinned") == pytest.approx(55e9, rel=0.01)
    assert number(values, "link.both_ways") == pytest.approx(110e9, rel=0.01)
    assert "link.both_ways" not in link.pinned(make_bench(full=False))


def test_throughput_by_block_size(make_bench: MakeBench) -> None:
    values = memory.by_block_size(make_bench())
    check_form(values)
    assert values["scheduling.occupancy_by_block_size"].value == (1.0, 1.0, 1.0, 1.0, 0.75, 1.0)


def test_a_memory_limit_is_kept(make_bench: MakeBench) -> None:
    bench = make_bench(memory_bytes=1 << 30)
    assert bench.pool()[1] == 256 << 20
    with pytest.raises(StepError, match="too few"):
        make_bench(memory_bytes=100 << 20).pool()


def test_everything_runs_on_the_partition(make_bench: MakeBench) -> None:
    """On 24 multiprocessors: their streams, and no grid that counts on more."""
    bench = make_bench()
    session = bench.session
    given: list[Any] = []

    def new_stream() -> Any:
        given.append(session.call(session.driver.cuStreamCreate(1)))
        return given[-1]

    whole = session.stream
    session.use_streams(new_stream, 24)
    before = whole.clock
    for step in (memory.read, memory.phase, memory.level_two, launch.graph_node, launch.events, link.pinned):
        step(bench)
    assert "24 blocks" in launch.grid_barrier(bench)["scheduling.grid_barrier"].note
    assert whole.clock == before and session.stream is given[0] and len(given) == 3  # events and both ways take another


def test_the_program_answers_step_by_step_and_stops_where_the_context_broke(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = make_bench(Card(fail="barrier_flag"))
    monkeypatch.setattr(cuda_probe, "Bench", lambda *_, **__: bench)
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(cuda_probe.os, "_exit", end)
    with pytest.raises(SystemExit):
        cuda_probe.main(["0", "--steps", "memory.read,scheduling.grid_barrier,link.pinned"])
    assert ended == [3]
    written = capfd.readouterr()
    lines = [json.loads(line) for line in written.out.splitlines()]
    assert [line["step"] for line in lines] == ["open", "memory.read", "scheduling.grid_barrier"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in lines[2]["error"]
    assert "step memory.read" in written.err and "Traceback" not in written.err
