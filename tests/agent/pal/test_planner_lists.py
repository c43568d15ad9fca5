"""Which batches have their contexts cut by a work list: those that were timed to gain, with the reason where none is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.list_timing import EVEN, LONG, MIN_TILES, SPREAD, list_cases
from dragoman_agent.pal.plan import DecodeList, Plan
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.planner_cuda import wanted_groups, wanted_lists
from dragoman_agent.pal.planner_lists import choose_lists
from dragoman_agent.pal.planner_memory import workspace_bytes
from dragoman_agent.pal.profile import Profile, Value
from dragoman_agent.pal.timings import Timings

Seconds = Callable[[int, int, int], float | None]  # of a batch, layout and number of items, 0 without; None: not timed
Planned = tuple[Plan, Decision]
MODEL = "qwen3-0.6b"
ITEMS = {8: 12, 16: 24, 32: 40, 64: 80, 128: 160, 256: 320}  # the smallest number that is timed


@pytest.fixture
def planned(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> Callable[..., Planned]:
    """A plan from times of work lists alone, and of short groups where `groups` says from which batch on they gain."""
    model, here = shapes(MODEL), card()

    def make(seconds: Seconds, switches: Switches | None = None, groups: int = 0, **limits: object) -> Planned:
        bounds, nothing = Limits(**limits), Timings(here.fingerprint, "k")  # type: ignore[arg-type]
        found: dict[str, float] = {}
        for case in wanted_lists(here, model, Limits(), Switches(), nothing):
            known = seconds(case.shape["batch"], case.shape["layout"], case.shape["items"])
            found |= {} if known is None else {case.key: known}
        if groups:
            for case in wanted_groups(here, model, Limits(), Switches(), nothing):
                gains = case.shape["batch"] == groups and case.shape["rows"] > 1
                found[case.key] = 8e-6 if gains else 1e-5
        plan, decisions = plan_for(here, model, bounds, switches or Switches(), nothing.with_seconds(found))
        return plan, next(one for one in decisions if one.subject == "decode-work-list")

    return make


def is_few(batch: int, items: int) -> bool:
    return items == ITEMS[batch]


def gaining(batch: int, layout: int, items: int) -> float:
    """At 32 more items are best, at 16 and 128 fewest; at 8, 64 and 256 nothing gains."""
    if layout == EVEN or items == 0 or batch in (8, 64, 256):
        return {EVEN: 1e-5, LONG: 4e-5, SPREAD: 2e-5}[layout]
    is_best = is_few(batch, items) == (batch != 32)
    return {LONG: 2e-5 if is_best else 3e-5, SPREAD: 1.5e-5}[layout]


def steps(even: float, long: float, spread: float) -> Seconds:
    """So much of the launch's time by any list."""
    return lambda batch, layout, items: (1.0, (even, long, spread)[layout])[items > 0]


# The choice.


def test_batches_where_it_was_quicker_get_their_number_of_items(planned: Callable[..., Planned]) -> None:
    plan, decision = planned(gaining)
    assert plan.decode_lists == (
        DecodeList(9, 16, 24, MIN_TILES), DecodeList(17, 32, 48, MIN_TILES), DecodeList(65, 128, 160, MIN_TILES),
    )  # fmt: skip
    for batch, index in ((8, None), (9, 0), (16, 0), (17, 1), (32, 1), (33, None), (65, 2), (128, 2), (129, None)):
        assert plan.list_for(batch) is (None if index is None else plan.decode_lists[index])
    assert decision.chosen.startswith("24 items from 9 to 16 sequences, 48 items from 17 to 32")
    assert "at 32 with 48 items alike 10.0 us by a list and 10.0 without" in decision.reason
    assert (
        "one long 20.0 us by a list and 40.0 without, spread 15.0 us by a list and 20.0 without, +37.5%"
        in decision.reason
    )
    assert "at 256 with 320 items" in decision.reason and "(under the 2% that count)" in decision.reason
    assert "not timed" not in decision.reason
    assert (decision.predicted, decision.unit) == (2e-5, "s") and len(decision.candidates) == 24
    chosen = {one.name: one.predicted for one in decision.candidates if not one.rejected_because}
    assert set(chosen) == {
        "no list at 8", "24 items at 16", "48 items at 32", "no list at 64", "160 items at 128", "no list at 256",
    }  # fmt: skip
    assert chosen["48 items at 32"] == pytest.approx(1.5e-5) and chosen["no list at 8"] == pytest.approx(7e-5 / 3)
    shown = next(field for field in plan_fields(plan) if field.name == "decode_lists")
    assert shown.value == (24, 48, 160) and shown.labels == ("9-16", "17-32", "65-128")
    assert (shown.subject, shown.unit) == ("decode-work-list", "items")


def test_lists_make_other_tokens_and_go_to_the_engine(planned: Callable[..., Planned]) -> None:
    plan, _ = planned(gaining)
    plain, _ = planned(lambda batch, layout, items: None)
    assert plan.digest() != plain.digest(), "parts of other lengths are summed in another order"
    assert dataclasses.replace(plan, decode_lists=()).digest() == plain.digest()
    config = EngineConfig("cuda", f"random:{MODEL}", plan)
    assert EngineConfig.from_json(json.dumps(json.loads(config.to_json()))) == config


@pytest.mark.parametrize(
    ("seconds", "is_used"),
    [
        (steps(1.019, 0.9, 0.9), True),
        (steps(1.022, 0.9, 0.9), False),
        (steps(0.9, 0.979, 0.979), True),
        (steps(0.9, 0.981, 0.981), False),
        (steps(1.0, 0.5, 1.3), True),  # the mean counts
        (steps(1.0, 0.5, 1.5), False),
    ],
)
def test_one_percent_of_a_step_may_be_lost_and_two_of_attention_must_be_gained(
    card: Callable[..., Profile], shapes: Callable[[str], ModelConfig], seconds: Seconds, is_used: bool
) -> None:
    """Attention of a layer of contexts alike takes a second without a list, the rest of the layer another."""
    here, model = card(), shapes(MODEL)
    asked: list[tuple[int, int]] = []

    def step_seconds(batch: int, context: int) -> float:
        asked.append((batch, context))
        return 2.0 * model.num_layers

    plan, _ = plan_for(here, model, Limits(), Switches())
    times = {
        case.key: seconds(case.shape["batch"], case.shape["layout"], case.shape["items"])
        for case in list_cases(model, plan.page_size, plan.decode_attention, 256)
    }
    timings = Timings(here.fingerprint, "k", {key: found for key, found in times.items() if found is not None})
    lists, decision = choose_lists(
        here, model, plan.page_size, plan.decode_attention, 256, (), timings, step_seconds, None
    )
    assert bool(lists) == is_used == (decision.chosen != "none")
    assert not is_used or len(lists) == 6
    assert asked == [(batch, 1024) for batch in ITEMS]
    assert is_used or "takes 1.1% longer, and 1% is allowed" in decision.reason or "under the 2%" in decision.reason


def test_more_items_that_gain_more_but_cost_too_much_leave_those_that_may_be_used(
    planned: Callable[..., Planned],
) -> None:
    def seconds(batch: int, layout: int, items: int) -> float:
        few = steps(1.0, 0.8, 0.8) if items <= ITEMS[batch] else steps(1.05, 0.5, 0.5)
        return few(batch, layout, items) or 0.0

    plan, decision = planned(seconds)
    assert [one.num_items for one in plan.decode_lists] == list(ITEMS.values())
    (refused,) = [one for one in decision.candidates if one.name == "32 items at 8"]
    assert "a step of contexts alike takes" in refused.rejected_because


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (
            lambda batch, layout, items: None,
            "not timed on this device, which --tune now does; each context is cut into",
        ),
        (lambda batch, layout, items: 1.0 if items else None, "not timed on this device"),
        (lambda batch, layout, items: None if items else 1.0, "not timed on this device"),
        (lambda batch, layout, items: None if layout == SPREAD else 1.0, "not timed on this device"),
        # No number of items is known of all three.
        (
            lambda batch, layout, items: None if items and is_few(batch, items) == (layout == LONG) else 1.0,
            "not timed on this device",
        ),
        (steps(1.0, 1.3, 1.3), "-30.0% where contexts differ (under the 2% that count)"),
        (steps(1.05, 0.5, 0.5), "(but a step of contexts alike takes"),
    ],
)
def test_without_a_timed_gain_there_is_none(planned: Callable[..., Planned], seconds: Seconds, words: str) -> None:
    plan, decision = planned(seconds)
    assert plan.decode_lists == () and decision.chosen == "none" and words in decision.reason
    assert decision.predicted is None


def test_a_batch_whose_times_failed_has_none_and_is_named(planned: Callable[..., Planned]) -> None:
    def seconds(batch: int, layout: int, items: int) -> float | None:
        return None if batch in (8, 256) else steps(1.0, 0.5, 0.5)(batch, layout, items)

    plan, decision = planned(seconds)
    assert [one.max_batch for one in plan.decode_lists] == [16, 32, 64, 128]
    assert decision.reason.endswith("; not timed and without a list: 5 to 8, 129 to 256 sequences")


def test_of_one_number_of_items_that_was_timed_the_other_is_not_missed(planned: Callable[..., Planned]) -> None:
    def seconds(batch: int, layout: int, items: int) -> float | None:
        return None if items > ITEMS[batch] else steps(1.0, 0.5, 0.5)(batch, layout, items)

    plan, _ = planned(seconds)
    assert [one.num_items for one in plan.decode_lists] == list(ITEMS.values())


@pytest.mark.parametrize(
    ("grouped_from", "ranges", "not_chosen"),
    [
        (
            128,
            [(5, 8), (9, 16), (17, 32)],
            "no list at 128",
        ),  # to 255: also of the bucket that ends at 256 but its last
        (64, [(5, 8), (9, 16), (17, 32)], ""),
    ],
)
def test_batches_whose_short_sequences_share_programs_get_none(
    planned: Callable[..., Planned], grouped_from: int, ranges: list[tuple[int, int]], not_chosen: str
) -> None:
    plan, decision = planned(steps(1.0, 0.5, 0.5), groups=grouped_from)
    (groups,) = plan.short_groups
    assert groups.min_batch == grouped_from
    for batch in range(1, plan.max_num_seqs + 1):
        assert plan.list_for(batch) is None or plan.groups_for(batch) is None
        inside = groups.min_batch <= batch <= groups.max_batch
        assert not inside or plan.list_for(batch) is None
    assert [(one.min_batch, one.max_batch) for one in plan.decode_lists][:3] == ranges
    assert plan.list_for(256) is not None and plan.list_for(groups.max_batch + 1) is not None
    if not_chosen:
        (told,) = [one for one in decision.candidates if one.name == not_chosen]
        (other,) = [one for one in decision.candidates if one.name == "160 items at 128"]
        assert not told.rejected_because and "short sequences share programs there" in other.rejected_because
        assert "+50.0% where contexts differ (short sequences share programs there)" in decision.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"kv_dtype": "fp8"}, "eight bits, for which no work list was timed"),
        ({"max_num_seqs": 7}, "at most 7 sequences run at once"),
        ({"switches": Switches(launch_tuning=False)}, "switched off by --pal-launch-tuning off"),
        ({"switches": Switches.off()}, "switched off by --pal off"),
    ],
)
def test_where_it_is_out_of_the_question_the_decision_says_why(
    planned: Callable[..., Planned], changes: dict[str, object], words: str
) -> None:
    plan, decision = planned(gaining, **changes)
    assert plan.decode_lists == () and decision.chosen == "none" and words in decision.reason


def test_a_card_of_another_maker_has_none(card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]) -> None:
    held = card({"compute.warp_size": 64})
    held = dataclasses.replace(held, device=dataclasses.replace(held.device, kind="hip"))
    plan, decisions = plan_for(
        held.with_values({"compute.warp_size": Value(64, "", "reported")}), shapes(MODEL), Limits(), Switches()
    )
    (decision,) = [one for one in decisions if one.subject == "decode-work-list"]
    assert plan.decode_lists == () and "no kernel was ever timed on a hip device" in decision.reason


# What it takes.


def test_the_workspace_grows_by_the_list_and_by_parts_beyond_those_of_launches(
    planned: Callable[..., Planned], shapes: Callable[[str], ModelConfig]
) -> None:
    plan, model = planned(gaining)[0], shapes(MODEL)
    seqs = plan.max_num_seqs

    def size(*num_items: int) -> int:
        lists = tuple(DecodeList(1, 1, num, MIN_TILES) for num in num_items)
        return workspace_bytes(
            model, plan.decode_attention, plan.max_batch_tokens, seqs, plan.max_context_tokens, plan.page_size, (),
            lists, deterministic=False,
        )  # fmt: skip

    parts = max(min(one.max_batch, seqs) * one.num_splits for one in plan.decode_attention)
    entry, part = 4 * (8 + model.num_kv_heads), 4 * model.num_heads * (model.head_dim + 1)
    assert size(parts) - size() == parts * entry, "as many parts as launches have take no more memory"
    assert size(3, parts + 10, parts) - size(parts) == 10 * (entry + part)


def test_a_plan_counts_its_lists_in_its_memory(planned: Callable[..., Planned]) -> None:
    def workspace(plan: Plan) -> int:
        return next(line.size_bytes for line in plan.memory if line.name == "workspace")

    with_lists, without = planned(gaining)[0], planned(lambda batch, layout, items: None)[0]
    assert workspace(with_lists) > workspace(without)
