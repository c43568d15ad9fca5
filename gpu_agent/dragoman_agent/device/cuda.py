"""The GPU backend: one model in the device's memory, a graph for each decode batch size, steps in order on one stream.

`cuda` is the one that was tested; `hip.py` and `xpu.py` differ from it by what torch_runtime.py says.
"""

from __future__ import annotations

import logging
import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from dragoman_agent.device.base import (
    DeviceError,
    DeviceMemoryError,
    LoadProgress,
    ProgressFn,
    SamplingBatch,
    StepBatch,
)
from dragoman_agent.device.checks import check_batch, check_loadable
from dragoman_agent.device.cuda_blocks import CudaBlocks
from dragoman_agent.device.cuda_fixed import FixedOps
from dragoman_agent.device.cuda_float8 import find_scales
from dragoman_agent.device.cuda_inputs import mixed_inputs
from dragoman_agent.device.cuda_make import make_ops
from dragoman_agent.device.cuda_ops import CudaStep, DecodePart
from dragoman_agent.device.cuda_weights import load_weights
from dragoman_agent.device.torch_runtime import Graph, Runtime, Stream, open_runtime
from dragoman_agent.device.torch_steps import Heads, Scores, StepSlot, TorchStepHandle
from dragoman_agent.device.warm_up import decode_batch, timed_steps, warm_up_batch
from dragoman_agent.engine.packed_copy import send
from dragoman_agent.engine.philox import UniformsAhead
from dragoman_agent.engine.sampler import Sampled, sample_some, score
from dragoman_agent.engine.sampling_terms import GREEDY_BELOW
from dragoman_agent.model.layers import PagedCache
from dragoman_agent.model.llama import LlamaWeights, forward
from dragoman_agent.model.rope import rope_frequencies
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import KV_FLOAT8, Plan
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows
from dragoman_kernels.triton.step_inputs import StepInputs

log = logging.getLogger(__name__)

_NUM_TIMED = 4  # steps of each shape, the first of them not counted
_NUM_TIMED_LONG = 3  # of long steps: how much they differ is a matter of microseconds
_LONG_STEP_SECONDS = 5e-3
_NUM_WARM_LAYERS = 2  # one after another, as all the others are
_SCORED_AT_ONCE = 64  # rows: bounds the scratch to 64 * vocab_size * ~30 bytes
_RING = 3  # steps whose host buffers may be under way at once
_HELD = ("_copier", "_graphs", "_cache", "_weights", "_logits", "_ops", "_inputs", "_sampling", "_results", "_sampled_ids", "_packed", "_packed_heads", "_slots")  # fmt: skip


class CudaDevice(CudaBlocks):
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
        # What is wrong with the data, and with the device.
        self._wrong: tuple[type[Exception], ...] = (ValueError, torch.OutOfMemoryError, *self.errors)
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
                timed = self._time_steps()
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"{model.name} does not fit on the GPU: {str(error).splitlines()[0]} "
                "Lower --memory-utilization or --max-context, or stop other processes on the GPU."
            ) from error
        except self._wrong as error:
            raise DeviceError(f"The model {model.name} cannot be loaded on the GPU: {error}") from error
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
            "graph_batch_sizes": list(self._graphs),
            "decode_steps": timed,
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
        rows = max(plan.max_num_seqs, plan.min_gemm_rows)
        self._stream: Stream = self._runtime.new_stream()
        self._ops = make_ops(config, plan, cos, sin, rows, self._stream)
        self._cache = self._make_cache()
        progress(LoadProgress("kv", plan.num_blocks, plan.num_blocks, "steps"))
        self._max_num_blocks = -(-plan.max_context_tokens // plan.page_size) + 1
        self._inputs = StepInputs(rows, self._max_num_blocks, device)
        self._sampling = SamplingWorkspace(rows, config.vocab_size, device)
        self._results = torch.zeros((2, rows), dtype=torch.int32, device=device)
        self._sampled_ids = self._results[0]
        words = 5 * plan.max_batch_tokens + rows * (self._max_num_blocks + 16) + 1024
        self._slots = [StepSlot(self._runtime, words, rows) for _ in range(_RING)]
        self._packed = torch.zeros(words, dtype=torch.int32, device=device)
        self._packed_heads = Heads(self._packed)
        self._serial = 0
        self._awaits_sampling = False
        self._uniforms = UniformsAhead()
        self._num_sampled = 0  # rows of the newest step's result, which the next may refer to
        self._graphs: dict[int, tuple[Graph, torch.Tensor]] = {}
        self._graph_sizes: list[int] = []  # of `_graphs`, rising

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

    def _warm_up(self, progress: ProgressFn) -> None:
        """Compile the kernels with a prefill and a decode step, then capture the graphs, largest first."""
        if isinstance(self._ops, FixedOps):
            self._ops.check_tiles(self._weights)
        sizes = sorted((s for s in self._plan.graph_batch_sizes if s <= self._plan.max_num_seqs), reverse=True)
        total = 2 + len(sizes)
        # Long enough for a tile without and one with a mask, so that nothing compiles in a user's step.
        chunk = min(200, self._plan.max_batch_tokens, (self._plan.num_blocks - 1) * self._plan.page_size - 1)
        for done, (start, count) in enumerate(((0, chunk), (chunk, 1))):
            progress(LoadProgress("warmup", done, total, "steps"))
            with self._runtime.on(self._stream):
                self._run(warm_up_batch(self._plan.page_size, start, count)).result()
        for done, size in enumerate(sizes, 2):
            progress(LoadProgress("warmup", done, total, "steps"))
            self._capture(size)
        progress(LoadProgress("warmup", total, total, "steps"))

    def _time_steps(self) -> list[tuple[int, int, float]]:
        """(batch, context, median device seconds) of decode steps, for the step model: under a second in all."""
        found = []
        for batch, context in timed_steps(self._plan) if self._graphs else ():
            step = decode_batch(self._plan, batch, context)
            with self._runtime.on(self._stream):
                handles = [self._run(step)]
                seconds: list[float] = []
                while len(seconds) < (
                    _NUM_TIMED_LONG if min(seconds, default=0.0) > _LONG_STEP_SECONDS else _NUM_TIMED
                ):
                    handles.append(self._run(step))  # behind the one that is waited for, as in service
                    seconds.append(handles.pop(0).result().seconds)
                handles.pop().result()
            found.append((batch, context, statistics.median(seconds[1:])))
        return found

    def _capture(self, size: int) -> None:
        with self._runtime.on(self._stream):
            self._decode_step(size, _NUM_WARM_LAYERS)  # compiles what this size needs, the same in each layer
        self._runtime.synchronize()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        self._graphs[size] = self._runtime.capture(self._stream, partial(self._decode_step, size), pool)
        insort(self._graph_sizes, size)

    # Steps.

    def submit(self, batch: StepBatch) -> TorchStepHandle:
        """See Device."""
        self._check_loaded()
        try:
            check_batch(batch, self._config, self._plan, self._num_sampled)
        except ValueError as error:
            raise DeviceError(f"Step {batch.step} is malformed: {error}") from error
        if self._awaits_sampling:
            raise DeviceError(f"Step {batch.step} was submitted before the sampling of the step before was supplied.")
        with self._stepping(batch):
            return self._run(batch)

    @contextmanager
    def _stepping(self, batch: StepBatch) -> Iterator[None]:
        """On the stream of the steps, entered once a step; what goes wrong inside is a DeviceError."""
        try:
            with torch.inference_mode(), self._runtime.on(self._stream):
                yield
        except DeviceError:
            raise
        except torch.OutOfMemoryError as error:
            self._release_unused()
            raise DeviceMemoryError(
                f"a step of {len(batch.token_ids)} tokens does not fit: {str(error).splitlines()[0]}"
            ) from None
        except self._wrong as error:
            raise DeviceError(f"Step {batch.step} failed on the GPU: {str(error).splitlines()[0]}") from error

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
        if is_decode and (nth := bisect_left(self._graph_sizes, num_seqs)) < len(self._graph_sizes):
            size = self._graph_sizes[nth]
            self._fill_decode(batch, slot, max(size, self._plan.min_gemm_rows))
            graph, logits = self._graphs[size]
            graph.replay()
        else:
            logits, hidden = self._mixed_step(batch, slot)
            pooled = hidden[: len(batch.pool_seqs)].float() if len(batch.pool_seqs) else None
            if len(batch.score_rows):
                scores = self._score(hidden[len(batch.pool_seqs) :], batch)
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
        with self._stepping(batch):
            return self._finish(slot, logits, sampling)

    def _finish(self, slot: StepSlot, logits: torch.Tensor, sampling: SamplingBatch) -> Sampled | None:
        """Sample what the kernel has not, and send the results to the host; on the stream of the steps."""
        sampled = None
        # The others keep what the kernel drew: how a row is drawn must not depend on its neighbours.
        picked = _rows_to_sample(sampling)
        if len(picked):
            sampled = sample_some(logits, sampling, picked)
            rows = send({"rows": picked}, self._device)["rows"]
            self._results[0, rows] = sampled.token_ids[rows].int()
            self._results[1, rows] = sampled.finite[rows].int()
        slot.results.copy_(self._results, non_blocking=True)
        slot.end.record(self._stream)
        return sampled

    def _score(self, hidden: torch.Tensor, batch: StepBatch) -> Scores:
        """Logprobs of `score_targets`, a few rows at a time: logits of a whole prompt would take gigabytes."""
        targets = torch.from_numpy(batch.score_targets).to(self._device).long()
        parts = []
        for start in range(0, len(hidden), _SCORED_AT_ONCE):
            rows = slice(start, start + _SCORED_AT_ONCE)
            logits = self._ops.linear(hidden[rows], self._weights.head, None).float()
            parts.append(score(logits, targets[rows], batch.num_score_logprobs))
        logprobs = torch.cat([own for own, _, _ in parts])
        top = [(ids, values) for _, ids, values in parts if ids is not None and values is not None]
        if not top:
            return logprobs, None, None
        return logprobs, torch.cat([ids for ids, _ in top]).int(), torch.cat([values for _, values in top])

    def _fill_decode(self, batch: StepBatch, slot: StepSlot, num_padded: int) -> None:
        """One copy to the device, spread over the static arrays that the graphs read."""
        num_rows, sampling = len(batch.token_ids), batch.sampling
        width = -(-int(batch.context_lens.max()) // self._plan.page_size)
        host = slot.host
        head = host[: 7 * num_rows]
        head[: 4 * num_rows].reshape(4, num_rows)[:] = (
            batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens,
        )  # fmt: skip
        head[4 * num_rows : 5 * num_rows] = sampling.temperatures.view(np.int32)
        head[5 * num_rows :] = self._uniforms.draw(sampling.seeds, sampling.choices, sampling.cursors).view(np.int32)
        words = num_rows * (7 + width)
        host[7 * num_rows : words].reshape(num_rows, width)[:] = batch.block_tables[:, :width]
        self._packed_heads.of(words).copy_(slot.staging_heads.of(words), non_blocking=True)
        self._inputs.unpack(self._packed, self._sampled_ids, num_rows, num_padded, width)

    def _decode_step(self, size: int, max_num_layers: int | None = None) -> torch.Tensor:
        """Forward and sample the first `size` rows of the static arrays; logits [size, vocab_size].

        With `max_num_layers` through the first layers alone: what they compute is of no use, what they launch is.
        """
        inputs, config, weights = self._inputs, self._config, self._weights
        if max_num_layers is not None:
            weights = replace(weights, layers=weights.layers[:max_num_layers])
            config = replace(config, num_layers=len(weights.layers))
        rows = max(size, self._plan.min_gemm_rows)
        part = DecodePart(inputs.block_tables[:size], inputs.context_lens[:size], self._plan.decode_for(size))
        step = CudaStep(inputs.token_ids[:rows], None, inputs.positions[:rows], inputs.slots[:rows], part, None)
        self._ops.dependent = dependent = size <= self._plan.dependent_max_batch
        try:
            hidden = forward(config, weights, self._cache, step, self._ops)
            logits = self._ops.linear(hidden, weights.head, None)[:size]
        finally:
            self._ops.dependent = False
        sample_rows(
            logits, inputs.temperatures, inputs.uniforms, self._sampling, self._results[0], self._results[1],
            dependent=dependent,
        )  # fmt: skip
        return logits

    def _mixed_step(self, batch: StepBatch, slot: StepSlot) -> tuple[torch.Tensor, torch.Tensor]:
        """A step with prefill, kernel by kernel; logits of the sampled rows, hidden states of the pooled and scored ones."""
        inputs = mixed_inputs(batch, self._plan, self._ops)
        words = inputs.num_words
        if words > len(self._packed):
            raise DeviceError(f"Step {batch.step} needs {words} words of metadata, {len(self._packed)} were planned")
        inputs.write(slot.host)
        self._packed_heads.of(words).copy_(slot.staging_heads.of(words), non_blocking=True)
        step, temperatures, draws = inputs.on_device(self._packed, self._sampled_ids, self._plan)
        hidden = forward(self._config, self._weights, self._cache, step, self._ops)
        num_rows = len(batch.sample_seqs)
        if not num_rows:  # a prompt's middle, or texts to embed: the head need not be read
            return hidden.new_empty((0, self._config.vocab_size)), hidden
        logits = self._ops.linear(hidden[:num_rows], self._weights.head, None)
        sample_rows(logits, temperatures, draws, self._sampling, self._results[0], self._results[1])
        return logits, hidden[num_rows:]


def _rows_to_sample(sampling: SamplingBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows that need more than temperature, rising. The kernel, in the graph or behind a mixed step, has sampled the others."""
    plain = (sampling.top_ks == 0) & (sampling.top_ps >= 1.0) & (sampling.min_ps <= 0.0)
    greedy = sampling.temperatures < GREEDY_BELOW
    simple = (plain | greedy) & (sampling.num_logprobs < 0)
    for edited in (sampling.penalties, sampling.logit_bias, sampling.banned, sampling.allowed):
        if edited:
            simple[list(edited)] = False
    if len(sampling.masked_rows):
        simple[sampling.masked_rows] = False
    return np.flatnonzero(~simple)
