"""The sampling thread on a fake NVML: what it hands over, when things go away, and that it ends when told."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator

import pynvml
import pytest
from tests.fakes.nvml import UUID, FakeNvml

from dragoman_agent.pal import live_thread
from dragoman_agent.pal.counters import Counters, CountersError, Reading
from dragoman_agent.pal.live import Sample
from dragoman_agent.pal.live_nvml import NvmlSource
from dragoman_agent.pal.live_source import DeviceLostError
from dragoman_agent.pal.live_thread import LiveThread, Look


class Lab:
    def __init__(self) -> None:
        self.fake = FakeNvml()
        self.looks: queue.Queue[Look] = queue.Queue()
        self.thread: LiveThread | None = None

    def start(self, *counters: Counters) -> None:
        source = NvmlSource(lambda: self.fake, UUID, lambda: ())
        self.thread = LiveThread(source, lambda: counters, self.looks.put, 0.02, 0.05)
        self.thread.start()

    def until(self, wanted: Callable[[Look], object]) -> Look:
        """The first look that is wanted; those before it are dropped."""
        while True:
            look = self.looks.get(timeout=10)
            if wanted(look):
                return look


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    if made.thread is not None:
        made.thread.close()
        assert "live" not in [thread.name for thread in threading.enumerate()]


def test_samples_come_again_and_again(lab: Lab) -> None:
    lab.start()
    lab.until(lambda look: look.sample is not None and look.sample.clock_hertz == 1.98e9)
    lab.fake.change(sm_mhz=990)
    lab.until(lambda look: look.sample is not None and look.sample.clock_hertz == 0.99e9)


def test_a_fault_comes_without_waiting_for_the_next_sample(lab: Lab) -> None:
    lab.start()
    lab.until(lambda look: look.sample)
    lab.fake.change(xids=[79, 48])
    assert lab.until(lambda look: look.xids).xids == (79, 48)


def test_a_library_that_goes_is_said_once_and_opened_again_when_it_is_back(lab: Lab) -> None:
    lab.start()
    lab.until(lambda look: look.sample)
    lab.fake.change(errors={"*": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    assert "Driver Not Loaded" in lab.until(lambda look: look.gone).gone
    with pytest.raises(queue.Empty):
        lab.looks.get(timeout=0.3)
    lab.fake.change(errors={})
    assert lab.until(lambda look: True).sample is not None


def test_a_library_that_was_never_there_is_said_once(lab: Lab) -> None:
    lab.fake.change(errors={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND})
    lab.start()
    assert "Not Found" in lab.until(lambda look: look.gone).gone
    with pytest.raises(queue.Empty):
        lab.looks.get(timeout=0.2)


def test_a_lost_device_ends_the_watch(lab: Lab) -> None:
    lab.start()
    lab.until(lambda look: look.sample)
    lab.fake.change(errors={"nvmlDeviceGetTemperature": pynvml.NVML_ERROR_GPU_IS_LOST})
    assert "GPU is lost" in lab.until(lambda look: look.lost).lost
    with pytest.raises(queue.Empty):
        lab.looks.get(timeout=0.2)


class Broken:
    """Counters that may not be read."""

    source = "cupti"

    def __init__(self) -> None:
        self.closed = 0

    def read(self) -> Reading | None:
        raise CountersError("ERR_NVGPUCTRPERM")

    def close(self) -> None:
        self.closed += 1


class Steady(Broken):
    source = "gpm"

    def read(self) -> Reading | None:
        return Reading("gpm", 1.0, sm_ratio=0.5)


def test_the_next_source_of_counters_is_used_where_one_may_not_be_read(lab: Lab) -> None:
    broken, steady = Broken(), Steady()
    lab.start(broken, steady)  # type: ignore[arg-type]
    reading = lab.until(lambda look: look.reading).reading
    assert reading is not None and reading.source == "gpm" and broken.closed == 1
    lab.fake.change(errors={"*": pynvml.NVML_ERROR_UNINITIALIZED})
    lab.until(lambda look: look.gone)
    lab.fake.change(errors={})
    lab.until(lambda look: look.reading)
    assert steady.closed >= 1, "they are closed with the source they belong to"


class Watched:
    """A source on a clock of its own: a look costs time, waiting costs what it is told, nothing really waits."""

    name = "watched"

    def __init__(self, look_seconds: float, num_looks: int) -> None:
        self.now = 1000.0
        self.looked_at: list[float] = []
        self.over = threading.Event()
        self._look_seconds = look_seconds
        self._num_looks = num_looks

    def monotonic(self) -> float:
        return self.now

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def sample(self) -> Sample:
        self.looked_at.append(self.now)
        self.now += self._look_seconds
        if len(self.looked_at) == self._num_looks:
            self.over.set()
            raise DeviceLostError("the end")
        return Sample()

    def wait(self, seconds: float) -> list[int]:
        assert 0 < seconds <= 0.2, "a stop and a fault are noticed soon"
        self.now += seconds
        return []


@pytest.mark.parametrize("look_seconds", [0.0, 0.3])
def test_as_it_is_started_it_looks_once_a_second_whatever_a_look_takes(
    look_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Watched(look_seconds, 61)
    monkeypatch.setattr(live_thread, "time", source)
    looks: queue.Queue[Look] = queue.Queue()
    thread = LiveThread(source, list, looks.put)  # the agent names no other period
    thread.start()
    assert source.over.wait(10)
    thread.close()
    periods = [after - before for before, after in itertools.pairwise(source.looked_at)]
    assert periods == pytest.approx([1.0] * 60), "1 Hz"
    assert sum(looks.get_nowait().sample is not None for _ in range(looks.qsize())) == 60


def test_closing_before_starting_and_twice_is_fine() -> None:
    thread = LiveThread(NvmlSource(FakeNvml, UUID, lambda: ()), list, lambda look: None)
    thread.close()
    thread.close()
