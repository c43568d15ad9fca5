"""Live samples through NVML: units, what may not be read, faults, and a library that goes away."""

from __future__ import annotations

import threading
import time

import pynvml
import pytest
from tests.fakes.nvml import GB, UUID, FakeNvml

from dragoman_agent.pal.live_nvml import NvmlSource, nvml_uuid
from dragoman_agent.pal.live_source import DeviceLostError, SourceGoneError, load_nvml


@pytest.fixture
def fake() -> FakeNvml:
    return FakeNvml()


def opened(fake: FakeNvml, *own: int) -> NvmlSource:
    source = NvmlSource(lambda: fake, UUID, lambda: own)
    source.open()
    return source


def test_a_sample_is_in_base_units(fake: FakeNvml) -> None:
    fake.change(processes=[[7, 50 * GB], [8, 9 * GB]], reasons=FakeNvml.HW_THERMAL | FakeNvml.POWER_CAP)
    sample = opened(fake, 7).sample()
    assert (sample.clock_hertz, sample.memory_clock_hertz) == (1.98e9, 3.201e9)
    assert (sample.power_watts, sample.power_limit_watts) == (300, 700)
    assert (sample.temperature_celsius, sample.slowdown_celsius) == (45, 89)
    assert (sample.link_generation, sample.link_width) == (5, 16)
    assert sample.link_bytes_per_second == pytest.approx(63e9, rel=0.01)
    assert (sample.receive_bytes_per_second, sample.send_bytes_per_second) == (2e6, 1e6)
    assert (sample.total_memory_bytes, sample.free_memory_bytes) == (141 * GB, 81 * GB)
    assert sample.foreign_memory_bytes == 10 * GB, "60 used, 50 of them ours"
    assert sample.reasons == {"hw-thermal-slowdown", "power-cap"} and sample.missing == ()


def test_where_our_process_is_not_shown_only_growth_counts_as_others(fake: FakeNvml) -> None:
    source = opened(fake, 7)
    assert source.sample().foreign_memory_bytes == 0
    fake.change(used=80 * GB)
    assert source.sample().foreign_memory_bytes == 20 * GB


def test_a_counter_without_permission_is_named_once_and_not_asked_again(fake: FakeNvml) -> None:
    fake.change(errors={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION})
    source = opened(fake)
    for _ in range(3):
        sample = source.sample()
    assert sample.power_watts is None and sample.clock_hertz == 1.98e9
    assert sample.missing == (("power", "Insufficient Permissions"),)
    assert fake.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_an_answer_that_failed_once_is_asked_again(fake: FakeNvml) -> None:
    source = opened(fake)
    fake.change(errors={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_UNKNOWN})
    assert source.sample().power_watts is None
    fake.change(errors={})
    assert source.sample().power_watts == 300


def test_nvml_that_vanishes_is_told_and_can_be_opened_again(fake: FakeNvml) -> None:
    source = opened(fake)
    fake.change(errors={"*": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    with pytest.raises(SourceGoneError, match="Driver Not Loaded"):
        source.sample()
    source.close()
    with pytest.raises(SourceGoneError):
        source.open()
    fake.change(errors={})
    source.open()
    assert source.sample().clock_hertz == 1.98e9


def test_a_gpu_that_is_lost_is_not_the_library_being_gone(fake: FakeNvml) -> None:
    source = opened(fake)
    fake.change(errors={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST})
    with pytest.raises(DeviceLostError, match="GPU is lost"):
        source.sample()


def test_a_device_that_nvml_does_not_know(fake: FakeNvml) -> None:
    fake.change(errors={"nvmlDeviceGetHandleByUUID": pynvml.NVML_ERROR_NOT_FOUND})
    with pytest.raises(SourceGoneError, match="Not Found"):
        opened(fake)


def test_faults_that_came_are_returned_at_once_and_once(fake: FakeNvml) -> None:
    source = opened(fake)
    assert source.wait(0.0) == []
    threading.Timer(0.05, lambda: fake.change(xids=[48, 63])).start()
    begun = time.monotonic()
    assert source.wait(5.0) == [48, 63] and time.monotonic() - begun < 4
    assert source.wait(0.0) == []


def test_without_fault_events_waiting_is_only_waiting(fake: FakeNvml) -> None:
    fake.change(errors={"nvmlEventSetCreate": pynvml.NVML_ERROR_NOT_SUPPORTED})
    source = opened(fake)
    assert source.wait(0.0) == []
    assert ("faults (Xid)", "Not Supported") in source.sample().missing


def test_closing_twice_frees_once(fake: FakeNvml) -> None:
    source = opened(fake)
    source.close()
    source.close()
    assert fake.calls.count("nvmlEventSetFree") == fake.calls.count("nvmlShutdown") == 1 and fake.num_open == 0


def test_uuids_are_spelt_as_nvml_spells_them() -> None:
    assert nvml_uuid("00112233445566778899aabbccddeeff") == UUID
    assert nvml_uuid(UUID) == UUID and nvml_uuid("MIG-x") == "MIG-x" and nvml_uuid("odd") == "odd"


def test_a_module_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(SourceGoneError, match=r"no_such_nvml.*pip install .*'dragoman\[agent\]'$"):
        load_nvml("no_such_nvml")
    assert load_nvml() is pynvml
