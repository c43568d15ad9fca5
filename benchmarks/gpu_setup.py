"""What the GPU benchmarks share: the card's profile, a model's plan from it with timed kernels, and steps made by hand."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pynvml

from dragoman_agent.device import cuda, cuda_weights
from dragoman_agent.device.base import SamplingBatch, StepBatch
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.found import FoundDevice
from dragoman_agent.pal.layer_timing import plan_layer_cases
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import Limits, plan_for
from dragoman_agent.pal.probe import profile_device
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuning import load_timings, tune

CACHE = Path("/tmp/dragoman-bench")
MAX_CONTEXT = 9216

Result = dict[str, object]


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on the card of this machine."""

    source: ModelSource
    found: FoundDevice
    profile: Profile
    timings: Timings
    plan: Plan
    untuned: Plan  # from the profile alone
    tuning_seconds: float

    def plan_with(self, switches: Switches, limits: Limits | None = None) -> Plan:
        """Another plan for the same model and profile."""
        return plan_for(self.profile, self.source.config, limits or LIMITS, switches, self.timings)[0]


LIMITS = Limits(max_context_tokens=MAX_CONTEXT, max_num_seqs=256)


def setup(name: str, limits: Limits = LIMITS) -> Setup:
    """Profile, timed kernels and plan of the random-weight model `name`."""
    source = open_model(f"random:{name}", Path())
    found = next(d for d in take_inventory().devices if d.facts.kind == "cuda")
    profile, _ = profile_device(found, CACHE)
    untuned, _ = plan_for(profile, source.config, limits, Switches())
    begin = time.perf_counter()
    cases = tuning_cases(profile, source.config, untuned)
    held = load_timings(CACHE, profile.fingerprint)
    index, say = profile.device.index, lambda text: print(f"  {text}", flush=True)
    timings = tune(cases, held, CACHE, index, say)
    plan, _ = plan_for(profile, source.config, limits, Switches(), timings)
    timings = tune(plan_layer_cases(source.config, plan), timings, CACHE, index, say)
    seconds = time.perf_counter() - begin
    plan, decisions = plan_for(profile, source.config, limits, Switches(), timings)
    print(f"  {len(cases)} kernels, {seconds:.1f} s; plan: page {plan.page_size}, chunk {plan.max_batch_tokens}, "
          f"graphs {len(plan.graph_batch_sizes)}, few-row products {len(plan.gemm_decode)}, blocks {plan.num_blocks}", flush=True)  # fmt: skip
    for decision in decisions:
        print(f"    {decision.subject}: {decision.chosen} ({decision.reason})")
    return Setup(source, found, profile, timings, plan, untuned, seconds)


class Loaded:
    """Loads one model's weights once and plans on them one after another."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._weights: Any = None

    def device(self, plan: Plan) -> CudaDevice:
        """A device with `plan`; close the one before first."""
        device = CudaDevice(plan.device_index)
        with mock.patch.object(cuda, "load_weights", self._hold):
            device.load(self._source, plan, lambda _: None)
        return device

    def _hold(self, *arguments: Any) -> Any:
        if self._weights is None:
            self._weights = cuda_weights.load_weights(*arguments)
        return self._weights


def decode_batch(plan: Plan, batch: int, context: int, step: int = 1, vocab: int = 10_000) -> StepBatch:
    """A decode step of `batch` sequences at `context` tokens each, its own token included; pages lie anywhere.

    Raises ValueError where the plan has too few blocks for it.
    """
    width = -(-context // plan.page_size)
    if batch * width >= plan.num_blocks:
        raise ValueError(f"{batch} x {context} tokens need {batch * width} blocks, the plan has {plan.num_blocks - 1}")
    rng = np.random.default_rng(batch * 100_003 + context)
    ids = rng.permutation(plan.num_blocks - 1)[: batch * width].astype(np.int32) + 1
    tables = ids.reshape(batch, width)
    positions = np.full(batch, context - 1, dtype=np.int32)
    rows = np.arange(batch, dtype=np.int32)
    ones = np.ones(batch, dtype=np.float32)
    zeros = np.zeros(batch, dtype=np.int32)
    sampling = SamplingBatch(
        0.6 * ones, zeros, ones, 0 * ones, rows.astype(np.uint64), zeros, positions, zeros - 1
    )  # fmt: skip
    return StepBatch(
        step=step,
        token_ids=rng.integers(0, vocab, batch).astype(np.int32),
        positions=positions,
        slot_mapping=tables[:, -1] * plan.page_size + (context - 1) % plan.page_size,
        query_starts=np.arange(batch + 1, dtype=np.int32),
        context_lens=positions + 1,
        block_tables=tables,
        prompt_lens=zeros + 1,
        sample_seqs=rows,
        pool_seqs=np.zeros(0, dtype=np.int32),
        sampling=sampling,
    )


def step_seconds(device: CudaDevice, batch: StepBatch, steps: int = 12) -> list[float]:
    """Device seconds of each of `steps` equal steps, kept busy two at a time; the first two are left out."""
    handles = []
    seconds = []
    for number in range(steps + 2):
        handles.append(device.submit(replace(batch, step=number + 1)))
        if len(handles) > 1:
            seconds.append(handles.pop(0).result().seconds)
    seconds.append(handles.pop().result().seconds)
    return seconds[2:]


def median_step(device: CudaDevice, plan: Plan, batch: int, context: int) -> float:
    """Median device seconds of a decode step."""
    return statistics.median(step_seconds(device, decode_batch(plan, batch, context)))


def environment(index: int) -> dict[str, object]:
    """Driver, clocks under load and versions, for the record."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    clocks = [pynvml.nvmlDeviceGetClockInfo(handle, kind) for kind in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    versions["python"] = platform.python_version()
    return {"driver": pynvml.nvmlSystemGetDriverVersion(), "clocks_mhz": clocks, "versions": versions}
