"""The CPU's own measurements, really taken: every value is there, plausible, and of a form that a profile takes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from tests.needs import skip_without

from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.pal import microbench
from dragoman_agent.pal.microbench import measure_cpu, thread_counts
from dragoman_agent.pal.profile_schema import check_labels, check_spread, check_value
from dragoman_kernels.cpu.build import KernelBuildError, available, is_built


@pytest.mark.parametrize(("num_threads", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_thread_counts(num_threads: int, counts: list[int]) -> None:
    assert thread_counts(num_threads) == counts


def test_a_quick_measurement_has_what_a_plan_needs_and_builds_nothing(tmp_path: Path) -> None:
    values = measure_cpu(2, tmp_path)
    assert set(values) == {
        "memory.read_bandwidth",
        "memory.copy_bandwidth",
        "compute.matmul_float32",
        "scheduling.thread_handover",
    }
    for name, value in values.items():
        check_value(name, value.value, value.unit, value.provenance)
        check_spread(name, value.spread)
        assert value.provenance == "measured" and value.spread is not None
    assert not list(tmp_path.iterdir())
    # Wide enough for any machine: a factor of bytes for bits, or of threads, would leave it.
    assert 1e8 < float(str(values["memory.read_bandwidth"].value)) < 1e13
    assert 1e8 < float(str(values["compute.matmul_float32"].value)) < 1e14
    assert 1e-8 < float(str(values["scheduling.thread_handover"].value)) < 1e-2


def test_a_full_measurement_adds_the_compiled_product_and_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if problem := available():
        skip_without("g++", problem)
    cache = default_cache_dir(os.environ)  # where every CPU device's kernels are, so that they are built once a machine
    monkeypatch.setattr(microbench, "_STREAM_BYTES", 4 << 20)  # what is tested is not the rate
    with caplog.at_level(logging.DEBUG):
        values = measure_cpu(2, cache, full=True)
    steps = [record.message for record in caplog.records if record.message.startswith("probe: step")]
    assert steps == [f"probe: step cpu.{name}" for name in ("streams", "products", "compiled", "threads")]
    assert is_built(cache)
    for name in ("memory.read_by_threads", "memory.copy_by_threads", "compute.matmul_int8_by_threads"):
        assert values[name].labels == ("1", "2")
        check_labels(name, values[name].labels, values[name].value)
    assert 1e8 < float(str(values["compute.matmul_int8"].value)) < 1e15
    assert "compute.matmul_int8" in measure_cpu(2, cache)  # built by now, so a quick one has it too


def test_without_a_compiler_the_product_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise KernelBuildError("The CPU kernels cannot be built: no C++ compiler.")

    monkeypatch.setattr(microbench, "_STREAM_BYTES", 4 << 20)
    monkeypatch.setattr(microbench, "LlamaStep", refuse)
    values = measure_cpu(1, tmp_path, full=True)
    assert "compute.matmul_int8" not in values and "memory.read_by_threads" in values
    assert (
        "the int8 product of the CPU was not measured: The CPU kernels cannot be built: no C++ compiler." in caplog.text
    )
