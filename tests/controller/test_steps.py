"""Remembered decode rows against the step model they come from."""

from __future__ import annotations

import copy
import ctypes
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.step_model import StepModel
from dragoman_controller.steps import StepTable


@st.composite
def step_models(draw: st.DrawFn) -> StepModel:
    """Any measured grid: times over 0, in no order whatever."""
    batches = sorted(draw(st.sets(st.integers(1, 256), min_size=1, max_size=4)))
    contexts = sorted(draw(st.sets(st.integers(0, 8192), min_size=1, max_size=5)))
    count = len(batches) * len(contexts)
    times = draw(st.lists(st.floats(1e-4, 1.0), min_size=count, max_size=count))
    return StepModel(tuple(batches), tuple(contexts), tuple(times), draw(st.floats(10, 1e5)), draw(st.floats(0, 0.1)))


@given(model=step_models(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_row_is_the_step_model_at_its_batch_size(model: StepModel, data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(model.batch_sizes[0], model.batch_sizes[-1]))
    context = data.draw(st.floats(0, 20_000))
    expected = model.decode_step_seconds(batch_size, context)
    assert StepTable(model).row(batch_size).at(context) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(model=step_models(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_floors_are_nowhere_above_the_row(model: StepModel, data: st.DataObject) -> None:
    row = StepTable(model).row(data.draw(st.integers(1, 300)))
    intercept, slope = row.floor
    for context in data.draw(st.lists(st.floats(0, 50_000), max_size=10)):
        assert intercept + slope * context <= row.at(context) + 1e-9
    low = data.draw(st.floats(0, 10_000))
    high = low + data.draw(st.floats(1, 10_000))
    intercept, slope = row.floor_between(low, high)
    for context in data.draw(st.lists(st.floats(low, high), max_size=10)):
        assert intercept + slope * context <= row.at(context) + 1e-9


def test_the_floor_of_an_interval_is_the_row_where_that_is_straight() -> None:
    row = StepTable(StepModel((1,), (0, 1000, 4000), (0.01, 0.02, 0.08), 1000.0, 0.0)).row(1)
    for low, high in ((0.0, 900.0), (1200.0, 3000.0), (3500.0, 9000.0)):
        intercept, slope = row.floor_between(low, high)
        assert intercept + slope * low == pytest.approx(row.at(low))
        assert intercept + slope * high == pytest.approx(row.at(high))


def test_a_copied_row_says_where_its_own_numbers_are() -> None:
    """Native code reads them there; the original's may be gone, or in another process."""
    row = StepTable(StepModel((1, 4), (0, 1000), (0.01, 0.02, 0.03, 0.05), 500.0, 0.001)).row(2)
    for copied in (copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        assert copied.address != row.address
        read = (ctypes.c_double * 6).from_address(copied.address)
        assert list(read) == [2, *row.contexts, *row.seconds, *row.slopes]
        assert copied.floor == row.floor
