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
        patch.setattr(checks, "_is_sound_decode", lambda *_: False)
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
            assert checks._is_sound_decode(batch, CONFIG, PLAN, 2)


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
        assert not checks._is_sound_decode(batch, CONFIG, PLAN, 2), expected
        with pytest.raises(ValueError) as raised:
            check_batch(batch, CONFIG, PLAN, 2)
        assert str(raised.value) == expected
    else:
        check_batch(batch, CONFIG, PLAN, 2)


def test_no_block_has_two_writers() -> None:
    batch = decode_of([5, 9], 1)
    batch.block_tables[1, 2] = batch.block_tables[0, 1]
    batch.slot_mapping[1] = batch.block_tables[1, 2] * PLAN.page_size + 8 % PLAN.page_size
    with pytest.raises(ValueError, match="both write block"):
        check_batch(batch, CONFIG, PLAN, 2)


def test_limits_of_the_plan_hold_on_the_quick_road() -> None:
    batch = decode_of([40] * 3, 1)
    assert checks._is_sound_decode(batch, CONFIG, PLAN, 2)
    for smaller in (
        replace(PLAN, max_context_tokens=39), replace(PLAN, max_num_seqs=2), replace(PLAN, max_batch_tokens=2),
        replace(PLAN, num_blocks=int(batch.block_tables.max())),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            check_batch(batch, CONFIG, smaller, 2)


def test_a_prompt_takes_the_full_road() -> None:
    batch = warm_up_batch(PLAN.page_size, 0, 7)
    assert not checks._is_sound_decode(batch, CONFIG, PLAN, 0)
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
    assert checks._is_sound_decode(batch, CONFIG, PLAN, 2)
    getattr(batch, name)[at] = wrong
    assert not checks._is_sound_decode(batch, CONFIG, PLAN, 2)
    with pytest.raises(ValueError, match=name):
        check_batch(batch, CONFIG, PLAN, 2)
