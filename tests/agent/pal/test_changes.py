"""The cheapest changes: each one alone makes the model fit, in order of what the user gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.pal.changes import (
    Holder,
    MemoryNeed,
    ModelSize,
    Options,
    Part,
    WeightFormat,
    cheapest_changes,
    describe_changes,
)

GIB = 1 << 30
EIGHT_B = MemoryNeed(
    "qwen3-8b",
    (
        Part("weights", 15 * GIB, ("weights",)),
        Part("kv", 6 * GIB, ("context",)),
        Part("workspace", GIB, ("sequences",)),
        Part("context", GIB),
    ),
    context_tokens=40960,
    num_seqs=256,
    utilization=0.9,
    kv_token_bytes=147456,
)
SMALL = Options(
    models=(ModelSize("qwen3-0.6b", int(1.2e9), 114688), ModelSize("llama-3.2-1b", int(2.5e9), 32768)),
    formats=(WeightFormat("fp8", 8 * GIB, "--weights fp8"),),
)


def test_what_fits_needs_no_change() -> None:
    assert cheapest_changes(EIGHT_B, 26 * GIB) == ()


def test_a_little_too_much_is_cured_by_the_reserve_then_fewer_tokens() -> None:
    changes = cheapest_changes(EIGHT_B, 25 * GIB, SMALL)  # 23 needed, 22.5 may be used
    assert [change.text for change in changes] == [
        "--max-context 37376 instead of 40960 tokens (saves 0.52 GiB)",
        "--memory-utilization 0.93 instead of 0.90 of the 25.00 GiB free",
        "--max-num-seqs 128 instead of 256 (saves 0.50 GiB)",
    ]
    assert [change.cost for change in changes] == sorted(change.cost for change in changes)


def test_who_holds_the_memory_is_named_with_the_amount() -> None:
    holders = (Holder(41, "small", GIB), Holder(42, "python3 train.py", 9 * GIB))
    changes = cheapest_changes(EIGHT_B, 17 * GIB, Options(holders=holders))
    assert "9.00 GiB by pid 42 (python3 train.py)" in changes[0].text
    assert "pid 41" not in changes[0].text, "the smaller one alone is not in the way"


def test_weights_too_large_by_far_take_another_format_or_model() -> None:
    changes = cheapest_changes(EIGHT_B, 18 * GIB, SMALL)
    assert [change.text.split(":")[0] for change in changes[:2]] == ["weights in fp8", "a smaller model"]
    assert "llama-3.2-1b" in changes[1].text, "the largest that fits is the least loss"


def test_where_no_single_change_suffices_two_are_named_together() -> None:
    changes = cheapest_changes(EIGHT_B, 18 * GIB)  # 16.2 may be used, weights and context take 16
    assert len(changes) == 3
    assert " and " in changes[0].text
    assert changes[-1].text == "a device with 25.56 GiB free" or " and " in changes[-1].text


def test_where_nothing_helps_the_size_of_the_device_is_named() -> None:
    changes = cheapest_changes(EIGHT_B, GIB)
    assert [change.text for change in changes] == ["a device with 25.56 GiB free"]
    assert describe_changes(changes) == "a device with 25.56 GiB free"


def test_numbered_when_there_are_several() -> None:
    assert describe_changes(cheapest_changes(EIGHT_B, 25 * GIB)).startswith("1) --max-context 37376")


@given(
    weights=st.integers(1, 200 * GIB),
    kv=st.integers(0, 100 * GIB),
    per_seq=st.integers(0, 10 * GIB),
    fixed=st.integers(0, 4 * GIB),
    context=st.integers(1, 1 << 20),
    seqs=st.integers(1, 4096),
    share=st.floats(0.01, 1.0),
    free=st.integers(0, 300 * GIB),
    held=st.lists(st.integers(0, 80 * GIB), max_size=3),
)
def test_every_change_makes_it_fit_and_they_come_cheapest_first(
    weights: int, kv: int, per_seq: int, fixed: int, context: int, seqs: int, share: float, free: int, held: list[int]
) -> None:
    parts = (
        Part("weights", weights, ("weights",)),
        Part("kv", kv, ("context", "sequences")),
        Part("workspace", per_seq, ("sequences",)),
        Part("context", fixed),
    )
    need = MemoryNeed("m", parts, context, seqs, share, 1000)
    options = Options(SMALL.formats, SMALL.models, tuple(Holder(i + 1, "p", size) for i, size in enumerate(held)))
    changes = cheapest_changes(need, free, options)
    assert bool(changes) == (need.total_bytes > int(free * share))
    assert len(changes) <= 3
    for change in changes:
        assert change.need_bytes <= change.budget_bytes
        assert change.text
    assert [change.cost for change in changes] == sorted(change.cost for change in changes)
    assert cheapest_changes(need, free, options) == changes


def test_ways_come_before_more_of_the_same_way() -> None:
    texts = [change.text for change in cheapest_changes(EIGHT_B, 18 * GIB, SMALL)]
    assert [text.split(":")[0] for text in texts[:2]] == ["weights in fp8", "a smaller model"]
    assert texts[2].startswith("--memory-utilization 0.95")
    alone = Options(models=SMALL.models)
    texts = [change.text for change in cheapest_changes(EIGHT_B, 9 * GIB, alone)]
    assert texts[0].startswith("a smaller model: llama-3.2-1b")
    assert texts[1].startswith("a smaller model: qwen3-0.6b")
    assert texts[2] == "a device with 25.56 GiB free"
    assert not any(" and " in text for text in texts), "a second change beside one that suffices is no change"


def test_a_pair_that_costs_less_comes_before_a_single_change() -> None:
    texts = [change.text for change in cheapest_changes(EIGHT_B, 24 * GIB, Options(models=SMALL.models))]
    assert " and " in texts[1]
    assert texts[2].startswith("a smaller model")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_limit(limit: int) -> None:
    assert len(cheapest_changes(EIGHT_B, 18 * GIB, SMALL, limit=limit)) == limit
