"""Steps under way on a GPU: the host's buffers of each, and the handle that reads its results."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman_agent.device.base import DeviceError, SamplingBatch, StepBatch, StepResult
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.torch_runtime import Event, Runtime, Stream
from dragoman_agent.engine.packed_copy import send
from dragoman_agent.engine.sampler import Sampled, score

_SCORED_AT_ONCE = 64  # rows: bounds the scratch to 64 * vocab_size * ~30 bytes
_CLOCK_SECONDS = 8.0  # milliseconds in float32 are good to a microsecond up to here

Scores = tuple[Tensor, Tensor | None, Tensor | None]  # logprobs, best ids, their logprobs; see engine/sampler.py


class DeviceClock:
    """Places events on the host's clock, by an event of an idle stream whose moment the host saw."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stream = runtime.new_stream()
        self._set()

    def at(self, event: Event) -> float:
        """`time.perf_counter` when `event`, which has passed, was reached."""
        seconds = self._anchor.elapsed_time(event) * 1e-3
        moment = self._seen + seconds
        if seconds > _CLOCK_SECONDS:
            self._set()
        return moment

    def _set(self) -> None:
        """See one event pass; what the host takes to notice, some microseconds, is the error."""
        self._anchor = self._runtime.new_event()
        with self._runtime.on(self._stream):
            self._anchor.record()
        self._anchor.synchronize()
        self._seen = time.perf_counter()


class Heads:
    """The first words of a tensor [n], in slices made once: a slice costs the host what a launch does."""

    def __init__(self, whole: Tensor) -> None:
        self._slices = [whole[: min(1 << bits, len(whole))] for bits in range(len(whole).bit_length() + 1)]

    def of(self, num: int) -> Tensor:
        """At least the first `num` of them, 1 to n, and less than twice as many."""
        return self._slices[(num - 1).bit_length()]


class StepSlot:
    """Pinned buffers and events of one step; the next one to use them takes them over."""

    def __init__(self, runtime: Runtime, reading: Stream, num_words: int, num_rows: int) -> None:
        """`num_words` int32 of metadata go in, token id and flag of `num_rows` come out. `reading`: a stream apart from the steps'."""
        self.staging = runtime.pinned((num_words,), torch.int32)
        self.host, self.staging_heads = self.staging.numpy(), Heads(self.staging)
        self.results = runtime.pinned((2, num_rows), torch.int32)
        self.host_results = self.results.numpy()
        self.begin, self.end = runtime.new_event(), runtime.new_event()
        self._runtime, self._reading = runtime, reading
        self._clock: DeviceClock | None = None
        self._handle: TorchStepHandle | None = None

    def take_over(self) -> None:
        """Wait for the step that has the buffers and let its handle keep what they hold."""
        handle, self._handle = self._handle, None
        if handle is None or isinstance(handle.settle(), DeviceError):
            self.end.synchronize()

    def ended(self) -> float:
        """`time.perf_counter` when the step that has the buffers, which is done, ended. Only a trace asks for it."""
        if self._clock is None:
            self._clock = DeviceClock(self._runtime)
        return self._clock.at(self.end)

    def beside(self) -> AbstractContextManager[Any]:
        """On a stream where a copy need not wait for the steps behind this one, which are in the stream of the thread."""
        return self._runtime.on(self._reading)

    def hand_to(self, handle: TorchStepHandle) -> None:
        """The buffers are this step's now."""
        self._handle = handle


class TorchStepHandle:
    """Implements StepHandle: a step on the device; its results come to pinned memory."""

    def __init__(
        self,
        slot: StepSlot,
        errors: tuple[type[Exception], ...],
        num_rows: int,
        pooled: Tensor | None,
        scores: Scores | None,
        sampled: Sampled | None = None,
        finish: Callable[[SamplingBatch], Sampled | None] | None = None,
    ) -> None:
        """`errors`: what torch raises when the device fails. `sampled`: with the logprobs that are asked for, of a step
        whose results come; `finish` samples and lets them come where the sampling follows.
        """
        self._slot, self._errors, self._num_rows = slot, errors, num_rows
        self._pooled, self._scores = pooled, scores
        self._sampled, self._finish = sampled, finish
        self._outcome: StepResult | DeviceError | None = None
        slot.hand_to(self)

    def supply(self, sampling: SamplingBatch) -> None:
        """See LateStep."""
        assert self._finish is not None, "the sampling of a step is supplied once"
        finish, self._finish = self._finish, None
        self._sampled = finish(sampling)

    def result(self) -> StepResult:
        """See StepHandle."""
        if self._finish is not None:
            raise DeviceError("The sampling of this step has not been supplied.")
        outcome = self.settle()
        if isinstance(outcome, DeviceError):
            raise outcome
        return outcome

    def ended(self) -> float:
        """See TimedStep."""
        return self._slot.ended()

    def settle(self) -> StepResult | DeviceError:
        """Wait for the step and read what became of it, once."""
        if self._outcome is None:
            try:
                self._outcome = self._read()
            except self._errors as error:
                self._outcome = DeviceError(f"the GPU failed during a step: {first_line(error)}")
            self._sampled = self._pooled = self._scores = self._finish = None
        return self._outcome

    def _read(self) -> StepResult:
        slot = self._slot
        slot.end.synchronize()
        seconds = slot.begin.elapsed_time(slot.end) * 1e-3
        host = slot.host_results[:, : self._num_rows]
        result = StepResult(host[0].copy(), host[1].astype(np.bool_), seconds=seconds)
        if any(part is not None for part in (self._sampled, self._pooled, self._scores)):
            with slot.beside():
                self._read_more(result)
        return result

    def _read_more(self, result: StepResult) -> None:
        """What only some steps have, by copies that are waited for."""
        if self._sampled is not None:
            _add_logprobs(result, self._sampled)
        if self._pooled is not None:
            result.embeddings = self._pooled.cpu().numpy()
        if self._scores is not None:
            logprobs, top_ids, top_logprobs = self._scores
            result.score_logprobs = logprobs.cpu().numpy()
            result.score_top_ids = None if top_ids is None else top_ids.cpu().numpy()
            result.score_top_logprobs = None if top_logprobs is None else top_logprobs.cpu().numpy()


def score_hidden(hidden: Tensor, batch: StepBatch, head: Callable[[Tensor], Tensor]) -> Scores:
    """Logprobs of `score_targets` from hidden states, a few rows at a time: logits of a whole prompt would take gigabytes."""
    targets = send({"targets": batch.score_targets.astype(np.int64)}, hidden.device)["targets"]
    parts = []
    for start in range(0, len(hidden), _SCORED_AT_ONCE):
        rows = slice(start, start + _SCORED_AT_ONCE)
        parts.append(score(head(hidden[rows]).float(), targets[rows], batch.num_score_logprobs))
    logprobs = torch.cat([own for own, _, _ in parts])
    top = [(ids, values) for _, ids, values in parts if ids is not None and values is not None]
    if not top:
        return logprobs, None, None
    return logprobs, torch.cat([ids for ids, _ in top]).int(), torch.cat([values for _, values in top])


def _add_logprobs(result: StepResult, sampled: Sampled) -> None:
    if sampled.logprobs is not None:
        result.logprobs = sampled.logprobs.cpu().numpy()
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        result.top_ids = sampled.top_ids.cpu().int().numpy()
        result.top_logprobs = sampled.top_logprobs.cpu().numpy()
