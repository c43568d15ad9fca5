"""The words of a step with prompts, and the tensors found in them again."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.device.conformance.steps import Part, step_of
from tests.agent.device.conformance.subjects import gpu_plan

from dragoman_agent.device.cuda_inputs import Room, mixed_inputs
from dragoman_agent.device.cuda_library import AttentionSizes
from dragoman_agent.pal.plan import LibraryPrefill, LongPrefill, Plan, PrefillAttention

PLAN = gpu_plan("cuda")
# A sequence that decodes, a whole prompt of 17 tokens, and 8 behind 20.
STEP = step_of([Part([5], 3, [1]), Part(list(range(1, 18)), 0, [2, 3]), Part(list(range(1, 9)), 20, [4, 6])], 16)


def ops(*, library: bool = False) -> Any:
    made = SimpleNamespace(sizes=AttentionSizes(4, 2, 8, 16, 9, 3, 64, 100), part=lambda words: words)
    return SimpleNamespace(queries_an_item=16, library=made if library else None)


def views_of(inputs: Any, sampled: list[int] | None = None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    host = np.zeros(inputs.num_words + 7, np.int32)
    inputs.write(host)
    packed = torch.from_numpy(host)
    return inputs.views(packed, torch.tensor(sampled or [0, 0, 0, 0], dtype=torch.int32)), packed


def kernel_by_kernel(plan: Plan) -> Any:
    inputs = mixed_inputs(STEP, plan, ops(library=True))
    return inputs.step(views_of(inputs)[0], plan)


def test_every_array_is_found_again() -> None:
    inputs = mixed_inputs(STEP, PLAN, ops())
    views, _ = views_of(inputs)
    step = inputs.step(views, PLAN)
    assert step.token_ids.tolist() == STEP.token_ids.tolist() and step.positions.tolist() == STEP.positions.tolist()
    assert step.decode is not None and step.prefill is not None
    assert step.decode.context_lens.tolist() == [4] and step.decode.block_tables.tolist()[0][:1] == [1]
    assert step.prefill.query_starts.tolist() == [0, 17, 25] and step.prefill.context_lens.tolist() == [17, 28]
    assert step.prefill.block_tables.tolist() == STEP.block_tables[1:, :2].tolist()
    assert sorted(map(tuple, step.prefill.work_list.tolist())) == [(0, 0), (0, 16), (1, 0)]
    assert step.last_rows is not None and step.last_rows.tolist() == [0, 17, 25]
    assert step.prefill.first_row == 1 and step.num_filled is None
    assert views["temperatures"].tolist() == STEP.sampling.temperatures.tolist()
    assert views["uniforms"].dtype == torch.float64 and len(views["uniforms"]) == 3


def test_what_a_library_attends_has_no_work_list() -> None:
    plan = dataclasses.replace(PLAN, library_prefill=LibraryPrefill("cudnn", 25, 3))
    step = kernel_by_kernel(plan)
    assert step.prefill.library.tolist() == [0, 17 * 32, 25 * 32, 25 * 32, 17, 8, 0, 17, 28, 0]
    assert len(step.prefill.work_list) == 0
    few = dataclasses.replace(plan, library_prefill=LibraryPrefill("cudnn", 26, 3))
    step = kernel_by_kernel(few)
    assert step.prefill.library is None and len(step.prefill.work_list) == 3


def rooms(*tokens: int, max_num_seqs: int = 8, chunk: int | None = None, library_from: int | None = None) -> list[Room]:
    plan = dataclasses.replace(
        PLAN, mixed_graph_tokens=tokens, max_num_seqs=max_num_seqs, max_batch_tokens=chunk or 500, chunk_graph=chunk is not None,
        library_prefill=None if library_from is None else LibraryPrefill("cudnn", library_from, 3),
    )  # fmt: skip
    return Room.all_of(plan, ops(library=library_from is not None))


def test_graphs_of_many_tokens_come_for_few_sequences_and_for_many() -> None:
    assert rooms(8, 96, 200, 600, max_num_seqs=256) == [
        Room(8, 8, 8), Room(96, 64, 70), Room(96, 96, 70), Room(200, 64, 76), Room(200, 200, 76),
    ]  # fmt: skip
    assert rooms(96, max_num_seqs=40) == [Room(96, 40, 46)]


def test_a_step_takes_the_least_graph_that_holds_it() -> None:
    assert mixed_inputs(STEP, PLAN, ops(), rooms(8, 16)).room is None, "26 tokens"
    inputs = mixed_inputs(STEP, PLAN, ops(library=True), rooms(8, 26, 40))
    assert inputs.room == Room(26, 8, 9) and inputs.library is None
    assert mixed_inputs(STEP, PLAN, ops(), rooms(8, 30, 40)).room == Room(30, 8, 9)


def test_more_sequences_or_work_items_than_a_graph_holds_take_a_larger_one_or_none() -> None:
    assert mixed_inputs(STEP, PLAN, ops(), rooms(32, max_num_seqs=2)).room is None
    assert mixed_inputs(STEP, PLAN, ops(), [Room(32, 2, 9), Room(40, 3, 1), Room(40, 3, 9)]).room == Room(40, 3, 9)
    prompts = step_of([Part([1, 2], 0, [1 + i]) for i in range(80)], 16)
    assert mixed_inputs(prompts, PLAN, ops(), rooms(160, max_num_seqs=80)).room is None, "80 items, each of 2 queries"


def test_only_steps_that_nearly_fill_the_chunk_run_in_its_graph() -> None:
    assert rooms(8, chunk=28) == [Room(8, 8, 8), Room(28, 8, 9, min_tokens=25)]
    assert mixed_inputs(STEP, PLAN, ops(), rooms(8, chunk=28)).room == Room(28, 8, 9, min_tokens=25)
    assert mixed_inputs(STEP, PLAN, ops(), rooms(8, chunk=30)).room is None, "26 tokens of 30"
    inputs = mixed_inputs(STEP, PLAN, ops(), rooms(chunk=28))
    padded = inputs.padded_step(views_of(inputs)[0], PLAN, torch.zeros((PLAN.max_num_seqs, 9), dtype=torch.int32))
    assert padded.num_filled == 25, "rows that may be padding"
    assert rooms(28, chunk=28) == [Room(28, 8, 9)], "a graph that takes any step is no other"


LONG = PrefillAttention("paged", 4, 16, 4, 3)


def with_long(min_tokens: int = 20, min_context: int = 10, many: int = 0, **changes: Any) -> Plan:
    long = LongPrefill(LONG, min_tokens, min_context, many)
    return dataclasses.replace(PLAN, max_num_seqs=8, max_batch_tokens=500, long_prefill=long, **changes)


@pytest.mark.parametrize(("rule", "is_long"), [
    # 17 tokens of a prompt alone and 8 behind 20 see 17 * 18 / 2 + 8 * 24.5 = 349 keys, 13.96 each, in 7 tiles of 4 queries.
    ((25, 13), True), ((26, 13), False), ((25, 14), False), ((26, 14, 25), True), ((26, 14, 26), False), ((26, 14, 0), False),
])  # fmt: skip
def test_what_prompts_see_and_how_many_tokens_they_are_decide_which_launch_attends(
    rule: tuple[int, ...], is_long: bool
) -> None:
    plan = with_long(*rule)
    inputs = mixed_inputs(STEP, plan, ops())
    step = inputs.step(views_of(inputs)[0], plan)
    assert step.prefill is not None
    assert step.prefill.launch == (LONG if is_long else None)
    assert len(step.prefill.work_list) == (7 if is_long else 3), "tiles of 4 queries, or of 16"


def test_tiles_that_are_nearly_empty_go_to_the_usual_launch() -> None:
    plan = with_long(min_tokens=1, min_context=1)
    few = step_of([Part([1, 2, 3], 24, [1 + i, 5 + i]) for i in range(4)], 16)
    assert mixed_inputs(few, plan, ops()).is_long is False
    assert mixed_inputs(step_of([Part([1, 2, 3, 4, 5, 6, 7], 24, [1, 2])], 16), plan, ops()).is_long is True


def test_the_longest_context_does_not_decide() -> None:
    """One short part behind a long context beside a whole prompt: what is computed sees little in the mean."""
    mixed = step_of([Part([1] * 8, 40, [1, 2, 3]), Part(list(range(1, 41)), 0, [4, 5, 6])], 16)
    assert mixed_inputs(mixed, with_long(min_context=30), ops()).is_long is False
    assert mixed_inputs(mixed, with_long(min_context=20), ops()).is_long is True


def test_each_launch_has_graphs_of_its_own_where_it_may_attend() -> None:
    plan = with_long(min_tokens=20, mixed_graph_tokens=(8, 30), chunk_graph=False)
    both = Room.all_of(plan, ops())
    assert both == [Room(8, 8, 8), Room(30, 8, 9), Room(30, 8, 15, is_long=True)]
    far, near = mixed_inputs(STEP, plan, ops(), both), mixed_inputs(STEP, with_long(26), ops(), both)
    assert far.room == both[2] and near.room == both[1]
    tables = torch.zeros((PLAN.max_num_seqs, 9), dtype=torch.int32)
    for inputs, launch, count in ((far, LONG, 7), (near, None, 3)):
        padded = inputs.padded_step(views_of(inputs)[0], plan, tables)
        assert padded.prefill is not None and padded.prefill.launch == launch
        assert int((padded.prefill.work_list[:, 0] != 8).sum()) == count
    usual = mixed_inputs(STEP, plan, ops(), both[:2])
    assert usual.room == both[1] and not usual.is_long, "until its graph is there the other one serves"
    alone = mixed_inputs(STEP, plan, ops(), both[:1])
    assert alone.room is None and alone.is_long


def test_where_the_library_may_attend_it_does_before_either_launch() -> None:
    plan = with_long(
        20,
        mixed_graph_tokens=(30,),
        chunk_graph=False,
        library_prefill=LibraryPrefill("cudnn", 20, 3),
    )
    rooms = Room.all_of(plan, ops(library=True))
    assert [(room.is_ours, room.is_long) for room in rooms] == [(False, False), (True, False), (True, True)]
    large = dataclasses.replace(plan, long_prefill=LongPrefill(dataclasses.replace(LONG, block_m=64), 20, 10))
    fewer = Room.all_of(large, ops(library=True))
    assert fewer[0].is_ours is False and fewer[2].num_items < fewer[0].num_items, "whatever their work lists hold"
    assert mixed_inputs(STEP, plan, ops(library=True), rooms).room == rooms[0]
    many = step_of([Part([1, 2, 3, 4, 5, 6, 7], 8, [1 + i, 5 + i]) for i in range(4)], 16)
    assert mixed_inputs(many, plan, ops(library=True), rooms).room == rooms[2], "four prompts, it is set up for three"


def test_a_graph_whose_prompts_the_library_attends_takes_what_it_can_run() -> None:
    both = rooms(8, 30, library_from=30)
    assert both == [Room(8, 8, 8), Room(30, 8, 9, is_ours=False), Room(30, 8, 9)]
    inputs = mixed_inputs(STEP, PLAN, ops(library=True), both)
    assert inputs.room == both[1] and inputs.library is not None
    views, _ = views_of(inputs)
    # Behind the row of the sequence that decodes.
    assert views["library"].tolist() == [32, 18 * 32, 26 * 32, 26 * 32, 17, 8, 0, 17, 28, 0]
    padded = inputs.padded_step(views, PLAN, torch.zeros((PLAN.max_num_seqs, 9), dtype=torch.int32))
    assert padded.prefill.library is not None and padded.prefill.first_row == 0
    prompts = step_of([Part([1, 2, 3, 4, 5, 6, 7], 0, [1 + i]) for i in range(4)], 16)
    inputs = mixed_inputs(prompts, PLAN, ops(library=True), both)
    assert inputs.room == both[2] and inputs.library is None, "four prompts, the library takes three"


def test_what_a_graph_reads_lies_in_one_place_whatever_the_step() -> None:
    """And rows and sequences beyond the step's do nothing."""
    alone = step_of([Part([9, 8, 7], 0, [2])], 16)
    places = []
    for step in (STEP, alone):
        inputs = mixed_inputs(step, PLAN, ops(), rooms(32))
        views, packed = views_of(inputs)
        padded = inputs.padded_step(views, PLAN, torch.zeros((PLAN.max_num_seqs, 9), dtype=torch.int32))
        graph = [padded.token_ids, padded.positions, padded.slots, padded.decode.context_lens]
        graph += [padded.prefill.query_starts, padded.prefill.context_lens, padded.prefill.work_list]
        places.append([(view.data_ptr() - packed.data_ptr(), tuple(view.shape)) for view in graph])
        assert (views["uniforms"].data_ptr() - packed.data_ptr()) % 8 == 0
        rows = [views[name] for name in ("uniforms", "temperatures", "sampled")]
        places[-1] += [(view.data_ptr() - packed.data_ptr(), tuple(view.shape)) for view in rows]
        assert views["sampled"].tolist() == [*(step.query_starts[1:] - 1).tolist(), *[0] * (8 - len(step.context_lens))]
        tokens, seqs = len(step.token_ids), len(step.context_lens)
        assert padded.num_filled == 0 and padded.last_rows is None and padded.prefill.first_row == 0
        assert padded.token_ids.tolist() == [*step.token_ids.tolist(), *[0] * (32 - tokens)]
        assert padded.slots[tokens:].tolist() == [0] * (32 - tokens)
        starts, lens = padded.prefill.query_starts.tolist(), padded.prefill.context_lens.tolist()
        assert starts[: seqs + 1] == step.query_starts.tolist() and set(starts[seqs:]) == {tokens}
        assert lens[:seqs] == step.context_lens.tolist() and set(lens[seqs:]) == {0}
        decodes = padded.decode.context_lens.tolist()
        assert [n for n in decodes if n] == step.context_lens[: inputs.num_decodes].tolist()
        queries = {
            (seq, first + at)
            for seq, first in padded.prefill.work_list.tolist()
            for at in range(16)
            if first + at < starts[seq + 1] - starts[seq]
        }
        prompts = range(inputs.num_decodes, seqs)
        assert queries == {(seq, at) for seq in prompts for at in range(starts[seq + 1] - starts[seq])}
    assert places[0] == places[1]
