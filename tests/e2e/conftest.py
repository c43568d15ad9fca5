"""The embedded model behind the engine, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.needs import need_cpu_kernels

from dragoman.step_model import StepModel
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import KV_DTYPES, TORCH_FLOAT32
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Sampling, Start, Stop
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.source import open_model
from dragoman_agent.pal.plan import Plan


def embedded_plan(road: str) -> Plan:
    """Room for 64 sequences, steps small enough that prompts are cut."""
    return Plan(
        device_kind="cpu",
        model_name="embedded",
        page_size=16,
        num_blocks=900,
        max_context_tokens=512,
        max_batch_tokens=128,
        max_num_seqs=64,
        max_num_waiting=64,
        num_threads=1 if road == TORCH_FLOAT32 else 2,
        road=road,
        kv_dtype=KV_DTYPES[road],
        memory=(),
        step_model=StepModel((1,), (0,), (0.01,), 300.0, 0.01),
    )


@pytest.fixture
def generate(embedded_model_path: Path) -> Callable[..., list[list[int]]]:
    """`generate(road, prompts, counts)`: greedy tokens of each prompt, end tokens ignored, on an engine of its own."""

    def run(road: str, prompts: list[list[int]], counts: list[int], *, one_at_a_time: bool = False) -> list[list[int]]:
        if road != TORCH_FLOAT32:
            need_cpu_kernels()
        model = open_model("embedded", default_cache_dir(os.environ))
        device = CpuDevice()
        device.load(model, embedded_plan(road), lambda _: None)
        try:
            core = build_core(device, model, embedded_plan(road))
            starts = [
                Start(str(i), prompt, Sampling(temperature=0.0), Stop(max_output_tokens=count), cache_salt=str(i))
                for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
            ]
            groups = [[start] for start in starts] if one_at_a_time else [starts]
            events = [event for group in groups for event in run_all(core, group)]
        finally:
            device.close()
        written: list[list[int]] = [[] for _ in prompts]
        for event in events:
            if isinstance(event, Delta):
                assert event.cursor == len(written[int(event.request_id)])
                written[int(event.request_id)].extend(event.token_ids)
        return written

    return run
