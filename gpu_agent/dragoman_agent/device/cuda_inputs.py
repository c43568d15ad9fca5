"""What a step with prompts has on the device: one array of words, copied at once, and the step's tensors in it."""

from __future__ import annotations

from collections.abc import Sequence
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
from dragoman_agent.pal.plan import CHUNK_GRAPH_FILL, Plan, mixed_graph_sizes
from dragoman_kernels.triton.attention_prefill import prefill_work_list
from dragoman_kernels.triton.step_inputs import resolve_tokens

_ITEM_PROMPTS = 64  # of a graph: as many may end in a work item that is not full

Views = dict[str, Tensor]  # the parts of a step's words, on the device


@dataclass(frozen=True, slots=True, order=True)
class Room:
    """What a graph of a step with prompts holds; a smaller step is padded to it."""

    num_tokens: int
    num_seqs: int
    num_items: int  # of the work list of prefill
    is_ours: bool = True  # our own kernel attends the prompts, not the library
    min_tokens: int = 0  # of a step that it is padded for

    @classmethod
    def all_of(cls, plan: Plan, ops: CudaOps) -> list[Room]:
        """Of each graph that the plan has, rising, those whose prompts the library attends before those where we do."""
        chosen = plan.library_prefill if ops.library is not None else None
        return sorted(
            cls(tokens, seqs, tokens // ops.queries_an_item + min(seqs, _ITEM_PROMPTS), is_ours, _least(tokens, plan))
            for tokens, seqs in mixed_graph_sizes(plan.captured_tokens, plan.max_num_seqs)
            if tokens <= plan.max_batch_tokens
            for is_ours in ((False, True) if chosen is not None and tokens >= chosen.min_tokens else (True,))
        )

    @property
    def samples(self) -> bool:
        """Whether the head and the draw are in the graph: a step that is longer than the host needs gains nothing by that."""
        return not self.min_tokens

    def holds(self, num_tokens: int, num_seqs: int, num_items: int) -> bool:
        """Whether a step of so many fits, and is worth the padding."""
        fits = num_tokens <= self.num_tokens and num_seqs <= self.num_seqs and num_items <= self.num_items
        return fits and num_tokens >= self.min_tokens


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """The words of a step on the host, by part."""

    parts: dict[str, npt.NDArray[Any]]  # int32
    num_decodes: int  # sequences of one query, which come first
    table_width: int  # blocks
    needs_tokens: bool  # of the step before
    library: CudnnAttention | None  # that attends the prompts
    room: Room | None = None  # of the graph that the parts are padded for

    @property
    def num_words(self) -> int:
        """Of all parts."""
        return sum(len(part) for part in self.parts.values())

    def write(self, host: Int32Array) -> None:
        """The parts one after another into `host` [at least num_words]."""
        np.concatenate(list(self.parts.values()), out=host[: self.num_words])

    def views(self, packed: Tensor, sampled_ids: Tensor) -> Views:
        """The parts in `packed` int32, which has the words; tokens of the step before are taken from `sampled_ids`, which a
        graph does itself.
        """
        views: Views = {}
        end = 0
        for name, part in self.parts.items():
            start, end = end, end + len(part)
            views[name] = packed[start:end]
        if self.needs_tokens and self.room is None:
            resolve_tokens(views["token_ids"], sampled_ids)
        views["tables"] = views["tables"].view(-1, self.table_width)
        views["temperatures"] = views["temperatures"].view(torch.float32)
        views["uniforms"] = views["uniforms"].view(torch.float64)
        return views

    def step(self, views: Views, plan: Plan) -> CudaStep:
        """The step, to be run kernel by kernel."""
        tables, lens, count = views["tables"], views["context_lens"], self.num_decodes
        decode = prefill = None
        if count:
            decode = DecodePart(tables[:count], lens[:count], plan.decode_for(count))
        if len(lens) > count:
            library = None if self.library is None else self.library.part(views["library"])
            prefill = PrefillPart(
                tables[count:], views["starts"], lens[count:], views["work"].view(-1, 2), library, first_row=count
            )
        return CudaStep(views["token_ids"], views["last"], views["positions"], views["slots"], decode, prefill)

    def padded_step(self, views: Views, plan: Plan, block_tables: Tensor) -> CudaStep:
        """The step that the graph of `room` runs, whatever the words are; tables lie in `block_tables`, which stay."""
        assert self.room is not None
        num_seqs = self.room.num_seqs
        decode = DecodePart(block_tables[:num_seqs], views["decode_lens"], plan.mixed_decode(num_seqs))
        library = None if self.library is None else self.library.part(views["library"])
        prefill = PrefillPart(block_tables, views["starts"], views["context_lens"], views["work"].view(-1, 2), library)
        filled = self.room.min_tokens
        return CudaStep(views["token_ids"], None, views["positions"], views["slots"], decode, prefill, filled)


def mixed_inputs(batch: StepBatch, plan: Plan, ops: CudaOps, rooms: Sequence[Room] = ()) -> MixedInputs:
    """The words of `batch` as `ops` run it by `plan`: padded for the first of `rooms` that holds it."""
    num_queries = np.diff(batch.query_starts)
    prompts = np.flatnonzero(num_queries > 1)
    num_decodes = int(prompts[0]) if len(prompts) else len(num_queries)
    lens = batch.context_lens[num_decodes:]
    starts = batch.query_starts[num_decodes:] - num_decodes
    width = -(-int(batch.context_lens.max()) // plan.page_size)
    needs_tokens = bool((batch.token_ids < 0).any())
    ends = batch.query_starts[1:] - 1
    sampling = batch.sampling
    rows: dict[str, npt.NDArray[Any]] = {
        "uniforms": uniforms(sampling.seeds, sampling.choices, sampling.cursors),  # first: float64 must lie on 8 bytes
        "temperatures": sampling.temperatures,
        "sampled": ends[batch.sample_seqs].astype(np.int32),
    }
    others: Int32Array = np.concatenate((ends[batch.pool_seqs], batch.score_rows)).astype(np.int32)
    tables = np.ascontiguousarray(batch.block_tables[:, :width]).ravel()
    if rooms and len(batch.token_ids) <= rooms[-1].num_tokens:
        work = prefill_work_list(starts, lens, ops.queries_an_item)
        step = len(batch.token_ids), len(num_queries), len(work)
        theirs = ops.library if ops.library is not None and ops.library.sizes.can_run(starts) else None
        room = next((room for room in rooms if room.holds(*step) and (room.is_ours or theirs is not None)), None)
        if room is not None:
            parts = {name: _filled(row, room.num_seqs).view(np.int32) for name, row in rows.items()}
            parts |= _padded(batch, room, num_decodes, work)
            theirs = None if room.is_ours else theirs
            if theirs is not None:
                parts["library"] = theirs.sizes.words(starts + np.int32(num_decodes), lens)
            parts |= {"last": others, "tables": tables}
            return MixedInputs(parts, num_decodes, width, needs_tokens, theirs, room)
    library = _library_for(starts, plan, ops)
    ours = len(lens) > 0 and library is None  # only our kernel reads a work list
    parts = {
        "uniforms": rows["uniforms"].view(np.int32),
        "temperatures": rows["temperatures"].view(np.int32),
        "last": np.concatenate((rows["sampled"], others)),
        "tables": tables,
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.slot_mapping,
        "context_lens": batch.context_lens,
        "starts": starts,
        "work": prefill_work_list(starts, lens, ops.queries_an_item).ravel() if ours else lens[:0],
    }
    if library is not None:
        parts["library"] = library.sizes.words(starts, lens)
    return MixedInputs(parts, num_decodes, width, needs_tokens, library)


def _padded(batch: StepBatch, room: Room, num_decodes: int, work: Int32Array) -> dict[str, npt.NDArray[Any]]:
    """What a graph reads, each part of one length: rows without a token write into the null block, sequences beyond the
    step's have neither queries nor context, and work items beyond the step's are one of those.
    """
    num_seqs = len(batch.context_lens)
    starts = np.full(room.num_seqs + 2, len(batch.token_ids), np.int32)
    starts[: num_seqs + 1] = batch.query_starts
    items = np.tile(np.array([room.num_seqs, 0], np.int32), (room.num_items, 1))
    items[: len(work)] = work + np.array([num_decodes, 0], np.int32)
    return {
        "token_ids": _filled(batch.token_ids, room.num_tokens),
        "positions": _filled(batch.positions, room.num_tokens),
        "slots": _filled(batch.slot_mapping, room.num_tokens),
        "decode_lens": _filled(batch.context_lens[:num_decodes], room.num_seqs),
        "context_lens": _filled(batch.context_lens, room.num_seqs + 1),
        "starts": starts,
        "work": items.ravel(),
    }


def _least(num_tokens: int, plan: Plan) -> int:
    """Tokens from which on a step is padded to `num_tokens`: any, but where the device is surely slower than the host."""
    return 0 if num_tokens in plan.mixed_graph_tokens else int(CHUNK_GRAPH_FILL * num_tokens)


def _filled(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """With zeros behind."""
    whole = np.zeros(length, array.dtype)
    whole[: len(array)] = array
    return whole


def _library_for(query_starts: Int32Array, plan: Plan, ops: CudaOps) -> CudnnAttention | None:
    """The library where it attends the prompts that start at `query_starts`."""
    chosen, library = plan.library_prefill, ops.library
    if chosen is None or library is None or query_starts[-1] < chosen.min_tokens:
        return None
    return library if library.sizes.can_run(query_starts) else None
