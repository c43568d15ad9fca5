"""KV tiers in a whole engine: the null device's oracle reads its history from the blocks, so wrong KV is a wrong token."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agent.engine.tiers_lab import (
    BLOCK_BYTES,
    HOST,
    SLOW_PREFILL,
    assert_at_rest,
    fill,
    held,
    ids,
    prompt,
    read_blocks,
    settle,
    small,
    units,
)

from dragoman_agent.device.base import DeviceError, Int32Array, UInt8Array
from dragoman_agent.device.block_copies import DoneCopy
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine.block_account import account
from dragoman_agent.engine.messages import BringBlocks, Cancel, ExportBlocks, Tune
from dragoman_agent.engine.tiers import TierSizes


@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_prefixes_come_back_and_give_the_same_tokens(
    lab: Any, start: Any, answers: Any, never_evicted: Any, tmp_path: Path, kind: str
) -> None:
    sizes = TierSizes(
        host_bytes=0 if kind == "disk" else 256 * BLOCK_BYTES,
        disk_bytes=0 if kind == "host" else 256 * (BLOCK_BYTES + 200),
        disk_dir=str(tmp_path / "kv"),
    )
    wanted = never_evicted(*range(6))
    here = small(lab, tiers=sizes)
    for _ in range(2):
        for seed in range(6):
            events = here.run(start(f"r{seed}", prompt(seed), 20))
            assert ids(answers, events, f"r{seed}") == wanted[seed]
            settle(here)
    assert sum(read_blocks(here).values()) >= 6 * 3, "prefixes of 4 blocks came back for each prompt"
    assert events[-1].cached_tokens == 256, "what came back counts as cached"
    assert here.core.tiers.report().dropped_blocks == 0
    assert_at_rest(here)
    here.core.tiers.close()


def test_without_tiers_the_same_prompts_are_computed_again(lab: Any, start: Any) -> None:
    here = small(lab)
    for _ in range(2):
        for seed in range(6):
            events = here.run(start(f"r{seed}", prompt(seed), 20))
    assert events[-1].cached_tokens == 0 and here.core.tiers is None


def test_what_is_computed_quicker_is_computed(lab: Any, start: Any) -> None:
    here = small(lab, tiers=TierSizes(host_bytes=256 * BLOCK_BYTES, link_rate=1.0))
    fill(here, start)
    for seed in range(4):
        events = here.run(start(f"r{seed}", prompt(seed), 20))
    assert events[-1].cached_tokens == 0 and read_blocks(here) == {"host": 0}
    assert here.core.tiers.report().declined >= 4


def test_many_at_once_share_what_comes_back(lab: Any, start: Any, answers: Any, never_evicted: Any) -> None:
    wanted = never_evicted(*range(5))
    here = small(lab, tiers=HOST)
    for seed in range(5):
        here.run(start(f"r{seed}", prompt(seed), 20))
        settle(here)
    starts = [start(f"{seed}-{copy}", prompt(seed), 20) for copy in range(3) for seed in range(5)]
    found = answers(here.run(*starts))
    for one in starts:
        assert found[(one.request_id, 0)].token_ids == wanted[int(one.request_id[0])]
    assert_at_rest(here)


class SlowDevice(NullDevice):
    """Copies take as many looks as `num_looks` says; `fails` makes those to the device fail."""

    num_looks = 3
    fails = False

    class Copy:
        def __init__(self, work: Any, num_looks: int, fails: bool) -> None:
            self.work, self.left, self.fails, self.seconds = work, num_looks, fails, 1e-6

        def is_done(self) -> bool:
            self.left -= 1
            if self.left > 0:
                return False
            if self.fails:
                raise DeviceError("the link is down")
            if self.left == 0:
                self.work()
            return True

    def copy_in(self, rows: Any, blocks: Int32Array) -> Any:
        return self.Copy(lambda: NullDevice.copy_in(self, rows, blocks), self.num_looks, self.fails)

    def copy_out(self, blocks: Int32Array, rows: Any) -> Any:
        # As on a GPU, what leaves is what was there when the copy was asked for.
        kept: UInt8Array = self.read_blocks(blocks)

        def work() -> DoneCopy:
            for row, data in zip(rows, kept, strict=True):
                row[:] = data
            return DoneCopy(0.0)

        return self.Copy(work, self.num_looks, False)


def test_others_run_while_blocks_come(lab: Any, start: Any, answers: Any, never_evicted: Any) -> None:
    wanted = never_evicted(0, 7)
    device = SlowDevice()
    here = small(lab, tiers=HOST, device=device)
    fill(here, start)
    device.num_looks = 12
    events = here.run(start("r0", prompt(0), 20), start("r7", prompt(7), 20))
    assert ids(answers, events, "r0") == wanted[0] and ids(answers, events, "r7") == wanted[7]
    order = [event.request_id for event in events if hasattr(event, "cursor")]
    assert order[0] == "r7", "the one that waits for its blocks holds nobody up"
    assert_at_rest(here)


@pytest.mark.parametrize("how", ["cancel", "deadline", "fails"])
def test_a_request_that_ends_while_its_blocks_come_leaks_nothing(
    lab: Any, start: Any, answers: Any, never_evicted: Any, how: str
) -> None:
    device = SlowDevice()
    here = small(lab, tiers=HOST, device=device)
    fill(here, start)
    device.num_looks, device.fails = 50, how == "fails"
    here.core.receive(start("again", prompt(0), 20, deadline_seconds=5.0 if how == "deadline" else None))
    here.turn(2)
    assert here.core.tiers.bringer.is_busy
    if how == "fails":
        events = here.run()
        assert ids(answers, events, "again") == never_evicted(0)[0], "what does not come is computed"
        assert "link is down" in here.core.tiers.report().tiers[0].problem
        device.fails = False
    elif how == "cancel":
        here.core.receive(Cancel("again"))
    else:
        here.clock.now += 6.0
    settle(here)
    assert_at_rest(here)
    events = here.run(start("last", prompt(0), 20))
    assert ids(answers, events, "last") == never_evicted(0)[0]


def test_one_that_waited_for_too_long_computes(lab: Any, start: Any, answers: Any, never_evicted: Any) -> None:
    device = SlowDevice()
    here = small(lab, tiers=HOST, device=device)
    fill(here, start)
    device.num_looks = 400
    here.core.receive(start("again", prompt(0), 20))
    here.turn(2)
    assert not here.core.scheduler.running
    here.clock.now += 60.0
    here.turn(2)
    assert here.core.scheduler.running and here.core.tiers.bringer.is_busy
    here.run()
    assert ids(answers, here.events[-30:], "again") == never_evicted(0)[0]
    assert_at_rest(here)


def test_a_hint_brings_a_prefix_up_and_hears_of_its_use(lab: Any, start: Any) -> None:
    here = small(lab, tiers=HOST)
    fill(here, start)
    here.core.tiers.receive(BringBlocks("hint", units(0)))
    settle(here)
    (answer,) = here.core.tiers.take_answers()
    assert (answer.num_imported, answer.num_present, answer.problem) == (4, 0, "")
    before = read_blocks(here)["host"]
    events = here.run(start("r0", prompt(0), 20))
    assert events[-1].cached_tokens == 256 and read_blocks(here)["host"] == before
    (used,) = here.core.exchange.answers
    assert used.exchange_id == "hint"
    assert_at_rest(here)


def test_a_hint_that_brings_nothing_says_why(lab: Any, start: Any) -> None:
    here = small(lab, tiers=HOST)
    here.run(start("r0", prompt(0), 20))
    settle(here)
    for name, seed, why in (("there", 0, "on the device already"), ("unknown", 9, "none of it is held")):
        here.core.tiers.receive(BringBlocks(name, units(seed)))
        (answer,) = here.core.tiers.take_answers()
        assert answer.num_imported == 0 and why in answer.problem


def test_units_below_the_device_are_told_once(lab: Any, start: Any) -> None:
    here = small(lab, tiers=HOST)
    for seed in range(3):
        here.run(start(f"r{seed}", prompt(seed), 20))
        settle(here)
        here.steps.append(here.core.tick())
    held_units: set[bytes] = set()
    for step in here.steps:
        assert not held_units & set(step.lower_stored_hashes)
        held_units |= set(step.lower_stored_hashes)
        held_units -= set(step.lower_removed_hashes)
    assert held_units >= {unit for seed in range(3) for unit in units(seed)}


def test_not_finite_kv_is_forgotten_below(lab: Any, start: Any) -> None:
    here = small(lab, tiers=HOST)
    here.run(start("r0", prompt(0), 20))
    settle(here)
    assert held(here) == {"host": 4}
    digest = here.core.tiers.lower.chain_to_unit(units(0)[0])[0].digest
    here.core.tiers.forget(digest)
    assert held(here) == {"host": 0}


def test_blocks_below_can_be_exported(lab: Any, start: Any) -> None:
    here = small(lab, tiers=HOST)
    fill(here, start)
    assert not here.core.scheduler.pool.chain_to_unit(units(0)[-1])
    here.core.exchange.receive(ExportBlocks("x", units(0), [], 1, 2))
    answer = here.core.exchange.answers.pop()
    assert answer.num_cached == 4 and len(answer.blocks) == 2
    entry = here.core.tiers.lower.host.index.chain_to_unit(units(0)[1])[1]
    assert answer.blocks[0].digest == entry.page.digest and answer.blocks[0].parent == entry.parent
    assert (
        np.frombuffer(answer.blocks[0].data, np.uint8).tolist() == here.core.tiers.lower.host.row(entry.slot).tolist()
    )


FAMILIES = [prompt(100 + family, 400) for family in range(4)]
LIVES = st.tuples(
    st.integers(0, 3),  # which family of prompts
    st.integers(40, 400),  # how much of it
    st.integers(1, 12),  # tokens wanted
    st.integers(0, 12),  # turns until it is cancelled; 0 never
    st.integers(0, 6),  # turns before the next one comes
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=st.lists(LIVES, min_size=5, max_size=25), num_host=st.sampled_from([0, 9, 60]), with_disk=st.booleans())
def test_whatever_comes_no_token_is_wrong_and_nothing_is_lost(
    lab: Any, start: Any, answers: Any, tmp_path: Path, lives: Any, num_host: int, with_disk: bool
) -> None:
    sizes = TierSizes(
        num_host * BLOCK_BYTES, 11 * (BLOCK_BYTES + 200) if with_disk else 0, str(tmp_path / uuid.uuid4().hex)
    )
    device = SlowDevice()
    here = small(lab, tiers=sizes, device=device)
    oracle = lab(step_model=SLOW_PREFILL)
    cancelled: dict[str, int] = {}
    for number, (family, length, num_tokens, cancel_after, pause) in enumerate(lives):
        name = f"r{number}"
        here.core.receive(start(name, FAMILIES[family][:length], num_tokens))
        oracle.core.receive(start(name, FAMILIES[family][:length], num_tokens))
        if cancel_after:
            cancelled[name] = cancel_after
        here.turn(pause)
        for other, left in list(cancelled.items()):
            cancelled[other] = left - pause
            if cancelled[other] <= 0:
                here.core.receive(Cancel(other))
    here.run()
    oracle.run()
    found, wanted = answers(here.events), answers(oracle.events)
    for key, answer in wanted.items():
        got = found[key].token_ids
        assert got == (answer.token_ids[: len(got)] if found[key].finish == "cancelled" else answer.token_ids)
    if here.core.tiers is not None:
        assert_at_rest(here)
        assert all(len(index._entries) <= index.capacity for _, index in here.core.tiers.lower.indices)
        here.core.tiers.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_blocks_come_while_their_sequence_waits_for_a_row(lab: Any, start: Any, ahead: bool) -> None:
    here = small(lab, tiers=HOST, num_blocks=24, max_num_seqs=1)
    fill(here, start, 12)
    here.core.receive(Tune(512, 1, 23, prefetch_ahead=ahead))
    here.core.receive(start("long", prompt(20), 60))
    here.turn(3)
    here.core.receive(start("next", prompt(0), 5))
    here.turn(5)
    assert [sequence.request.request_id for sequence in here.core.scheduler.running] == ["long"]
    assert read_blocks(here)["host"] == (4 if ahead else 0)
    assert account(here.core.scheduler).num_lost == 0
    events = here.run()
    assert read_blocks(here)["host"] == 4 and events[-1].cached_tokens == 256
    assert_at_rest(here)


def test_blocks_on_their_way_are_accounted_for(lab: Any, start: Any) -> None:
    device = SlowDevice()
    here = small(lab, tiers=HOST, device=device)
    fill(here, start)
    device.num_looks = 20
    here.core.receive(start("again", prompt(0), 20))
    here.turn(2)
    assert len(here.core.tiers.held_blocks) == 4 and account(here.core.scheduler).num_lost == 0
    here.run()
    assert not here.core.tiers.held_blocks and account(here.core.scheduler).num_lost == 0


def test_what_a_preempted_sequence_had_comes_back_instead_of_being_computed(lab: Any, start: Any, answers: Any) -> None:
    def run(tiers: TierSizes | None) -> tuple[dict[str, list[int]], int, int]:
        here = small(lab, tiers=tiers, num_blocks=20)
        events = here.run(*(start(f"r{seed}", prompt(seed), 150) for seed in range(4)))
        tokens = {name: answer.token_ids for (name, _), answer in answers(events).items()}
        computed = sum(step.load.prefill_tokens for step in here.steps)
        return tokens, computed, here.core.scheduler.num_preemptions

    without, recomputed, preempted = run(None)
    with_tier, computed, _ = run(HOST)
    assert preempted > 0 and with_tier == without
    assert computed < recomputed - 200, "whole blocks came from the host"
