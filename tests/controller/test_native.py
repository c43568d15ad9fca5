"""The compiled search makes the choices of the Python code, number for number; without a compiler the controller says so and goes on."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.step_model import StepModel
from dragoman_controller.agent_view import AgentView, Shape
from dragoman_controller.candidates import Candidates
from dragoman_controller.native import build as builder
from dragoman_controller.native.build import NativeUnavailable
from dragoman_controller.native.library import Library, load
from dragoman_controller.placement import place
from dragoman_controller.steps import StepTable

LIBRARY = load()
OTHER_FUNCTIONS = ("search", "draw", "write_quote", "begin_learning", "judge", "learn")
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler is on PATH")


def table(rng: Random) -> StepTable:
    """A step model of one to four batch sizes and contexts, now and then flat or falling."""
    batches = sorted(rng.sample(range(1, 65), rng.randint(1, 4)))
    contexts = sorted(rng.sample(range(0, 8193, 64), rng.randint(1, 4)))
    times = tuple(rng.choice((rng.uniform(1e-4, 0.5), 0.01)) for _ in range(len(batches) * len(contexts)))
    return StepTable(StepModel(tuple(batches), tuple(contexts), times, rng.uniform(100, 1e5), rng.uniform(0, 0.05)))


def some_view(agent_id: str, tables: list[StepTable], rng: Random) -> AgentView:
    steps, most = rng.choice(tables), rng.randint(1, 16)
    running = rng.randint(0, most)
    slots = most + rng.randint(0, 4)
    return AgentView(
        agent_id=agent_id,
        max_context_tokens=rng.choice((512, 2048, 8192)),
        num_free_slots=rng.choice((0, slots - running, slots)),
        num_slots=slots,
        num_running=running,
        mean_context_tokens=rng.choice((0.0, rng.uniform(0, 6000))),
        # Few values, so that ties and equals are common.
        queue_seconds=rng.choice((0.0, 0.0, 0.01, rng.uniform(0, 2))),
        max_running_requests=most,
        steps=steps,
        row=steps.row(min(running + 1, most)),
        excluded_because=rng.choice(("", "", "", "", "it is draining")),
        pace=rng.choice((1.0, 1.0, rng.uniform(0.1, 8))),
        state=rng.choice(("serving", "serving", "serving", "draining")),
    )


def check_counts(fleet: Candidates) -> None:
    """What is counted along is what the views say."""
    serving = [view for view in fleet.views if view.state == "serving"]
    assert fleet.num_able == sum(view.is_able for view in fleet.views)
    assert fleet.num_places == sum(view.max_running_requests for view in serving)
    assert fleet.num_free == sum(view.max_running_requests - view.num_running for view in serving)
    assert fleet.num_in_state("serving") == len(serving)


def some_shape(rng: Random) -> Shape:
    prompt, output = rng.choice((1, 64, rng.randint(1, 3000))), rng.choice((1, rng.randint(1, 3000)))
    return Shape(prompt, output, rng.choice((1, 1, 1, 1, 3)), prompt + 1, prompt + output)


@needs_compiler
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_the_same_agents_the_same_seconds_and_the_same_random_numbers(seed: int) -> None:
    rng = Random(seed)
    tables = [table(rng) for _ in range(rng.randint(1, 5))]
    ours, theirs = Candidates(LIBRARY), Candidates()
    draws = Random(seed), Random(seed)
    for number in range(rng.randint(1, 60)):
        one = some_view(f"agent-{number}", tables, rng)
        ours.put(one)
        theirs.put(one)
    for _ in range(12):
        shape = some_shape(rng)
        ids = [one.agent_id for one in ours.views]
        cached = {one: 64 * rng.randint(0, 40) for one in rng.sample(ids, min(len(ids), rng.choice((0, 0, 1, 5))))}
        excluded = dict.fromkeys(rng.sample(ids, min(len(ids), rng.choice((0, 0, 0, 3)))), "told so")
        found = place(ours, shape, cached, draws[0], excluded)
        expected = place(theirs, shape, cached, draws[1], excluded)
        assert found == expected
        assert draws[0].random() == draws[1].random()
        if found is not None:
            view = ours.views[found.chosen]
            assert found.score == view.score(shape, cached.get(view.agent_id, 0))
        # Loads change, agents go and come.
        change = rng.random()
        if change < 0.15 and ids:
            for fleet in (ours, theirs):
                fleet.remove(ids[seed % len(ids)])
        one = some_view(rng.choice(ids) if ids and change < 0.9 else f"new-{rng.random()}", tables, rng)
        for fleet in (ours, theirs):
            fleet.put(one)
            check_counts(fleet)


@needs_compiler
def test_what_the_table_points_at_outlives_the_step_tables() -> None:
    """A row is kept by the table alone once its agent's step table is gone."""
    fleet, rng = Candidates(LIBRARY), Random(3)
    view = replace(some_view("a", [table(rng)], rng), num_free_slots=3, excluded_because="", max_context_tokens=8192)
    fleet.put(view)
    expected = place(fleet, Shape(10, 10), {}, Random(0))
    fleet.views[0] = replace(view, steps=table(rng))
    del view
    for _ in range(50):
        table(rng)
    assert place(fleet, Shape(10, 10), {}, Random(0)) == expected


def test_without_a_compiler_python_searches_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING):
        assert load({"DRAGOMAN_CACHE_DIR": str(tmp_path)}) is None
    assert "by Python code" in caplog.text and "install one, such as g++" in caplog.text


def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "search.cpp:1: no" >&2\nexit 3\n')
    compiler.chmod(0o755)
    with pytest.raises(NativeUnavailable, match=r"cc failed with exit status 3: search.cpp:1: no"):
        builder.build(tmp_path / "cache", str(compiler))
    assert not list((tmp_path / "cache" / "controller").iterdir())


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NativeUnavailable, match="DRAGOMAN_CACHE_DIR"):
        builder.build(tmp_path / "cache", str(compiler))


def test_a_library_of_another_layout_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        Library(tmp_path / "libnone.so")
    compiler = next((found for name in builder.COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler is on PATH")
    source = tmp_path / "other.cpp"
    source.write_text(
        'extern "C" { '
        + "".join(f"void dragoman_{name}() {{}} " for name in OTHER_FUNCTIONS)
        + "long dragoman_search_layout() { return 1; } long dragoman_learnt_bytes() { return 1; } }"
    )
    builder._run([compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libother.so")])
    with pytest.raises(NativeUnavailable, match="otherwise than this version"):
        Library(tmp_path / "libother.so")
