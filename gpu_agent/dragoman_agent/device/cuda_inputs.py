"""What a step with prompts has on the device: one array of words, copied at once, and the step's tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dragoman_agent.device.base import Int32Array, StepBatch
from dragoman_agent.device.cuda_library import CudnnAttention
from dragoman_agent.device.cuda_ops import CudaOps, CudaStep, DecodePart, PrefillPart
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.pal.plan import CHUNK_GRAPH_FILL, DecodeAttention, Plan, PrefillAttention, mixed_graph_sizes
from dragoman_kernels.triton.attention_list import Cut
from dragoman_kernels.triton.attention_prefill import prefill_work_list
from dragoman_kernels.triton.step_inputs import resolve_tokens

_ITEM_PROMPTS = 64  # of a graph: as many may end in a work item that is not full

Views = dict[str, Tensor]  # the parts of a step's words, on the device


@dataclass(frozen=True, slots=True)
class Room:
    """What a graph of a step with prompts holds; a smaller step is padded to it."""

    num_tokens: int
    num_seqs: int
    num_items: int  # of the work list of prefill
    is_ours: bool = True  # our own kernel attends the prompts, not the library
    min_tokens: int = 0  # of a step that it is padded for
    is_long: bool = False  # by the launch for long contexts

    @classmethod
    def all_of(cls, plan: Plan, ops: CudaOps) -> list[Room]:
        """Of each graph that the plan has, rising, those whose prompts the library attends before those where we do."""
        return sorted(
            room
            for tokens, seqs in mixed_graph_sizes(plan.captured_tokens, plan.max_num_seqs)
            if tokens <= plan.max_batch_tokens
            for room in cls._of(tokens, seqs, plan, ops)
        )

    @classmethod
    def _of(cls, tokens: int, seqs: int, plan: Plan, ops: CudaOps) -> Iterator[Room]:
        """One for each way in which prompts of so many tokens may be attended: which it is depends on the step."""
        library, long, least = plan.library_prefill, plan.long_prefill, _least(tokens, plan)
        ends = min(seqs, _ITEM_PROMPTS)
        usual = cls(tokens, seqs, tokens // ops.queries_an_item + ends, min_tokens=least)
        yield usual
        if library is not None and ops.library is not None and tokens >= library.min_tokens:
            yield replace(usual, is_ours=False)
        if long is not None and tokens >= long.fewest_tokens:
            yield replace(usual, num_items=tokens // long.attention.block_m + ends, is_long=True)

    def __lt__(self, other: Room) -> bool:
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, ...]:
        """What is asked first comes first: the library where it may attend."""
        return (self.num_tokens, self.num_seqs, self.is_ours, self.is_long, self.num_items, self.min_tokens)

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
    is_long: bool = False  # our launch for long contexts attends the prompts

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
            decode = decode_part(plan, plan.decode_for(count), tables[:count], lens[:count])
        if len(lens) > count:
            library = None if self.library is None else self.library.part(views["library"])
            prefill = PrefillPart(
                tables[count:], views["starts"], lens[count:], views["work"].view(-1, 2), library, first_row=count,
                launch=self._launch(plan),
            )  # fmt: skip
        return CudaStep(views["token_ids"], views["last"], views["positions"], views["slots"], decode, prefill)

    def padded_step(self, views: Views, plan: Plan, block_tables: Tensor) -> CudaStep:
        """The step that the graph of `room` runs, whatever the words are; tables lie in `block_tables`, which stay."""
        assert self.room is not None
        num_seqs = self.room.num_seqs
        decode = decode_part(plan, plan.mixed_decode(num_seqs), block_tables[:num_seqs], views["decode_lens"])
        library = None if self.library is None else self.library.part(views["library"])
        prefill = PrefillPart(
            block_tables, views["starts"], views["context_lens"], views["work"].view(-1, 2), library,
            launch=self._launch(plan),
        )  # fmt: skip
        filled = self.room.min_tokens
        return CudaStep(views["token_ids"], None, views["positions"], views["slots"], decode, prefill, filled)

    def _launch(self, plan: Plan) -> PrefillAttention | None:
        return plan.long_prefill.attention if self.is_long and plan.long_prefill is not None else None


def decode_part(
    plan: Plan, attention: DecodeAttention, tables: Tensor, lens: Tensor, group_rows: Tensor | None = None
) -> DecodePart:
    """Sequences of one query token with block tables [num_seqs, width] and contexts [num_seqs], by a work list where the plan has
    one for so many.
    """
    found = plan.list_for(len(lens))
    cut = None if found is None else Cut(found.num_items, found.min_tiles, attention.block_n)
    return DecodePart(tables, lens, attention, group_rows, cut)


def mixed_inputs(
    batch: StepBatch, plan: Plan, ops: CudaOps, rooms: Sequence[Room] = (), *, is_long: bool | None = None
) -> MixedInputs:
    """The words of `batch` as `ops` run it by `plan`: padded for the first of `rooms` that holds it. `is_long`: whether by the
    launch for long contexts; None: as the plan has it for such prompts.
    """
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
    is_long = _looks_back(starts, lens, plan) if is_long is None else is_long
    if rooms and len(batch.token_ids) <= rooms[-1].num_tokens:
        theirs = ops.library if ops.library is not None and ops.library.sizes.can_run(starts) else None
        works = _Works(starts, lens, plan, ops)
        step = len(batch.token_ids), len(num_queries)
        room = _room_for(rooms, step, works, is_long=is_long, has_library=theirs is not None)
        if room is not None:
            parts = {name: _filled(row, room.num_seqs).view(np.int32) for name, row in rows.items()}
            parts |= _padded(batch, room, num_decodes, works[room.is_long])
            theirs = None if room.is_ours else theirs
            if theirs is not None:
                parts["library"] = theirs.sizes.words(starts + np.int32(num_decodes), lens)
            parts |= {"last": others, "tables": tables}
            return MixedInputs(parts, num_decodes, width, needs_tokens, theirs, room, room.is_long)
    library = _library_for(starts, plan, ops)
    ours = len(lens) > 0 and library is None  # only our kernel reads a work list
    items = _queries_an_item(plan, ops, is_long=is_long)
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
        "work": prefill_work_list(starts, lens, items).ravel() if ours else lens[:0],
    }
    if library is not None:
        parts["library"] = library.sizes.words(starts, lens)
    return MixedInputs(parts, num_decodes, width, needs_tokens, library, is_long=is_long)


class _Works(dict[bool, Int32Array]):
    """The work lists of one step's prompts by the usual launch and by that for long contexts, each made when it is asked for."""

    def __init__(self, starts: Int32Array, lens: Int32Array, plan: Plan, ops: CudaOps) -> None:
        super().__init__()
        self._step, self._plan, self._ops = (starts, lens), plan, ops

    def __missing__(self, is_long: bool) -> Int32Array:
        self[is_long] = prefill_work_list(*self._step, _queries_an_item(self._plan, self._ops, is_long=is_long))
        return self[is_long]


def _room_for(
    rooms: Sequence[Room], step: tuple[int, int], works: Mapping[bool, Int32Array], *, is_long: bool, has_library: bool
) -> Room | None:
    """The first that holds a `step` of so many tokens and sequences and attends it as it should be. A graph by the usual launch
    will do where there is none by the one for long contexts yet.
    """

    def first(is_long: bool) -> Room | None:
        return next(
            (
                room
                for room in rooms
                if (room.is_long == is_long if room.is_ours else has_library)
                and room.holds(*step, len(works[room.is_long]))
            ),
            None,
        )

    return (first(True) if is_long else None) or first(False)


def _looks_back(starts: Int32Array, lens: Int32Array, plan: Plan) -> bool:
    """Whether the prompts that start at `starts` [num_seqs + 1], with contexts `lens`, take the launch for long contexts."""
    long, num_tokens = plan.long_prefill, int(starts[-1])
    if long is None or num_tokens < long.fewest_tokens:
        return False
    counts = np.diff(starts).astype(np.int64)
    num_seen = int(counts @ (2 * lens - counts + 1)) // 2  # see seen_tokens
    return long.takes(num_tokens, num_seen, int((-(-counts // long.attention.block_m)).sum()))


def _queries_an_item(plan: Plan, ops: CudaOps, *, is_long: bool) -> int:
    """Of the work list of prefill."""
    return plan.long_prefill.attention.block_m if is_long and plan.long_prefill is not None else ops.queries_an_item


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
