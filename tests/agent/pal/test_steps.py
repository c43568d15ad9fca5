"""A failed probe shows in the log where it stopped."""

from __future__ import annotations

import logging

import pytest

from dragoman_agent.pal.steps import probe_step


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "dragoman.probe"]


def test_start_and_end_with_the_outcome(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), probe_step("nvml") as step:
        step.outcome = "12 values"
    first, last = lines(caplog)
    assert first == "step nvml: start"
    assert last.startswith("step nvml: end, 0.")
    assert last.endswith(" s, 12 values")


def test_an_error_ends_the_step_with_its_words_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(OSError, match="gone"), probe_step("driver"):
        raise OSError("gone")
    assert lines(caplog)[-1].endswith("s: OSError: gone")
    assert "step driver: failed after 0." in lines(caplog)[-1]


def test_nothing_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), probe_step("cpu"):
        pass
    assert lines(caplog) == []
