"""Numbers with their units as a person reads them."""

from __future__ import annotations

import pytest

from dragoman_agent.pal.profile import Value
from dragoman_agent.pal.words import quantity, value_text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.5 s"),
        (0.0019, "s", "1.9 ms"),
        (4.07e-7, "s", "407 ns"),
        (0.0, "s", "0 s"),
        (5 << 30, "bytes", "5.0 GiB"),
        (4.614e12, "bytes/s", "4.61 TB/s"),
        (7.77e14, "flop/s", "777 TFLOP/s"),
        (12.0, "bytes/s", "12 B/s"),
        (4096, "tokens", "4,096 tokens"),
        (8, "", "8"),
        (0.125, "", "0.125"),
        (1234.5, "tokens/s", "1234 tokens/s"),
    ],
)
def test_quantities_read_well(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value(True, "", "reported"), "yes"),
        (Value("9.0", "", "reported"), "9.0"),
        (Value(62_914_560, "bytes", "reported"), "60.0 MiB"),
        (Value((1e9, 2e9), "bytes/s", "measured", labels=("64", "128")), "64: 1 GB/s, 128: 2 GB/s"),
        (Value((1.0,), "s", "measured"), "1 s"),
        (Value(1.98e9, "Hz", "reported"), "1.98 GHz"),
        (Value(1e-7, "s", "derived", note="an upper bound: below what was resolved (100 ns); x"), "at most 100 ns"),
        (Value(37.0, "celsius", "reported"), "37 celsius"),
    ],
)
def test_values_of_a_profile_read_well(value: Value, text: str) -> None:
    assert value_text(value) == text
