"""Quick measurements of the CPU: memory bandwidth, arithmetic rate, thread hand-over. Medians, with their spread."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dragoman_agent.pal.profile import Value

_STREAM_BYTES = 96 << 20  # several times any last-level slice a process gets
_REPEATS = 5


def measure_cpu(num_threads: int) -> dict[str, Value]:
    """Measure what the planner needs; about half a second."""
    with ThreadPoolExecutor(num_threads) as pool:
        data = np.ones(_STREAM_BYTES // 8)
        target = np.empty_like(data)
        parts = np.array_split(np.arange(len(data)), num_threads)
        slices = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]

        def read() -> None:
            list(pool.map(lambda part: data[part].sum(), slices))

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(target[part], data[part]), slices))

        values = {
            "memory.read_bandwidth": _rate(read, _STREAM_BYTES, "bytes/s"),
            "memory.copy_bandwidth": _rate(copy, 2 * _STREAM_BYTES, "bytes/s", "bytes read and written"),
        }
    size = 768
    left = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    right = left.T.copy()
    values["compute.matmul_float32"] = _rate(lambda: left @ right, 2 * size**3, "flop/s", f"{size}^3, random data")
    values["scheduling.thread_handover"] = _handover()
    return values


def _rate(work: Callable[[], object], amount: int, unit: str, note: str = "") -> Value:
    work()  # pages touched, threads started
    rates = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        rates.append(amount / (time.perf_counter() - start))
    median = statistics.median(rates)
    return Value(median, unit, "measured", spread=(max(rates) - min(rates)) / median, note=note)


def _handover() -> Value:
    """Seconds from waking another thread to its answer, halved: what a barrier between two threads costs at least."""
    ask: queue.SimpleQueue[bool] = queue.SimpleQueue()
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def echo() -> None:
        while ask.get():
            answer.put(True)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    times = []
    for _ in range(200):
        start = time.perf_counter()
        ask.put(True)
        answer.get()
        times.append((time.perf_counter() - start) / 2)
    ask.put(False)
    thread.join()
    times.sort()
    median = statistics.median(times)
    return Value(median, "s", "measured", spread=(times[180] - times[20]) / median, note="p10 to p90 of 200 exchanges")
