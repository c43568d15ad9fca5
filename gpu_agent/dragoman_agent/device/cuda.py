"""The GPU backend: one model in the device's memory, a graph for each decode batch size, steps in order on one stream.

`cuda` is the one that was tested; `hip.py` and `xpu.py` differ from it by what torch_runtime.py says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, TypeVar

import numpy as np
import torch

from dragoman_agent.device.base import (
    DeviceError,
    LoadProgress,
    ProgressFn,
    SamplingBatch,
    StepBatch,
)
from dragoman_agent.device.checks import SoundDecode, check_batch, check_loadable
from dragoman_agent.device.cuda_float8 import find_scales
from dragoman_agent.device.cuda_graphs import StepGraphs
from dragoman_agent.device.cuda_groups import GroupWords
from dragoman_agent.device.cuda_inputs import MixedInputs, Room, Views, decode_part, mixed_inputs
from dragoman_agent.device.cuda_make import make_ops
from dragoman_agent.device.cuda_ops import CudaStep
from dragoman_agent.device.cuda_prepare import CudaPrepare
from dragoman_agent.device.cuda_redraw import Redraw
from dragoman_agent.device.cuda_weights import load_weights
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.torch_runtime import Runtime, Stream, open_runtime
from dragoman_agent.device.torch_steps import Heads, Scores, StepSlot, TorchStepHandle, score_hidden
from dragoman_agent.engine.philox import UniformsAhead
from dragoman_agent.engine.sampler import Sampled, logprobs_of
from dragoman_agent.engine.sampling_terms import is_edited
from dragoman_agent.model.layers import PagedCache
from dragoman_agent.model.llama import LlamaWeights, forward
from dragoman_agent.model.rope import rope_frequencies
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import KV_FLOAT8, Plan
from dragoman_kernels.triton.filters import Drawn
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows
from dragoman_kernels.triton.step_inputs import HEAD_WORDS, StepInputs, resolve_tokens

log = logging.getLogger(__name__)

T = TypeVar("T")

_NEVER: tuple[Any, ...] = (None,) * 5  # no step is known by it
_RING = 3  # steps whose host buffers may be under way at once
_HELD = ("_left", "_copier", "_graphs", "_mixed_graphs", "_mixed_logits", "_cache", "_weights", "_logits", "_ops", "_inputs", "_group_words", "_sampling", "_redraw", "_drawn", "_decode_drawn", "_results", "_sampled_ids", "_finite", "_packed", "_packed_heads", "_slots")  # fmt: skip


class CudaDevice(CudaPrepare):
    """Implements Device."""

    kind = "cuda"
    samples_late = True
    library = "cuBLAS"  # whose matrix products are used
    dtype = torch.bfloat16  # of weights, K and V

    def __init__(self, index: int = 0, runtime: Runtime | None = None) -> None:
        """Raises DeviceError when the device cannot be opened."""
        self._runtime: Runtime = runtime or open_runtime(self.kind, index)
        self._device = self._runtime.device
        self.errors = self._runtime.errors
        # What is wrong with the data, and with the device: torch, Triton and libraries raise RuntimeError for that.
        self._wrong: tuple[type[Exception], ...] = (ValueError, RuntimeError)
        self.info: dict[str, Any] = {}
        self._loaded = self._closed = False

    # Loading.

    def load(self, model: ModelSource, plan: Plan, progress: ProgressFn) -> None:
        """See Device."""
        check_loadable(self.kind, plan, loaded=self._loaded, closed=self._closed)
        started = time.monotonic()
        self._config, self._plan = model.config, plan
        try:
            self._runtime.activate()
            with torch.inference_mode():
                self._weights: LlamaWeights = self._read_weights(model, progress)
                loaded = time.monotonic()
                self._take_memory(progress)
                self._warm_up(progress)
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{model.name} does not fit on the GPU: {first_line(error)} "
                "Lower --memory-utilization or --max-context, or stop other processes on the GPU."
            ) from error
        except self._wrong as error:
            raise DeviceError(f"The model {model.name} cannot be loaded on the GPU: {first_line(error)}") from error
        else:
            self._loaded = True
        finally:
            if not self._loaded:
                self._release()
        seconds = loaded - started
        self.info = {
            "road": plan.road,
            "road_detail": f"{self._kernels()} on {self._runtime.name()}",
            "weight_bytes": model.total_bytes,
            "load_seconds": time.monotonic() - started,
            "weights_gb_per_second": round(model.total_bytes / seconds / 1e9, 2),
            **self._prepared(),
        }
        if self._cache.scales:
            self.info["kv_scales"] = [list(pair) for pair in self._cache.scales]

    def _kernels(self) -> str:
        if self._plan.deterministic:
            return "Triton kernels alone, each sum in one order,"
        return f"Triton kernels and {self.library}"

    def _read_weights(self, model: ModelSource, progress: ProgressFn) -> LlamaWeights:
        return load_weights(model, self._device, progress)

    def _take_memory(self, progress: ProgressFn) -> None:
        """The arena, taken once, and every buffer a step needs."""
        config, plan, device = self._config, self._plan, self._device
        progress(LoadProgress("kv", 0, plan.num_blocks, "steps"))
        frequencies, factor = rope_frequencies(config)
        angles = torch.outer(
            torch.arange(plan.max_context_tokens, dtype=torch.float64), torch.from_numpy(frequencies).double()
        )
        cos, sin = ((table * factor).float().to(device) for table in (angles.cos(), angles.sin()))
        # A multiple of 4, so that both rows of the results lie on 16 bytes: the kernel that writes them is compiled for that.
        rows = -(-max(plan.max_num_seqs, plan.min_gemm_rows) // 4) * 4
        self._stream: Stream = self._runtime.new_stream()
        self._ops = make_ops(config, plan, cos, sin, rows, self._stream)
        self._cache = self._make_cache()
        progress(LoadProgress("kv", plan.num_blocks, plan.num_blocks, "steps"))
        self._max_num_blocks = -(-plan.max_context_tokens // plan.page_size) + 1
        self._inputs = StepInputs(rows, self._max_num_blocks, device)
        self._group_words = GroupWords(plan.short_groups, device)
        self._sampling = SamplingWorkspace(rows, config.vocab_size, device)
        self._redraw = Redraw(plan.max_num_seqs, config.vocab_size, device)
        self._results = torch.zeros((2, rows), dtype=torch.int32, device=device)
        self._sampled_ids, self._finite = self._results
        self._decode_drawn = Drawn(self._inputs.temperatures, self._inputs.uniforms, self._sampled_ids, self._finite)
        words = 5 * plan.max_batch_tokens + rows * (self._max_num_blocks + 16) + 1024
        # Steps of decode copy to these outside of the mode, which costs the host to enter.
        with torch.inference_mode(False):
            reading = self._runtime.new_stream()
            self._slots = [StepSlot(self._runtime, reading, words, rows) for _ in range(_RING)]
            self._packed = torch.zeros(words, dtype=torch.int32, device=device)
            self._packed_heads = Heads(self._packed)
        self._serial = 0
        self._awaits_sampling = False
        self._uniforms = UniformsAhead()
        self._plain = _NEVER  # what the newest step that had nothing to ask for is known by
        self._sound: SoundDecode | None = None  # see check_batch
        self._num_sampled = 0  # rows of the newest step's result, which the next may refer to
        self._graphs: StepGraphs[int] = StepGraphs(self._runtime, self._stream)  # of decode, by sequences
        # Of steps with prompts, beside which sequences may decode.
        self._mixed_graphs: StepGraphs[Room] = StepGraphs(self._runtime, self._stream, self._graphs)
        seqs = plan.max_num_seqs if plan.captured_tokens else 0
        self._mixed_logits = torch.zeros((seqs, config.vocab_size), dtype=self.dtype, device=device)  # of each of them
        self._runtime.synchronize()  # what was filled so far was in another stream

    def _make_cache(self) -> PagedCache:
        """The arena; scales first where it is kept in eight bits, since finding them takes a layer's K and V as they are."""
        config, plan, device = self._config, self._plan, self._device
        size = (config.num_layers, plan.num_blocks, config.num_kv_heads, plan.page_size, config.head_dim)
        if plan.kv_dtype != KV_FLOAT8:
            return PagedCache(
                torch.zeros(size, dtype=self.dtype, device=device), torch.zeros(size, dtype=self.dtype, device=device)
            )
        scales = find_scales(
            config, self._weights, self._ops, plan.page_size,
            min(plan.max_batch_tokens, plan.max_context_tokens), self.dtype,
        )  # fmt: skip
        keys, values = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in "kv")
        return PagedCache(keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn), scales)

    # Steps.

    def submit(self, batch: StepBatch) -> TorchStepHandle:
        """See Device."""
        self._check_loaded()
        try:
            self._sound = check_batch(batch, self._config, self._plan, self._num_sampled, self._sound)
        except ValueError as error:
            raise DeviceError(f"Step {batch.step} is malformed: {error}") from error
        if self._awaits_sampling:
            raise DeviceError(f"Step {batch.step} was submitted before the sampling of the step before was supplied.")
        return self._queue(batch, partial(self._run, batch))

    def _queue(self, batch: StepBatch, work: Callable[[], T]) -> T:
        """`work` of a step on the stream of the steps, where the thread stays."""
        try:
            self._runtime.stay_on(self._stream)
            return work()
        except self._wrong as error:
            no_room = f"a step of {len(batch.token_ids)} tokens does not fit"
            self._fail(error, f"Step {batch.step} failed on the GPU", no_room)

    def group_rows(self, rows: int) -> None:
        """See GroupingDevice."""
        self._check_loaded()
        self._group_words.want(rows)

    def last_logits(self) -> torch.Tensor:
        """Logits [num_samples, vocab_size] bfloat16 of the last step; the next step overwrites them. For checks."""
        self._stream.synchronize()
        return self._logits

    def close(self) -> None:
        """See Device."""
        self._loaded, self._closed = False, True
        self._release()

    def _release(self) -> None:
        """Let go of everything a load took; a device that has failed is left as it is."""
        with suppress(*self.errors):
            if hasattr(self, "_stream"):
                self._runtime.synchronize()
            for name in _HELD:
                self.__dict__.pop(name, None)
            self._runtime.release()

    def _run(self, batch: StepBatch) -> TorchStepHandle:
        """Queue a step; on the stream of the steps."""
        slot = self._slots[self._serial % _RING]
        self._serial += 1
        slot.take_over()
        num_seqs, num_rows = len(batch.context_lens), len(batch.sample_seqs)
        is_decode = len(batch.token_ids) == num_seqs == num_rows and not len(batch.pool_seqs) + len(batch.score_rows)
        slot.begin.record(self._stream)
        pooled: torch.Tensor | None = None
        scores: Scores | None = None
        if is_decode and (size := self._graphs.at_least(num_seqs)) is not None:
            self._fill_decode(batch, slot)
            self._group_words.write()
            logits = self._graphs.replay(size)
            self._drawn = self._decode_drawn
        else:
            with torch.inference_mode():
                logits, hidden = self._mixed_step(batch, slot)
                pooled = hidden[: len(batch.pool_seqs)].float() if len(batch.pool_seqs) else None
                if len(batch.score_rows):
                    scores = score_hidden(hidden[len(batch.pool_seqs) :], batch, self._head)
        self._logits = logits
        self._num_sampled = num_rows
        self._awaits_sampling = batch.sampling_follows
        if batch.sampling_follows:
            finish = partial(self._finish_later, batch, slot, logits)
            return TorchStepHandle(slot, self.errors, num_rows, pooled, scores, finish=finish)
        sampled = self._finish(slot, logits, batch.sampling)
        return TorchStepHandle(slot, self.errors, num_rows, pooled, scores, sampled)

    def _finish_later(
        self, batch: StepBatch, slot: StepSlot, logits: torch.Tensor, sampling: SamplingBatch
    ) -> Sampled | None:
        self._awaits_sampling = False
        return self._queue(batch, partial(self._finish, slot, logits, sampling))

    def _finish(self, slot: StepSlot, logits: torch.Tensor, sampling: SamplingBatch) -> Sampled | None:
        """Draw what is left to draw and send the results to the host; on the stream of the steps."""
        # Nobody writes to the arrays of a batch: rows that had nothing to ask for have nothing while these are the same.
        is_plain = all(map(is_, _asked(sampling), self._plain)) and not is_edited(sampling)
        sampled = None if is_plain else self._draw_others(logits, sampling)
        slot.results.copy_(self._results, non_blocking=True)
        slot.end.record(self._stream)
        return sampled

    def _draw_others(self, logits: torch.Tensor, sampling: SamplingBatch) -> Sampled | None:
        """Draw again what temperature alone does not draw; the logprobs that rows ask for."""
        with torch.inference_mode():
            # The others keep what the kernel drew: how a row is drawn must not depend on its neighbours.
            is_drawn = bool(len(sampling.temperatures)) and self._redraw.draw(
                logits, sampling, self._sampling, self._drawn
            )
            sampled = logprobs_of(logits, self._sampled_ids, self._finite, sampling)
        self._plain = _NEVER if is_drawn or sampled is not None else _asked(sampling)
        return sampled

    def _fill_decode(self, batch: StepBatch, slot: StepSlot) -> None:
        """One copy to the device, which the graph spreads over the static arrays."""
        sampling, tables = batch.sampling, batch.block_tables[:, : self._max_num_blocks]
        num_rows, width = tables.shape
        draws = self._uniforms.draw(sampling.seeds, sampling.choices, sampling.cursors)
        words = HEAD_WORDS + num_rows * (7 + width)
        slot.host[0], slot.host[1] = num_rows, width
        parts = (
            batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens, sampling.temperatures.view(np.int32),
            draws.view(np.int32), tables.reshape(-1),
        )  # fmt: skip
        np.concatenate(parts, out=slot.host[HEAD_WORDS:words])
        self._packed_heads.of(words).copy_(slot.staging_heads.of(words), non_blocking=True)

    def _decode_step(self, size: int, max_num_layers: int | None = None) -> torch.Tensor:
        """Unpack the step's words, forward and sample `size` rows; logits [size, vocab_size].

        With `max_num_layers` through the first layers alone: what they compute is of no use, what they launch is.
        """
        inputs = self._inputs
        rows = max(size, self._plan.min_gemm_rows)
        inputs.unpack(self._packed, self._sampled_ids, rows)
        part = decode_part(
            self._plan,
            self._plan.decode_for(size),
            inputs.block_tables[:size],
            inputs.context_lens[:size],
            self._group_words.of(size),
        )
        num_filled = size if rows > size else None
        step = CudaStep(
            inputs.token_ids[:rows], None, inputs.positions[:rows], inputs.slots[:rows], part, None, num_filled
        )
        self._ops.dependent = dependent = size <= self._plan.dependent_max_batch
        try:
            hidden = self._forward(step, max_num_layers)
            logits = self._head(hidden)[:size]
        finally:
            self._ops.dependent = False
        sample_rows(
            logits, inputs.temperatures, inputs.uniforms, self._sampling, self._results[0], self._results[1],
            dependent=dependent,
        )  # fmt: skip
        return logits

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._ops.linear(hidden, self._weights.head, None)

    def _forward(self, step: CudaStep, max_num_layers: int | None = None) -> torch.Tensor:
        config, weights = self._config, self._weights
        if max_num_layers is not None:
            weights = replace(weights, layers=weights.layers[:max_num_layers])
            config = replace(config, num_layers=len(weights.layers))
        return forward(config, weights, self._cache, step, self._ops)

    def _send(self, inputs: MixedInputs, slot: StepSlot) -> Views:
        """The step's words on the device, its tables also where the graphs read them."""
        words = inputs.num_words
        if words > len(self._packed):
            raise DeviceError(f"a step needs {words} words of metadata, {len(self._packed)} were planned")
        inputs.write(slot.host)
        self._packed_heads.of(words).copy_(slot.staging_heads.of(words), non_blocking=True)
        views = inputs.views(self._packed, self._sampled_ids)
        if inputs.library is not None:
            inputs.library.take_tables(views["tables"][inputs.num_decodes :])
        if inputs.room is not None:
            num_seqs, width = views["tables"].shape
            self._inputs.block_tables[:num_seqs, :width].copy_(views["tables"])
        return views

    def _mixed_step(self, batch: StepBatch, slot: StepSlot) -> tuple[torch.Tensor, torch.Tensor]:
        """A step with prefill, by a graph or kernel by kernel; logits of the sampled rows, hidden states of the pooled and scored ones."""
        inputs = mixed_inputs(batch, self._plan, self._ops, self._mixed_graphs.sizes)
        views = self._send(inputs, slot)
        self._drawn = Drawn(views["temperatures"], views["uniforms"], self._sampled_ids, self._finite)
        num_rows, room = len(batch.sample_seqs), inputs.room
        if room is None:
            hidden = self._forward(inputs.step(views, self._plan))
            rows, others = hidden[:num_rows], hidden[num_rows:]
        else:
            hidden = self._mixed_graphs.replay(room)
            others = hidden[views["last"]] if len(views["last"]) else hidden[:0]
            if room.samples:
                return self._mixed_logits[:num_rows], others
            rows = hidden[views["sampled"][:num_rows]]
        if not num_rows:  # a prompt's middle, or texts to embed: the head need not be read
            return hidden.new_empty((0, self._config.vocab_size)), others
        logits = self._head(rows)
        self._draw(logits, views)
        return logits, others

    def _draw(self, logits: torch.Tensor, views: Views) -> None:
        """A token of each row of `logits`, into the results."""
        sample_rows(
            logits, views["temperatures"], views["uniforms"], self._sampling, self._results[0], self._results[1]
        )

    def _padded_step(self, room: Room, step: CudaStep, views: Views, max_num_layers: int | None = None) -> torch.Tensor:
        """What the graph of `room` runs, logits and tokens of its sequences included; hidden states of all rows."""
        resolve_tokens(views["token_ids"], self._sampled_ids)
        if max_num_layers is not None:  # the first layers run on fewer tokens than any step of the graph
            step = replace(step, num_filled=0)
        hidden = self._forward(step, max_num_layers)
        if room.samples:
            logits = self._mixed_logits[: room.num_seqs]
            logits.copy_(self._head(hidden[views["sampled"]]))
            self._draw(logits, views)
        return hidden


def _asked(sampling: SamplingBatch) -> tuple[Any, ...]:
    """The arrays that say whether a row asks for more than a draw by temperature, where nothing edits its logits."""
    return sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps, sampling.num_logprobs
