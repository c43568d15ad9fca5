"""A GPU's steps before anybody asks for one: kernels are compiled, graphs captured, steps timed, or left for while it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from dragoman_agent.device.base import DeviceError, LoadProgress, ProgressFn, StepBatch
from dragoman_agent.device.cuda_blocks import CudaBlocks
from dragoman_agent.device.cuda_fixed import FixedOps
from dragoman_agent.device.cuda_graphs import StepGraphs
from dragoman_agent.device.cuda_inputs import MixedInputs, Room, Views, mixed_inputs
from dragoman_agent.device.cuda_ops import CudaOps, CudaStep
from dragoman_agent.device.torch_steps import StepSlot, TorchStepHandle
from dragoman_agent.device.warm_up import (
    FIRST_STEPS,
    decode_batch,
    in_null_block,
    prompt_batch,
    timed_steps,
    timing,
    warm_up_batch,
)
from dragoman_agent.model.llama import LlamaWeights
from dragoman_agent.pal.plan import Plan
from dragoman_kernels.triton.step_inputs import StepInputs


class CudaPrepare(CudaBlocks):
    """Implements PreparingDevice over a device, which sets what is declared here and says how a step runs."""

    prepares_later = False
    info: dict[str, Any]
    _plan: Plan
    _ops: CudaOps
    _weights: LlamaWeights
    _slots: list[StepSlot]
    _packed: Tensor
    _inputs: StepInputs
    _graphs: StepGraphs[int]
    _mixed_graphs: StepGraphs[Room]
    _awaits_sampling: bool
    _run: Callable[[StepBatch], TorchStepHandle]
    _decode_step: Callable[[int, int | None], Tensor]
    _padded_step: Callable[[Room, CudaStep, Views, int | None], Tensor]
    _send: Callable[[MixedInputs, StepSlot], Views]
    _forward: Callable[[CudaStep, int | None], Tensor]

    def prepare(self) -> bool:
        """See PreparingDevice."""
        self._check_loaded()
        if self._awaits_sampling:
            raise DeviceError("Nothing can be prepared while a step waits for its sampling.")
        is_left = False
        try:
            with self._on_stream("preparing for later steps failed on the GPU", self._missing()):
                is_left = next(self._left, False)
        finally:
            if not is_left:
                self.info |= self._prepared()
        return is_left

    def _prepared(self) -> dict[str, Any]:
        """What there is by now, as `info` tells it."""
        return {
            "graph_batch_sizes": list(self._graphs.sizes),
            "mixed_graph_tokens": sorted({room.num_tokens for room in self._mixed_graphs.sizes}),
            "decode_steps": list(self._timed),
            "mixed_step_seconds": self._prompt_seconds,
        }

    def _missing(self) -> str:
        """What was to be made and is not, what that costs, and what to do."""
        num_mixed = len(Room.all_of(self._plan, self._ops)) - len(self._mixed_graphs.sizes)
        num_decode = len(self._decode_sizes()) - len(self._graphs.sizes)
        return (
            f"the GPU has no memory left for {num_decode} graphs of decode and {num_mixed} of steps with prompts, so such steps are "
            "padded further or run kernel by kernel, which is slower; lower --memory-utilization or --max-context, or stop other "
            "processes on the GPU"
        )

    def _decode_sizes(self) -> list[int]:
        """Of the plan's graphs of decode, the largest first."""
        return sorted((size for size in self._plan.graph_batch_sizes if size <= self._plan.max_num_seqs), reverse=True)

    def _order(self) -> tuple[list[int | Room], list[int | Room]]:
        """Graphs that are captured by the load, and those that are left for later.

        What takes most memory comes first, since the graphs share it. Where the rest is left, every decode step runs in the
        largest graph until then, those of one sequence in their own, and steps with prompts kernel by kernel.
        """
        mixed, sizes = sorted(Room.all_of(self._plan, self._ops), reverse=True), self._decode_sizes()
        if not self.prepares_later:
            return [*mixed, *sizes], []
        now = [sizes[0], sizes[-1]] if len(sizes) > 1 else sizes
        return [*now], [*mixed, *sizes[1:-1]]

    def _warm_up(self, progress: ProgressFn) -> None:
        """Compile the kernels with a prefill and a decode step, capture graphs, time steps; the last two in part later."""
        if isinstance(self._ops, FixedOps):
            self._ops.check_tiles(self._weights)
        plan = self._plan
        progress(
            LoadProgress("warmup", 0, 1, "steps")
        )  # who waits here for the kernels knows then what may be left for later
        now, later = self._order()
        total = FIRST_STEPS + len(now)
        # Long enough for a tile without and one with a mask, so that nothing compiles in a user's step.
        chunk = min(200, plan.max_batch_tokens, (plan.num_blocks - 1) * plan.page_size - 1)
        for done, (start, count) in enumerate(((0, chunk), (chunk, 1))):
            progress(LoadProgress("warmup", done, total, "steps"))
            with self._runtime.on(self._stream):
                self._run(warm_up_batch(plan.page_size, start, count)).result()
        if plan.long_prefill is not None:
            self._launch_long(warm_up_batch(plan.page_size, 0, chunk))
        self._runtime.release()  # while a graph is captured nothing can be given back
        for done, size in enumerate(now, FIRST_STEPS):
            progress(LoadProgress("warmup", done, total, "steps"))
            self._capture(size)
        self._runtime.release()  # what the first launches took beside the graphs
        progress(LoadProgress("warmup", total, total, "steps"))
        self._timed: list[tuple[int, int, float]] = []
        self._prompt_seconds: float | None = None
        self._left = self._rest(later)
        if not self.prepares_later:
            with self._runtime.on(self._stream):
                for _ in self._left:
                    pass

    def _launch_long(self, step: StepBatch) -> None:
        """Attend by the launch for long contexts, which no step as small as this takes, so that no user's is its first."""
        inputs = mixed_inputs(step, self._plan, self._ops, is_long=True)
        slot = self._slots[0]
        slot.take_over()
        with self._runtime.on(self._stream):
            self._forward(inputs.step(self._send(inputs, slot), self._plan), 1)
        self._runtime.synchronize()

    def _rest(self, graphs: Sequence[int | Room]) -> Iterator[bool]:
        """A part of the rest between one True and the next; on the stream of the steps."""
        plan = self._plan
        if graphs:
            self._runtime.release()  # what the first requests' steps took: the largest graph is about to take as much
        for size in graphs:
            self._capture(size)
            yield True
        for batch, context in timed_steps(plan) if self._graphs.sizes else ():
            step = in_null_block(decode_batch(plan, batch, context), plan.page_size)
            self._timed.append((batch, context, (yield from timing(self._run, step))))
            yield True
        num_tokens = plan.mixed_timed()
        if num_tokens is not None and self._mixed_graphs.sizes:  # a prompt that fills the graph which the plan predicts
            step = in_null_block(prompt_batch(plan, num_tokens), plan.page_size)
            self._prompt_seconds = yield from timing(self._run, step)

    def _capture(self, size: int | Room) -> None:
        """A graph of decode or of a step with prompts. What its first layers run on is written into the null block."""
        if isinstance(size, Room):
            self._capture_mixed(size)
            return
        with self._runtime.on(self._stream):
            self._packed.zero_()  # a step of no rows
        self._graphs.add(size, partial(self._decode_step, size))

    def _capture_mixed(self, room: Room) -> None:
        """Over words that are there while the first layers run, and again at each replay."""
        page_size = self._plan.page_size
        step = in_null_block(warm_up_batch(page_size, 0, min(2, room.num_tokens)), page_size)
        rooms = (replace(room, min_tokens=0),)
        inputs = mixed_inputs(step, self._plan, self._ops, rooms, is_long=room.is_long)
        slot = self._slots[0]
        slot.take_over()  # its words are some step's, which may not have read them
        with self._runtime.on(self._stream):
            views = self._send(inputs, slot)
        padded = replace(inputs, room=room).padded_step(views, self._plan, self._inputs.block_tables)
        self._mixed_graphs.add(room, partial(self._padded_step, room, padded, views))
