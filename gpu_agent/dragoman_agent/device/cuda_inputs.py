"""What a step with prompts has on the device: one array of words, copied at once, and the step's tensors in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dragoman_agent.device.base import Int32Array, StepBatch
from dragoman_agent.device.cuda_library import CudnnAttention
from dragoman_agent.device.cuda_ops import CudaOps, CudaStep, DecodePart, PrefillPart
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.pal.plan import Plan
from dragoman_kernels.triton.attention_prefill import prefill_work_list
from dragoman_kernels.triton.step_inputs import resolve_tokens


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """The words of a step on the host, by part."""

    parts: dict[str, npt.NDArray[Any]]  # int32
    num_decodes: int  # sequences of one query, which come first
    table_width: int  # blocks
    needs_tokens: bool  # of the step before
    library: CudnnAttention | None  # that attends the prompts

    @property
    def num_words(self) -> int:
        """Of all parts."""
        return sum(len(part) for part in self.parts.values())

    def write(self, host: Int32Array) -> None:
        """The parts one after another into `host` [at least num_words]."""
        np.concatenate(list(self.parts.values()), out=host[: self.num_words])

    def on_device(self, packed: Tensor, sampled_ids: Tensor, plan: Plan) -> tuple[CudaStep, Tensor, Tensor]:
        """The step, its temperatures and draws in `packed` int32, which has the words; tokens of the step before are
        taken from `sampled_ids`.
        """
        views: dict[str, Tensor] = {}
        end = 0
        for name, part in self.parts.items():
            start, end = end, end + len(part)
            views[name] = packed[start:end]
        if self.needs_tokens:
            resolve_tokens(views["token_ids"], sampled_ids)
        tables, lens, count = views["tables"].view(-1, self.table_width), views["context_lens"], self.num_decodes
        decode = prefill = None
        if count:
            decode = DecodePart(tables[:count], lens[:count], plan.decode_for(count))
        if len(lens) > count:
            library = None if self.library is None else self.library.part(views["library"], tables[count:])
            prefill = PrefillPart(tables[count:], views["starts"], lens[count:], views["work"].view(-1, 2), library)
        step = CudaStep(views["token_ids"], views["last"], views["positions"], views["slots"], decode, prefill)
        return step, views["temperatures"].view(torch.float32), views["uniforms"].view(torch.float64)


def mixed_inputs(batch: StepBatch, plan: Plan, ops: CudaOps) -> MixedInputs:
    """The words of `batch` as `ops` run it by `plan`."""
    num_queries = np.diff(batch.query_starts)
    others = np.flatnonzero(num_queries > 1)
    num_decodes = int(others[0]) if len(others) else len(num_queries)
    starts = batch.query_starts[num_decodes:] - num_decodes
    lens = batch.context_lens[num_decodes:]
    width = -(-int(batch.context_lens.max()) // plan.page_size)
    last = batch.query_starts[1:][np.concatenate((batch.sample_seqs, batch.pool_seqs))] - 1
    sampling = batch.sampling
    draws = uniforms(sampling.seeds, sampling.choices, sampling.cursors)
    library = _library_for(starts, plan, ops)
    ours = len(lens) > 0 and library is None  # only our kernel reads a work list
    parts: dict[str, npt.NDArray[Any]] = {
        "uniforms": draws.view(np.int32),  # first: float64 must lie on 8 bytes
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.slot_mapping,
        "context_lens": batch.context_lens,
        "starts": starts,
        "last": np.concatenate((last, batch.score_rows)).astype(np.int32),
        "temperatures": sampling.temperatures.view(np.int32),
        "tables": np.ascontiguousarray(batch.block_tables[:, :width]).ravel(),
        "work": prefill_work_list(starts, lens, ops.queries_an_item).ravel() if ours else lens[:0],
    }
    if library is not None:
        parts["library"] = library.sizes.words(starts, lens)
    return MixedInputs(parts, num_decodes, width, bool((batch.token_ids < 0).any()), library)


def _library_for(query_starts: Int32Array, plan: Plan, ops: CudaOps) -> CudnnAttention | None:
    """The library where it attends the prompts that start at `query_starts`."""
    chosen, library = plan.library_prefill, ops.library
    if chosen is None or library is None or query_starts[-1] < chosen.min_tokens:
        return None
    return library if library.sizes.can_run(query_starts) else None
