"""Bringing blocks back or computing them again: the number that saves the most time, from rates as measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.cache.tier_choice import MEMORY_SECONDS, TierName, TierRate, num_worth_bringing

BLOCK_BYTES, BLOCK_TOKENS = 1000, 64


def prefill(tokens: float) -> float:
    """1,000 tokens a second, at least 10 ms."""
    return max(0.01, tokens / 1000) if tokens else 0.0


def worth(tiers: list[TierName], host: float, disk: float, num_tail: int = 1) -> int:
    return num_worth_bringing(tiers, {"host": host, "disk": disk}, BLOCK_BYTES, BLOCK_TOKENS, num_tail, prefill)


@pytest.mark.parametrize(
    ("tiers", "host", "disk", "expected"),
    [
        ("hhhh", 1e6, 0.0, 4),  # 1 ms a block against 64 ms
        ("hhhh", 1e4, 0.0, 0),  # 100 ms a block
        ("hhdd", 1e6, 1e4, 2),  # the disk is slower than computing
        ("hhdd", 1e4, 1e6, 4),  # two slow blocks open the way to two quick ones: 202 ms for what takes 256 ms
        ("dddd", 1e6, 0.0, 4),  # a rate that is not known is tried
        ("h", 1e6, 1e6, 1),
        ("", 1e6, 1e6, 0),
    ],
)
def test_the_run_that_saves_most(tiers: str, host: float, disk: float, expected: int) -> None:
    names: list[TierName] = ["host" if letter == "h" else "disk" for letter in tiers]
    assert worth(names, host, disk) == expected


def test_what_computing_takes_at_least_is_not_saved() -> None:
    assert num_worth_bringing(["host"], {"host": 1e6}, BLOCK_BYTES, 4, 1, prefill) == 0, "10 ms with it and without it"


@given(
    st.lists(st.sampled_from(["host", "disk"]), max_size=12),
    st.floats(1e2, 1e7),
    st.floats(1e2, 1e7),
    st.integers(1, 300),
)
def test_never_slower_than_computing(tiers: list[TierName], host: float, disk: float, num_tail: int) -> None:
    count = worth(tiers, host, disk, num_tail)
    rates = {"host": host, "disk": disk}
    moved = sum(BLOCK_BYTES / rates[tier] for tier in tiers[:count])
    left = prefill((len(tiers) - count) * BLOCK_TOKENS + num_tail)
    assert moved + left <= prefill(len(tiers) * BLOCK_TOKENS + num_tail) + 1e-9


def test_a_rate_is_planned_then_measured_then_tried_again() -> None:
    rate = TierRate(planned=5.0)
    assert rate.at(0.0) == 5.0
    rate.learn(100, 1.0, 10.0)
    assert rate.at(11.0) == 100.0
    rate.learn(200, 1.0, 12.0)
    assert 100.0 < rate.at(12.0) < 200.0
    rate.learn(0, 1.0, 13.0)
    assert rate.at(12.0 + MEMORY_SECONDS) == 5.0, "a busy moment is not held against a tier for ever"
