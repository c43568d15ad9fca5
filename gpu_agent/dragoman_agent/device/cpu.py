"""The CPU backend: one model, one worker thread that runs steps in order and samples. Only the torch road imports torch."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from dragoman_agent.device.base import (
    BlockFormat,
    DeviceError,
    DeviceMemoryError,
    Float32Array,
    Int32Array,
    LoadProgress,
    ProgressFn,
    SamplingBatch,
    StepBatch,
    StepResult,
    UInt8Array,
    no_ids,
)
from dragoman_agent.device.block_copies import FutureCopy, new_rows
from dragoman_agent.device.checks import check_loadable, resolve_tokens
from dragoman_agent.device.cpu_road import KV_DTYPES, TORCH_FLOAT32, TORCH_INT4, TORCH_ROADS, choose_cpu_road
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.warm_up import warm_up_batch
from dragoman_agent.engine.host_sampler import HostSampled, HostSampler
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_kernels.cpu.build import KernelBuildError

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource
    from dragoman_agent.pal.plan import Plan

T = TypeVar("T")
log = logging.getLogger(__name__)
_NOTHING = HostSampled(np.zeros(0, np.int64), np.zeros(0, np.bool_))


class _Road(Protocol):
    detail: str

    @property
    def max_num_head_rows(self) -> int: ...

    def run(self, batch: StepBatch) -> tuple[Float32Array, Float32Array]: ...

    def head(self, hidden: Float32Array) -> Float32Array: ...

    @property
    def block_format(self) -> BlockFormat: ...

    def read_blocks(self, blocks: Int32Array) -> UInt8Array: ...

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None: ...

    def close(self) -> None: ...


class CpuStepHandle:
    """A step on the worker thread."""

    def __init__(self, future: Future[StepResult], sampling: Future[SamplingBatch]) -> None:
        """`sampling`: what the worker waits for once the model has run."""
        self._future, self._sampling = future, sampling
        self._ended = 0.0
        future.add_done_callback(self._note_end)

    def supply(self, sampling: SamplingBatch) -> None:
        """See LateStep."""
        self._sampling.set_result(sampling)

    def result(self) -> StepResult:
        """See StepHandle."""
        if not self._sampling.done():
            raise DeviceError("The sampling of this step has not been supplied.")
        return self._future.result()

    def ended(self) -> float:
        """See TimedStep."""
        return self._ended

    def _note_end(self, future: Future[StepResult]) -> None:
        self._ended = time.perf_counter()


class CpuDevice:
    """Implements Device. `info` says, once loaded, what was done: for the Ready message and for a person."""

    kind = "cpu"
    samples_late = True

    def __init__(self, cache_dir: Path | None = None) -> None:
        """`cache_dir` holds the compiled kernels; by default Dragoman's own."""
        self._cache_dir = cache_dir if cache_dir is not None else default_cache_dir(os.environ)
        self._work: _Work | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-step")
        self._closed = False
        self._sampling: Future[SamplingBatch] | None = None  # of the newest step
        self.info: dict[str, Any] = {}

    def load(self, model: ModelSource, plan: Plan, progress: ProgressFn) -> None:
        """See Device. When the kernels do not build, the torch road is taken and the reason is logged and in `info`."""
        check_loadable(self.kind, plan, loaded=self._work is not None, closed=self._closed)
        if plan.road not in KV_DTYPES:
            raise DeviceError(
                f"The plan's road {plan.road!r} is not one the CPU has ({', '.join(KV_DTYPES)}); plan again."
            )
        started = time.monotonic()
        progress(LoadProgress("open", 0, 1, "steps"))
        try:
            road, name, note = self._open_road(model, plan, progress)
        except (ValueError, MemoryError, RuntimeError) as error:
            raise DeviceError(f"The model {model.name} cannot be loaded on the CPU: {error}") from error
        seconds = max(time.monotonic() - started, 1e-9)
        progress(LoadProgress("kv", plan.num_blocks, plan.num_blocks, "steps"))
        work = _Work(road, HostSampler(model.config.vocab_size))
        try:
            self._warm_up(work, plan, progress)
        except (ValueError, MemoryError, RuntimeError) as error:
            road.close()
            raise DeviceError(f"The first step of {model.name} failed on the CPU: {error}") from error
        self._work = work
        self.info = {
            "road": name,
            "road_detail": road.detail,
            "weight_bytes": model.total_bytes,
            "load_seconds": time.monotonic() - started,
            "weights_gb_per_second": round(model.total_bytes / seconds / 1e9, 2),
        }
        if note:
            self.info["road_note"] = note

    def submit(self, batch: StepBatch) -> CpuStepHandle:
        """See Device."""
        if self._work is None:
            raise DeviceError("No model is loaded on this device; load one first.")
        if self._sampling is not None and not self._sampling.done():
            raise DeviceError(f"Step {batch.step} was submitted before the sampling of the step before was supplied.")
        self._sampling = sampling = _sampling_of(batch)
        return CpuStepHandle(self._worker.submit(self._work.step, batch, sampling), sampling)

    @property
    def block_format(self) -> BlockFormat:
        """See BlockDevice."""
        return self._loaded.road.block_format

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        """See BlockDevice: the worker thread does it in its turn."""
        return self._in_turn(self._loaded.road.read_blocks, blocks)

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        """See BlockDevice."""
        self._in_turn(self._loaded.road.write_blocks, blocks, data)

    max_num_copied_blocks = 4  # each copy is a turn of the worker thread, in which no step runs

    def new_rows(self, num_blocks: int) -> UInt8Array:
        """See BlockDevice."""
        return new_rows(num_blocks, self.block_format.block_bytes)

    def copy_out(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> FutureCopy:
        """See BlockDevice: the worker thread does it in its turn."""
        return FutureCopy(self._worker.submit(self._loaded.copy_out, blocks, rows))

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> FutureCopy:
        """See BlockDevice."""
        return FutureCopy(self._worker.submit(self._loaded.copy_in, rows, blocks))

    @property
    def _loaded(self) -> _Work:
        if self._work is None:
            raise DeviceError("No model is loaded on this device; load one first.")
        return self._work

    def _in_turn(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return self._worker.submit(work, *arguments).result()
        except (ValueError, MemoryError, RuntimeError) as error:
            if _is_out_of_memory(error):
                raise DeviceMemoryError(f"there is no room to move KV blocks: {first_line(error)}") from None
            raise DeviceError(f"KV blocks could not be moved on the CPU: {error}") from error

    def close(self) -> None:
        """See Device. Waits for the step under way."""
        self._closed = True
        if self._sampling is not None and not self._sampling.done():
            self._sampling.set_exception(DeviceError("The device was closed before the step's sampling was supplied."))
        self._worker.shutdown(wait=True, cancel_futures=True)
        work, self._work = self._work, None
        if work is not None:
            work.road.close()

    def _open_road(self, model: ModelSource, plan: Plan, progress: ProgressFn) -> tuple[_Road, str, str]:
        """The road, its name, and why it is not the plan's (empty when it is)."""
        note = ""
        if plan.road not in TORCH_ROADS:
            from dragoman_agent.device.cpu_native import NativeRoad

            try:
                return NativeRoad(model, plan, self._cache_dir, progress), plan.road, ""
            except KernelBuildError as error:
                note = f"the plan's road {plan.road} is not possible, torch-float32 is used and is much slower: {error.message}"
                log.warning("%s", note)
                if error.log:
                    log.warning("compiler output: %s", error.log)
        if plan.road == TORCH_INT4:
            from dragoman_agent.device.cpu_torch_int4 import Int4Road

            return Int4Road(model, plan, progress), TORCH_INT4, note
        from dragoman_agent.device.cpu_torch import TorchRoad

        return TorchRoad(model, plan, progress), TORCH_FLOAT32, note

    def _warm_up(self, work: _Work, plan: Plan, progress: ProgressFn) -> None:
        """One prefill and one decode step in block 1, which no sequence has yet."""
        chunk = min(4, plan.max_batch_tokens, plan.page_size - 1, plan.max_context_tokens - 1)
        steps = ((0, chunk), (chunk, 1))
        for done, (start, count) in enumerate(steps):
            progress(LoadProgress("warmup", done, len(steps), "steps"))
            batch = warm_up_batch(plan.page_size, start, count)
            self._worker.submit(work.step, batch, _sampling_of(batch)).result()
        progress(LoadProgress("warmup", len(steps), len(steps), "steps"))


def _sampling_of(batch: StepBatch) -> Future[SamplingBatch]:
    """How a step is sampled, or will be once that is known."""
    sampling: Future[SamplingBatch] = Future()
    if not batch.sampling_follows:
        sampling.set_result(batch.sampling)
    return sampling


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, a compiled kernel or torch found no memory; torch says so by a RuntimeError of its CPU allocator."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


@dataclass(slots=True)
class _Work:
    """What the worker thread uses; nothing else does while a step is under way."""

    road: _Road
    sampler: HostSampler
    previous: Int32Array = field(default_factory=no_ids)  # what the step before sampled

    def step(self, batch: StepBatch, coming: Future[SamplingBatch]) -> StepResult:
        """Compute one step, and sample it once its sampling has come. Raises DeviceError, DeviceMemoryError."""
        started = time.perf_counter()
        waited = 0.0
        try:
            batch.token_ids = resolve_tokens(batch.token_ids, self.previous)
            logits, hidden = self.road.run(batch)
            computed = time.perf_counter()
            sampling = coming.result()
            waited = time.perf_counter() - computed
            sampled = self.sampler.sample(logits, sampling) if len(batch.sample_seqs) else _NOTHING
            scores = self._score(hidden[len(batch.pool_seqs) :], batch) if len(batch.score_rows) else (None, None, None)
        except (ValueError, MemoryError, RuntimeError, IndexError) as error:
            if _is_out_of_memory(error):
                # A step that is queued already may refer to these tokens. It counts for nothing, but must not fail in its turn.
                self.previous = np.zeros(len(batch.sample_seqs), dtype=np.int32)
                raise DeviceMemoryError(
                    f"a step of {len(batch.token_ids)} tokens does not fit: {first_line(error)}"
                ) from None
            raise DeviceError(f"Step {batch.step} failed on the CPU: {error}") from error
        self.previous = sampled.token_ids.astype(np.int32)
        return StepResult(
            token_ids=self.previous,
            finite=sampled.finite,
            logprobs=sampled.logprobs,
            top_ids=None if sampled.top_ids is None else sampled.top_ids.astype(np.int32),
            top_logprobs=sampled.top_logprobs,
            embeddings=hidden[: len(batch.pool_seqs)] if len(batch.pool_seqs) else None,
            score_logprobs=scores[0],
            score_top_ids=scores[1],
            score_top_logprobs=scores[2],
            seconds=time.perf_counter() - started - waited,
        )

    def copy_out(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> float:
        """Blocks to rows; seconds. Raises ValueError or RuntimeError."""
        started = time.perf_counter()
        for row, data in zip(rows, self.road.read_blocks(blocks), strict=True):
            row[:] = data
        return time.perf_counter() - started

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> float:
        """Rows to blocks; seconds. Raises ValueError or RuntimeError."""
        started = time.perf_counter()
        self.road.write_blocks(blocks, np.stack(rows))
        return time.perf_counter() - started

    def _score(self, hidden: Float32Array, batch: StepBatch) -> tuple[Float32Array, Int32Array, Float32Array]:
        """Logprobs of `score_targets`, a few rows at a time: logits of a whole prompt would take gigabytes."""
        parts = []
        for start in range(0, len(hidden), self.road.max_num_head_rows):
            rows = slice(start, start + self.road.max_num_head_rows)
            logits = self.road.head(hidden[rows])
            parts.append(self.sampler.score(logits, batch.score_targets[rows], batch.num_score_logprobs))
        logprobs, top_ids, top_logprobs = (np.concatenate(part) for part in zip(*parts, strict=True))
        return logprobs, top_ids.astype(np.int32), top_logprobs


__all__ = ["CpuDevice", "CpuStepHandle", "choose_cpu_road"]
