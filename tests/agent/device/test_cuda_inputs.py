"""The words of a step with prompts, and the tensors found in them again."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.agent.device.conformance.steps import Part, step_of
from tests.agent.device.conformance.subjects import gpu_plan

from dragoman_agent.device.cuda_inputs import mixed_inputs
from dragoman_agent.device.cuda_library import AttentionSizes
from dragoman_agent.pal.plan import LibraryPrefill

PLAN = gpu_plan("cuda")
STEP = step_of([Part([5], 3, [1]), Part(list(range(1, 18)), 0, [2, 3]), Part(list(range(1, 9)), 20, [4, 6])], 16)


def ops(*, library: bool = False) -> Any:
    sizes = AttentionSizes(4, 2, 8, 16, 9, 3, 64, 100)
    tables: list[torch.Tensor] = []
    made = SimpleNamespace(sizes=sizes, tables=tables, part=lambda words, table: tables.append(table) or words)
    return SimpleNamespace(queries_an_item=16, library=made if library else None)


def on_device(inputs: Any) -> Any:
    host = np.zeros(inputs.num_words + 7, np.int32)
    inputs.write(host)
    return inputs.on_device(torch.from_numpy(host), torch.zeros(4, dtype=torch.int32), PLAN)


def test_every_array_is_found_again() -> None:
    step, temperatures, draws = on_device(mixed_inputs(STEP, PLAN, ops()))
    assert step.token_ids.tolist() == STEP.token_ids.tolist() and step.positions.tolist() == STEP.positions.tolist()
    assert step.decode is not None and step.prefill is not None
    assert step.decode.context_lens.tolist() == [4] and step.decode.block_tables.tolist()[0][:1] == [1]
    assert step.prefill.query_starts.tolist() == [0, 17, 25] and step.prefill.context_lens.tolist() == [17, 28]
    assert step.prefill.block_tables.tolist() == STEP.block_tables[1:, :2].tolist()
    assert sorted(map(tuple, step.prefill.work_list.tolist())) == [(0, 0), (0, 16), (1, 0)]
    assert step.last_rows is not None and step.last_rows.tolist() == [0, 17, 25]
    assert temperatures.tolist() == STEP.sampling.temperatures.tolist() and draws.dtype == torch.float64


def test_what_a_library_attends_has_no_work_list() -> None:
    plan = dataclasses.replace(PLAN, library_prefill=LibraryPrefill("cudnn", 25, 3))
    step, _, _ = on_device(mixed_inputs(STEP, plan, ops(library=True)))
    assert step.prefill.library.tolist() == [0, 17 * 32, 25 * 32, 25 * 32, 17, 8, 0, 17, 28, 0]
    assert len(step.prefill.work_list) == 0
    few = dataclasses.replace(plan, library_prefill=LibraryPrefill("cudnn", 26, 3))
    step, _, _ = on_device(mixed_inputs(STEP, few, ops(library=True)))
    assert step.prefill.library is None and len(step.prefill.work_list) == 3
