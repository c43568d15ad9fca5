"""Measures one CUDA device for its profile; run in a process of its own, so that no context outlives the measurement.

python -m dragoman_agent.device.cuda_probe INDEX     prints the values as JSON
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch

from dragoman_agent.pal.profile import Value
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.stream_read import stream_read

_STREAM_BYTES = 2 << 30
_REPEATS = 5


def measure(index: int) -> dict[str, Value]:
    """Bandwidths, matrix rate, graph node cost and link rates; under three seconds once the kernels are compiled."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    size = min(_STREAM_BYTES, 1 << (int(free) // 4).bit_length() - 1)
    return {
        **_memory(device, size),
        "compute.matmul_bfloat16": _matmul(device, 8192 if free > 4 << 30 else 4096),
        "scheduling.graph_node": _graph_node(device),
        **_link(device),
    }


def _memory(device: torch.device, size: int) -> dict[str, Value]:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    programs = 1 << (torch.cuda.get_device_properties(device).multi_processor_count * 4).bit_length()
    sums = torch.empty(programs, device=device)
    read = _rate(lambda: stream_read(source, sums), size, "bytes/s", "read-only stream")
    if not torch.allclose(sums.double().sum(), source.double().sum(), rtol=1e-3, atol=1e2):
        raise RuntimeError("the read stream returned a wrong sum: the measurement cannot be trusted")
    copy = _rate(lambda: target.copy_(source), 2 * size, "bytes/s", "bytes read and written")
    return {"memory.read_bandwidth": read, "memory.copy_bandwidth": copy}


def _matmul(device: torch.device, size: int) -> Value:
    left = torch.randn((size, size), device=device, dtype=torch.bfloat16)
    right = torch.randn((size, size), device=device, dtype=torch.bfloat16)
    return _rate(lambda: left @ right, 2 * size**3, "flop/s", f"{size}^3, random data")


def _graph_node(device: torch.device) -> Value:
    """Seconds a small kernel adds to a graph: the difference between graphs of many and of few."""
    x = torch.randn((1, 1024), device=device)
    weight = torch.ones(1024, device=device)

    def captured(count: int) -> torch.cuda.CUDAGraph:
        rms_norm(x, weight, 1e-6)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                rms_norm(x, weight, 1e-6)
        return graph

    few, many = captured(50), captured(550)
    times = sorted((_seconds(many.replay) - _seconds(few.replay)) / 500 for _ in range(_REPEATS))
    median = statistics.median(times)
    return Value(median, "s", "measured", spread=(times[-1] - times[0]) / median, note="a norm of one row, dependent")


def _link(device: torch.device) -> dict[str, Value]:
    size = 256 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(size, dtype=torch.uint8, device=device)
    return {
        "link.h2d_pinned": _rate(lambda: card.copy_(host, non_blocking=True), size, "bytes/s"),
        "link.d2h_pinned": _rate(lambda: host.copy_(card, non_blocking=True), size, "bytes/s"),
    }


def _seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _rate(work: Callable[[], object], amount: int, unit: str, note: str = "") -> Value:
    for _ in range(2):
        work()
    rates = sorted(amount / _seconds(work) for _ in range(_REPEATS))
    median = statistics.median(rates)
    return Value(median, unit, "measured", spread=(rates[-1] - rates[0]) / median, note=note)


if __name__ == "__main__":
    print(json.dumps({name: asdict(value) for name, value in measure(int(sys.argv[1])).items()}))
