"""Captured steps, by the size that smaller steps are padded to."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from dragoman_agent.device.cuda_inputs import Room
from dragoman_agent.device.torch_runtime import Graph, Runtime, Stream

_NUM_WARM_LAYERS = 2  # one after another, as all the others are

Size = TypeVar("Size", int, Room)

# Queues a step on the current stream through so many layers, all of them for None; the tensor that it writes.
Work = Callable[[int | None], Tensor]


class StepGraphs(Generic[Size]):
    """Graphs of one kind of step, all of them of one stream and one pool of memory."""

    def __init__(self, runtime: Runtime, stream: Stream, pool_of: StepGraphs[Any] | None = None) -> None:
        """`pool_of`: other graphs whose memory these share."""
        self._runtime, self._stream = runtime, stream
        self._graphs: dict[Size, tuple[Graph, Tensor]] = {}
        self._pool_of: StepGraphs[Any] = pool_of or self
        self._pool: Any = None
        self.sizes: list[Size] = []  # rising

    def add(self, size: Size, work: Work) -> None:
        """Capture `work`. Those that take most memory come first: the others have room in it."""
        with self._runtime.on(self._stream):
            work(_NUM_WARM_LAYERS)  # compiles what this size needs, the same in each layer
        self._runtime.synchronize()
        graph, made = self._runtime.capture(self._stream, partial(work, None), self._pool_of._pool)
        self._graphs[size] = graph, made
        self._pool_of._pool = graph.pool()
        insort(self.sizes, size)

    def at_least(self, size: Size) -> Size | None:
        """The least that is not below `size`."""
        nth = bisect_left(self.sizes, size)
        return self.sizes[nth] if nth < len(self.sizes) else None

    def replay(self, size: Size) -> Tensor:
        """Queue the graph of `size`; what it writes, which the next replay overwrites."""
        graph, made = self._graphs[size]
        graph.replay()
        return made
