"""The quick road of `check_batch` for decode against the full one, which names the fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_agent.device import checks
from dragoman_agent.device.base import StepBatch
from dragoman_agent.device.checks import check_batch
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.device.warm_up import decode_batch, warm_up_batch

CONFIG = NullModel().config
PLAN = replace(default_null_plan(NullModel(), max_num_seqs=8, num_blocks=60), page_size=4, max_context_tokens=40)
ARRAYS = (
    "token_ids", "positions", "slot_mapping", "query_starts", "context_lens", "block_tables", "sample_seqs",
    "pool_seqs", "score_rows", "score_targets",
)  # fmt: skip


def fault(batch: StepBatch, num_previous: int) -> str:
    """What the full road says; empty when it finds nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "_sound_decode", lambda *_: None)
        patch.setattr(checks, "_go_on", lambda *_: None)
        try:
            check_batch(batch, CONFIG, PLAN, num_previous)
        except ValueError as error:
            return str(error)
    return ""


def decode_of(context_lens: list[int], seed: int) -> StepBatch:
    """A sound step of one token a sequence; what lies behind a table's used part may be anything."""
    rng = np.random.default_rng(seed)
    num, size = len(context_lens), PLAN.page_size
    lens = np.array(context_lens, np.int32)
    tables = np.zeros((num, 10), np.int32)
    blocks = iter(rng.permutation(np.arange(1, PLAN.num_blocks, dtype=np.int32)))
    shared = int(next(blocks))  # a prefix that all have
    for row, length in enumerate(context_lens):
        pages = -(-length // size)
        tables[row, :pages] = [shared] * (pages - 1) + [next(blocks)]
    if seed % 3 == 0:
        tables[np.arange(10) >= (-(-lens // size))[:, None]] = rng.integers(-3, 70)
    positions = lens - np.int32(1)
    batch = decode_batch(PLAN, num, 1)
    return replace(
        batch,
        token_ids=rng.integers(-2, CONFIG.vocab_size, num, dtype=np.int32),
        positions=positions,
        slot_mapping=tables[np.arange(num), positions // size] * size + positions % size,
        context_lens=lens,
        block_tables=tables,
    )


STEPS = st.builds(decode_of, st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 99))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(STEPS)
def test_sound_decode_steps_take_the_quick_road(batch: StepBatch) -> None:
    assert fault(batch, 2) == ""
    check_batch(batch, CONFIG, PLAN, 2)
    if (batch.block_tables >= 0).all() and (batch.block_tables < PLAN.num_blocks).all():
        unused = np.arange(10) >= (-(-batch.context_lens // PLAN.page_size))[:, None]
        if not batch.block_tables[unused].any():  # padded with the null block, as the engine does
            assert checks._sound_decode(batch, CONFIG, PLAN, 2)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(STEPS, st.data())
def test_both_roads_find_the_same_faults(batch: StepBatch, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(ARRAYS))
        values = getattr(batch, name).copy()
        if data.draw(st.integers(0, 4)) == 0:
            values = values[:-1] if data.draw(st.booleans()) else np.concatenate((values, values[-1:]))
        elif values.size:
            at = data.draw(st.integers(0, values.size - 1))
            wrong = data.draw(st.sampled_from((-3, -1, 0, 1, 59, 60, 1 << 30)) | st.integers(-4, 300))
            values.flat[at] = wrong if data.draw(st.booleans()) else values.flat[at] + np.sign(wrong)
        elif values.ndim == 1:
            values = np.array([data.draw(st.integers(-1, 9))], np.int32)
        batch = replace(batch, **{name: values})
    expected = fault(batch, 2)
    if expected:
        assert not checks._sound_decode(batch, CONFIG, PLAN, 2), expected
        with pytest.raises(ValueError) as raised:
            check_batch(batch, CONFIG, PLAN, 2)
        assert str(raised.value) == expected
    else:
        check_batch(batch, CONFIG, PLAN, 2)


def step_behind(batch: StepBatch) -> StepBatch:
    """A token further, as the engine makes it: what stays is the same array, tables are others where a page begins."""
    positions, tables, size = batch.context_lens, batch.block_tables, PLAN.page_size
    (new,) = np.nonzero(positions % size == 0)
    slots = batch.slot_mapping + np.int32(1)
    if len(new):
        tables = tables.copy()
        free = np.setdiff1d(np.arange(1, PLAN.num_blocks, dtype=np.int32), tables)
        tables[new, positions[new] // size] = free[: len(new)]
        slots[new] = free[: len(new)] * np.int32(size)
    coming = batch.token_ids if (batch.token_ids == -1).all() else np.full(len(positions), -1, np.int32)
    return replace(
        batch, step=batch.step + 1, token_ids=coming, positions=positions, slot_mapping=slots, block_tables=tables,
        context_lens=positions + np.int32(1),
    )  # fmt: skip


CHAINED = st.builds(decode_of, st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from((1, 2, 4, 5)))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(CHAINED)
def test_steps_that_go_on_are_checked_by_what_changed(batch: StepBatch) -> None:
    last = check_batch(batch, CONFIG, PLAN, 4)
    assert last is not None
    while batch.context_lens.max() < PLAN.max_context_tokens:
        batch = step_behind(batch)
        assert fault(batch, 4) == ""
        found = checks._go_on(batch, CONFIG, PLAN, 4, last)
        whole = checks._sound_decode(batch, CONFIG, PLAN, 4)
        assert found is not None and whole is not None
        for one, other in zip(found, whole, strict=True):
            assert np.all(np.asarray(one) == other)
        last = found
    too_long = step_behind(replace(batch, block_tables=np.pad(batch.block_tables, ((0, 0), (0, 1)))))
    for longer in (too_long, replace(too_long, block_tables=last.block_tables)):
        assert checks._go_on(longer, CONFIG, PLAN, 4, last) is None
        with pytest.raises(ValueError):
            check_batch(longer, CONFIG, PLAN, 4, last)


def changed(batch: StepBatch, data: st.DataObject) -> StepBatch:
    """With one array made another: of other values, length, type or shape."""
    name = data.draw(st.sampled_from(ARRAYS))
    values = getattr(batch, name).copy()
    kind = data.draw(st.integers(0, 9))
    if kind == 0:
        values = values[:-1] if data.draw(st.booleans()) else np.concatenate((values, values[-1:]))
    elif kind == 1:
        values = values.astype(data.draw(st.sampled_from((np.int64, np.uint32))))
    elif values.size:
        at = data.draw(st.integers(0, values.size - 1))
        wrong = data.draw(st.sampled_from((-3, -1, 0, 1, 59, 60, 1 << 30)) | st.integers(-5, 300))
        values.flat[at] = wrong if data.draw(st.booleans()) else values.flat[at] + np.sign(wrong)
        if name == "block_tables" and data.draw(
            st.booleans()
        ):  # the slots as this table says, so that they tell nothing
            rows, pages = np.arange(len(values)), batch.positions // PLAN.page_size
            slots = values[rows, pages] * np.int32(PLAN.page_size) + batch.positions % PLAN.page_size
            batch = replace(batch, slot_mapping=slots)
    else:
        values = np.array([data.draw(st.integers(-1, 9))], np.int32)
    return replace(batch, **{name: values})


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(CHAINED, st.data())
def test_no_fault_of_a_step_that_goes_on_is_missed(batch: StepBatch, data: st.DataObject) -> None:
    last = check_batch(batch, CONFIG, PLAN, 4)
    for _ in range(data.draw(st.integers(0, 4))):
        batch = step_behind(batch)
        last = check_batch(batch, CONFIG, PLAN, 4, last)
    batch = step_behind(batch)
    for _ in range(data.draw(st.integers(1, 2))):
        batch = changed(batch, data)
    num_previous = data.draw(st.sampled_from((4, 0)))
    expected = fault(batch, num_previous)
    assert last is not None
    if expected:
        assert checks._go_on(batch, CONFIG, PLAN, num_previous, last) is None, expected
        with pytest.raises(ValueError) as raised:
            check_batch(batch, CONFIG, PLAN, num_previous, last)
        assert str(raised.value) == expected
    else:
        check_batch(batch, CONFIG, PLAN, num_previous, last)


def begins_page() -> tuple[StepBatch, checks.SoundDecode]:
    """A sound step in which the second of two sequences begins a page, and what is known of the one before."""
    batch = decode_of([6, 8], 1)
    last = check_batch(batch, CONFIG, PLAN, 4)
    assert last is not None
    return step_behind(batch), last


@pytest.mark.parametrize("block", ["the other's", "the null block", 60, -1, 5 + (1 << 30)])
def test_the_block_of_a_new_page_is_looked_at(block: int | str) -> None:
    batch, last = begins_page()
    assert checks._go_on(batch, CONFIG, PLAN, 4, last) is not None
    own = {"the other's": int(batch.block_tables[0, 1]), "the null block": 0}
    block_id = own[block] if isinstance(block, str) else block
    batch.block_tables[1, 2] = block_id
    batch.slot_mapping[1] = np.array([block_id * PLAN.page_size]).astype(np.int32)[
        0
    ]  # 2**32 and more wrap to a block's slots
    assert checks._go_on(batch, CONFIG, PLAN, 4, last) is None
    with pytest.raises(ValueError):
        check_batch(batch, CONFIG, PLAN, 4, last)


def test_blocks_that_were_there_are_those_that_were_checked() -> None:
    batch, last = begins_page()
    batch.block_tables[0, 0] = 60
    assert checks._go_on(batch, CONFIG, PLAN, 4, last) is None
    with pytest.raises(ValueError, match="block_tables"):
        check_batch(batch, CONFIG, PLAN, 4, last)


@pytest.mark.parametrize("name", ["token_ids", "slot_mapping", "context_lens", "block_tables"])
def test_other_types_and_shapes_of_the_same_bytes_are_no_step_that_goes_on(name: str) -> None:
    batch, last = begins_page()
    values = getattr(batch, name)
    for other in (values.view(np.float32), values[:, None]):
        step = replace(batch, **{name: other})
        assert checks._go_on(step, CONFIG, PLAN, 4, last) is None
        assert checks._sound_decode(step, CONFIG, PLAN, 4) is None


def test_tokens_that_were_checked_for_more_rows_are_checked_again() -> None:
    batch, last = begins_page()
    batch = replace(batch, token_ids=last.token_ids)
    batch.token_ids[0] = -4
    assert checks._go_on(batch, CONFIG, PLAN, 4, last) is not None
    with pytest.raises(ValueError, match="token_ids"):
        check_batch(batch, CONFIG, PLAN, 3, last)


def test_no_block_has_two_writers() -> None:
    batch = decode_of([5, 9], 1)
    batch.block_tables[1, 2] = batch.block_tables[0, 1]
    batch.slot_mapping[1] = batch.block_tables[1, 2] * PLAN.page_size + 8 % PLAN.page_size
    with pytest.raises(ValueError, match="both write block"):
        check_batch(batch, CONFIG, PLAN, 2)


def test_limits_of_the_plan_hold_on_the_quick_road() -> None:
    batch = decode_of([40] * 3, 1)
    assert checks._sound_decode(batch, CONFIG, PLAN, 2)
    for smaller in (
        replace(PLAN, max_context_tokens=39), replace(PLAN, max_num_seqs=2), replace(PLAN, max_batch_tokens=2),
        replace(PLAN, num_blocks=int(batch.block_tables.max())),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            check_batch(batch, CONFIG, smaller, 2)


def test_a_prompt_takes_the_full_road() -> None:
    batch = warm_up_batch(PLAN.page_size, 0, 7)
    assert not checks._sound_decode(batch, CONFIG, PLAN, 0)
    check_batch(batch, CONFIG, PLAN)


@pytest.mark.parametrize(
    ("name", "at", "wrong"),
    [
        ("sample_seqs", 0, -1), ("sample_seqs", 1, 3), ("block_tables", (1, 0), 0), ("block_tables", (2, 1), -4),
        ("block_tables", (0, 0), 60), ("token_ids", 2, -3), ("token_ids", 0, CONFIG.vocab_size), ("positions", 1, 4),
        ("slot_mapping", 2, 5), ("context_lens", 0, 0), ("context_lens", 2, 41), ("query_starts", 1, 0),
    ],
)  # fmt: skip
def test_single_faults_of_a_decode_step_are_named(name: str, at: int | tuple[int, int], wrong: int) -> None:
    batch = decode_of([12, 20, 40], 1)
    assert checks._sound_decode(batch, CONFIG, PLAN, 2)
    getattr(batch, name)[at] = wrong
    assert not checks._sound_decode(batch, CONFIG, PLAN, 2)
    with pytest.raises(ValueError, match=name):
        check_batch(batch, CONFIG, PLAN, 2)
