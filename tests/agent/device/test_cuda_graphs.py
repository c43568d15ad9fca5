"""Captured steps: the least that holds a step is replayed, all share one pool, and what they compute is what kernels alone do."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from tests.agent.device.apart import printed_by

from dragoman_agent.device.cuda_graphs import StepGraphs
from dragoman_agent.device.cuda_inputs import Room


class Recorder:
    """A runtime whose captures run their work at once and note the pool that they were given."""

    def __init__(self) -> None:
        self.pools: list[Any] = []
        self.replays: list[int] = []

    def on(self, stream: Any) -> Any:
        return torch.inference_mode()  # any context will do

    def synchronize(self) -> None:
        """Nothing is under way."""

    def capture(self, stream: Any, work: Any, pool: Any) -> Any:
        self.pools.append(pool)
        number = len(self.pools)
        graph = SimpleNamespace(pool=lambda: f"pool {number}", replay=lambda: self.replays.append(number))
        return graph, work()


def test_the_least_size_that_holds_a_step_is_replayed() -> None:
    runtime: Any = Recorder()
    layers: list[int | None] = []

    def work(size: int) -> Any:
        return lambda num_layers: layers.append(num_layers) or torch.tensor(size)

    graphs: StepGraphs[int] = StepGraphs(runtime, runtime)
    others: StepGraphs[Room] = StepGraphs(runtime, runtime, graphs)
    room = Room(64, 8, 12)
    others.add(room, work(64))
    for size in (8, 2, 4):
        graphs.add(size, work(size))
    assert runtime.pools == [None, "pool 1", "pool 2", "pool 3"], "the later ones share what the first took"
    assert layers == [2, None] * 4, "compiled through two layers before all of them are captured"
    assert graphs.sizes == [2, 4, 8] and others.sizes == [room]
    assert [graphs.at_least(num) for num in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]
    assert graphs.replay(4).item() == 4 and runtime.replays == [4]


def test_steps_with_prompts_are_the_same_by_graph_and_kernel_by_kernel() -> None:
    """In a process of its own: Triton's interpreter is chosen when its kernels are imported."""
    shown = json.loads(printed_by("mixed_graphs", OMP_NUM_THREADS="1"))
    assert shown["sizes"] == [4, 12, 20, 24], "each was used"
    assert shown["long"] >= 2 and shown["usual"] >= 2, "graphs by either launch"
    assert shown["filled"] == [[4, 0], [12, 0], [20, 0], [24, 21]], "only rows that may be padding are zeroed"
    assert shown["different"] == 0 < shown["total"] and shown["worst"] < 1e-4
