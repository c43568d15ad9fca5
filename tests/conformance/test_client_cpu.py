"""The figures of benchmarks/clients.py: what is a sample, and what is recorded of several."""

from __future__ import annotations

import pytest
from benchmarks.clients import BARS, PREDICTED, Sample, records, sample_of


def test_a_round_without_all_its_tokens_is_no_sample() -> None:
    value = {"tokens": 100, "items": 50, "cpu_seconds": 0.001, "wall_seconds": 1.0}
    assert sample_of(value, 100) == Sample(microseconds=pytest.approx(10.0), tokens_per_item=2.0)
    with pytest.raises(ValueError, match="99 of 100"):
        sample_of({**value, "tokens": 99}, 100)


def test_the_ratio_is_taken_within_a_round() -> None:
    samples = {
        "bare": [Sample(50.0, 1.0), Sample(100.0, 1.0), Sample(60.0, 1.0)],
        "go": [Sample(10.0, 1.0), Sample(20.0, 1.0), Sample(18.0, 1.0)],
    }
    (record,) = records(samples, "python -m benchmarks.clients --record")
    assert (record["bench"], record["case"], record["metric"]) == ("token_cpu", "go", "ratio_to_python")
    assert record["samples"] == pytest.approx([0.2, 0.2, 0.3])
    assert record["value"] == pytest.approx(0.2)


def test_every_language_has_a_bar_and_a_prediction() -> None:
    assert set(BARS) == set(PREDICTED)
