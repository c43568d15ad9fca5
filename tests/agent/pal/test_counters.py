"""Hardware counters: what they mean, and that each way to fail names its reason."""

from __future__ import annotations

import json
import sys

import pynvml
import pytest
from tests.fakes.nvml import UUID, FakeNvml

from dragoman_agent.pal import counters_cupti
from dragoman_agent.pal.counters import CountersError, l2_hit_ratio, peak_dram_bytes_per_second
from dragoman_agent.pal.counters_cupti import CuptiCounters
from dragoman_agent.pal.counters_gpm import GpmCounters
from dragoman_agent.pal.profile import DeviceFacts, Profile, Value

H200 = Profile(
    "h200",
    DeviceFacts("cuda", 0, "", "sm_90", 0, "u"),
    "f",
    "2026-11-29T00:00:00+00:00",
    {"memory.max_clock": Value(3.201e9, "Hz", "reported"), "memory.bus_width": Value(6016, "", "reported")},
)


def test_peak_is_clock_times_width_times_two() -> None:
    assert peak_dram_bytes_per_second(H200) == pytest.approx(4.81e12, rel=1e-3)
    assert peak_dram_bytes_per_second(Profile("p", H200.device, "f", "", {})) is None


@pytest.mark.parametrize(
    ("dram", "asked", "ratio"), [(25, 100, 0.75), (100, 100, 0.0), (130, 100, 0.0), (0, 100, 1.0), (5, 0, None)]
)
def test_hit_ratio_is_what_did_not_come_from_memory(dram: float, asked: float, ratio: float | None) -> None:
    assert l2_hit_ratio(dram, asked) == ratio


def opened(**changes: object) -> FakeNvml:
    fake = FakeNvml()
    fake.nvmlInit()
    fake.change(**changes)
    return fake


def test_gpm_reads_intervals_in_base_units() -> None:
    counters = GpmCounters(opened(), UUID, peak_dram_bytes_per_second(H200))
    assert counters.read() is None, "one sample is no interval"
    reading = counters.read()
    assert reading is not None and reading.source == "gpm"
    assert (reading.sm_ratio, reading.tensor_ratio, reading.dram_ratio) == (0.8, 0.3, 0.6)
    assert reading.dram_bytes_per_second == pytest.approx(0.6 * 4.81e12, rel=1e-3)
    assert (reading.send_bytes_per_second, reading.receive_bytes_per_second) == (100 << 20, 200 << 20)


def test_a_metric_that_the_card_lacks_is_absent_not_zero() -> None:
    counters = GpmCounters(opened(gpm={"2": 50.0}), UUID, 1e12)
    counters.read()
    reading = counters.read()
    assert reading is not None and reading.sm_ratio == 0.5
    assert reading.dram_ratio is reading.dram_bytes_per_second is reading.receive_bytes_per_second is None


def test_gpm_without_support_or_permission_says_so() -> None:
    with pytest.raises(CountersError, match="no GPM"):
        GpmCounters(opened(gpm=None), UUID, None)
    with pytest.raises(CountersError, match="Insufficient Permissions"):
        GpmCounters(opened(errors={"nvmlGpmQueryDeviceSupport": pynvml.NVML_ERROR_NO_PERMISSION}), UUID, None)
    fake = opened()
    counters = GpmCounters(fake, UUID, None)
    fake.change(errors={"nvmlGpmSampleGet": pynvml.NVML_ERROR_NO_PERMISSION})
    with pytest.raises(CountersError, match="Insufficient Permissions"):
        counters.read()
    counters.close()
    counters.close()
    assert fake.calls.count("nvmlGpmSampleFree") == 2


def burst_that(code: str) -> CuptiCounters:
    return CuptiCounters(0, 1e12, (sys.executable, "-c", code))


def test_a_burst_is_read_and_then_not_again_for_a_while() -> None:
    body = json.dumps({"seconds": 0.065, "num_samples": 65.0, "dram": 89.0, "ipc": 0.42, "receive": 5e9, "l2_hit": 0.5})
    counters = burst_that(f"print('''{body}''')")
    reading = counters.read()
    assert reading is not None and (reading.source, reading.seconds) == ("cupti", 0.065)
    assert reading.dram_bytes_per_second == pytest.approx(0.89e12)
    assert (reading.instructions_per_cycle, reading.receive_bytes_per_second) == (0.42, 5e9)
    assert reading.l2_hit_ratio == 0.5
    assert reading.sm_ratio is None, "one pass did not hold it"
    assert counters.read() is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise PermissionError('ERR_NVGPUCTRPERM')", "ERR_NVGPUCTRPERM"),
        ("print('no json')", "unreadable"),
        ("print('[]')", "unreadable"),
    ],
)
def test_a_burst_that_fails_says_why(code: str, words: str) -> None:
    with pytest.raises(CountersError, match=words):
        burst_that(code).read()


def test_without_the_package_there_are_no_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_cupti.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CountersError, match="cupti-python is not installed"):
        CuptiCounters(0, None)


def test_the_burst_program_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """This machine has no GPU; with one the program would print numbers, which no test here can check."""
    code = counters_cupti.main(["0", "--seconds", "0.001"])
    out, err = capsys.readouterr()
    assert (code == 1 and err.count("\n") == 1 and "Traceback" not in err) or json.loads(out)["seconds"] > 0


class Collector:
    """CUPTI's collector of a card whose one pass holds two metrics."""

    def __init__(self) -> None:
        self.metrics: list[str] = []

    def configure(self, *, metrics: list[str], **_: int) -> None:
        if len(metrics) > 2 or "unknown" in metrics:
            raise ValueError("cannot be collected in a single pass")
        self.metrics = metrics


def test_metrics_that_do_not_fit_into_a_pass_are_left_out_from_the_end() -> None:
    collector = Collector()
    metrics = counters_cupti.GROUPS[0]
    assert counters_cupti._configure(collector, dict(metrics)) == ["dram", "ipc"]
    assert collector.metrics == list(metrics.values())[:2]
    with pytest.raises(ValueError, match="single pass"):
        counters_cupti._configure(collector, {"x": "unknown"})
