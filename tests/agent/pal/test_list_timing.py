"""What is timed to choose work lists of decode attention: which launches, of which batches, with which contexts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import tuned
from dragoman_agent.pal.list_timing import (
    EVEN,
    LAYOUTS,
    LONG,
    MIN_TILES,
    SPREAD,
    ListCase,
    list_batches,
    list_items,
    list_lens,
)
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.planner_cuda import wanted_lists
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuning import Case

MODEL = "qwen3-0.6b"
TIMED = (8, 16, 32, 64, 128, 256)  # of 256 sequences


def test_each_planned_launch_is_asked_for_with_and_without_a_list(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    here, model = card(), shapes(MODEL)
    cases = wanted_lists(here, model, Limits(), Switches(), Timings(here.fingerprint, "k"))
    plan, _ = plan_for(here, model, Limits(), Switches())
    assert plan.max_num_seqs == 256 and len({case.key for case in cases}) == len(cases) == 72
    assert {tuple(case.shape[name] for name in ("batch", "layout", "items")) for case in cases} == {
        (batch, layout, items) for batch in TIMED for layout in LAYOUTS for items in (0, *list_items(batch))
    }
    for case in cases:
        launch = plan.decode_for(case.shape["batch"])
        assert {**case.config, "max_batch": launch.max_batch} == dataclasses.asdict(launch)
        assert (case.shape["context"], case.shape["longest"]) == (1024, 16384)
        assert (case.shape["page_size"], case.shape["min_tiles"]) == (plan.page_size, MIN_TILES)
        assert case.shape["layers"] == model.num_layers and len(list_lens(case.shape)) == case.shape["batch"]
    for bounds in (Limits(deterministic=True), Limits(kv_dtype="fp8"), Limits(max_num_seqs=7)):
        assert wanted_lists(here, model, bounds, Switches(), Timings(here.fingerprint, "k")) == []


@pytest.mark.parametrize(
    ("most", "ranges"),
    [
        (7, []),
        (8, [(5, 8)]),
        (9, [(5, 8), (9, 9)]),
        (100, [(5, 8), (9, 16), (17, 32), (33, 64), (65, 100)]),
        (256, [(5, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256)]),
        (1024, [(5, 8), (9, 16), (33, 64), (65, 128), (257, 512), (513, 1024)]),
        (2000, [(5, 8), (9, 16), (33, 64), (65, 128), (257, 512), (513, 1024)]),
    ],
)
def test_the_ranges_of_batches_that_are_timed(most: int, ranges: list[tuple[int, int]]) -> None:
    assert list_batches(most) == ranges


def test_there_is_room_for_more_items_than_sequences_and_most_where_those_are_few() -> None:
    assert list_items(8) == (12, 16, 32)
    assert list_items(9) == (14, 18, 36)
    assert list_items(16) == (24, 32, 64)
    assert list_items(17) == (22, 26, 34)
    assert list_items(256) == (320, 384, 512)
    assert all(batch < min(list_items(batch)) for batch in range(1, 1025))


def test_a_model_of_short_contexts_has_no_cases_and_says_why(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    for longest, words in ((1024, "contexts of 1024 tokens at most"), (100, "contexts of 100 tokens at most")):
        model = dataclasses.replace(shapes(MODEL), max_context_tokens=longest)
        assert wanted_lists(card(), model, Limits(), Switches(), Timings("print", "k")) == []
        plan, decisions = plan_for(card(), model, Limits(), Switches(), Timings(card().fingerprint, "k"))
        (decision,) = [one for one in decisions if one.subject == "decode-work-list"]
        assert plan.decode_lists == () and words in decision.reason
    model = dataclasses.replace(shapes(MODEL), max_context_tokens=2048)
    cases = wanted_lists(card(), model, Limits(), Switches(), Timings("print", "k"))
    assert len(cases) == 72 and {case.shape["longest"] for case in cases} == {2048}


def test_a_case_has_the_same_name_whichever_plan_asks_and_another_for_other_work(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    def cases(model: ModelConfig, **limits: int) -> list[ListCase]:
        return wanted_lists(card(), model, Limits(**limits), Switches(), Timings("print", "k"))

    model = shapes(MODEL)
    all_keys = {case.key for case in cases(model)}
    few = {case.key for case in cases(model, max_num_seqs=32)}
    assert few < all_keys
    assert all(key.startswith("decode-list/h16-k8-d128-p64/b") for key in all_keys)
    for changes in ({"num_layers": 3}, {"num_heads": 32}, {"max_context_tokens": 4096}):
        assert not all_keys & {case.key for case in cases(dataclasses.replace(model, **changes))}, changes


def test_tuning_times_lists_beside_groups_once_kernels_are_known(
    card: Callable[..., Profile],
    shapes: Callable[[str], ModelConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[set[str]] = []

    def fake(cases: list[Case], held: Timings, *_: object) -> Timings:
        rounds.append({case.kind for case in cases if not held.knows(case.key)})
        return held.with_seconds({case.key: 1e-5 for case in cases})

    monkeypatch.setattr(tuned, "tune", fake)
    here = card()
    tuned.tune_all(here, [shapes(MODEL)], Limits(), Switches(), Timings(here.fingerprint, "k"), tmp_path, 0, print)
    assert "decode-list" not in rounds[0]
    assert any({"decode-list", "decode-grouped"} <= kinds for kinds in rounds)


# The contexts that are timed.

SHAPE = {"batch": 32, "context": 1024, "longest": 16384}


def test_contexts_alike_with_a_long_one_and_spread() -> None:
    assert list_lens({**SHAPE, "layout": EVEN}) == [1024] * 32
    long = list_lens({**SHAPE, "layout": LONG})
    assert long[16] == 16384 and [*long[:16], *long[17:]] == [1024] * 31
    spread = list_lens({**SHAPE, "layout": SPREAD})
    assert (min(spread), max(spread), len(set(spread))) == (256, 4096, 32)
    assert spread not in (sorted(spread), sorted(spread, reverse=True)), (
        "a list that needs an order would be timed too well"
    )
    steps_between = {
        round(after / before, 2) for before, after in zip(sorted(spread), sorted(spread)[1:], strict=False)
    }
    assert all(1.08 <= step <= 1.11 for step in steps_between)
    assert max(list_lens({**SHAPE, "longest": 2048, "layout": SPREAD})) == 2048


@given(st.integers(1, 1100), st.integers(1, 2000), st.integers(0, 30000), st.sampled_from(LAYOUTS))
def test_there_is_a_context_for_each_sequence_within_bounds(batch: int, context: int, more: int, layout: int) -> None:
    shape = {"batch": batch, "context": context, "longest": context + more, "layout": layout}
    lens = list_lens(shape)
    assert len(lens) == batch and all(1 <= each <= context + more for each in lens)
    assert lens == list_lens(shape)
    if layout == LONG:
        assert lens[batch // 2] == context + more and sum(lens) == batch * context + more
    if layout == SPREAD:
        low, high = max(context // 4, 1), min(4 * context, context + more)
        assert min(lens) == low and (batch == 1 or max(lens) == high)
