"""Measurements of the CPU: memory bandwidth, arithmetic as the compiled road does it, thread hand-over; each with its spread."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dragoman_agent.pal.analysis import measured_list, measured_rate, positive_median, rates
from dragoman_agent.pal.profile import Value
from dragoman_kernels.cpu.build import KernelBuildError, is_built
from dragoman_kernels.cpu.llama import LlamaShape, LlamaStep, QuantTensor

logger = logging.getLogger(__name__)

_STREAM_BYTES = 96 << 20  # several times any last-level slice a process gets
_REPEATS = 5
_HIDDEN, _ROWS_OUT, _ROWS_IN = 2048, 8192, 64  # of the int8 product: 17 MiB of weights, a small prefill


def measure_cpu(num_threads: int, cache_dir: Path | None = None, *, full: bool = False) -> dict[str, Value]:
    """What a plan needs, in about half a second; `full` adds what each number of threads reaches.

    The int8 product runs on the compiled road's own kernels: in a full measurement (which builds them, some seconds), and in a
    quick one where `cache_dir` has them already.
    """
    logger.debug("probe: step cpu.streams")
    read, copy = _streams(num_threads)
    logger.debug("probe: step cpu.products")
    size = 768
    left = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    right = left.T.copy()
    values = {
        "memory.read_bandwidth": measured_rate(_STREAM_BYTES, read, "bytes/s", f"{num_threads} threads"),
        "memory.copy_bandwidth": measured_rate(
            2 * _STREAM_BYTES, copy, "bytes/s", f"bytes read and written, {num_threads} threads"
        ),
        "compute.matmul_float32": measured_rate(
            2 * size**3, _times(lambda: left @ right), "flop/s", f"{size}^3, random data"
        ),
        "scheduling.thread_handover": _handover(),
    }
    if cache_dir is not None and (full or is_built(cache_dir)):
        logger.debug("probe: step cpu.compiled")
        values |= _compiled(num_threads, cache_dir, full)
    if full:
        logger.debug("probe: step cpu.threads")
        values |= _streams_by_threads(num_threads)
    return values


def thread_counts(num_threads: int) -> list[int]:
    """1, 2, 4, ... and `num_threads` itself."""
    return sorted({num_threads, *(1 << i for i in range(num_threads.bit_length()) if 1 << i <= num_threads)})


def _streams(num_threads: int) -> tuple[list[float], list[float]]:
    """Seconds of reading and of copying _STREAM_BYTES, cut into one part a thread."""
    with ThreadPoolExecutor(num_threads) as pool:
        data = np.ones(_STREAM_BYTES // 8)
        target = np.empty_like(data)
        bounds = [len(data) * i // num_threads for i in range(num_threads + 1)]
        slices = [slice(start, end) for start, end in itertools.pairwise(bounds)]

        def read() -> None:
            list(pool.map(lambda part: data[part].sum(), slices))

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(target[part], data[part]), slices))

        return _times(read), _times(copy)


def _streams_by_threads(num_threads: int) -> dict[str, Value]:
    counts = thread_counts(num_threads)
    times = [_streams(count) for count in counts]
    labels = [str(count) for count in counts]
    reads = [rates(_STREAM_BYTES, read) for read, _ in times]
    copies = [rates(2 * _STREAM_BYTES, copy) for _, copy in times]
    return {
        "memory.read_by_threads": measured_list(reads, "bytes/s", labels),
        "memory.copy_by_threads": measured_list(copies, "bytes/s", labels, "bytes read and written"),
    }


def _compiled(num_threads: int, cache_dir: Path, full: bool) -> dict[str, Value]:
    """int8 products of the compiled road; nothing, with a line in the log, where it cannot be built."""
    counts = thread_counts(num_threads) if full else [num_threads]
    try:
        times = [_int8_times(count, cache_dir) for count in counts]
    except (KernelBuildError, MemoryError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("the int8 product of the CPU was not measured: %s", reason)
        return {}
    amount = 2 * _ROWS_IN * _ROWS_OUT * _HIDDEN
    note = f"{_ROWS_IN} rows by {_ROWS_OUT} x {_HIDDEN} in Q8_0, the compiled road's own product"
    values = {"compute.matmul_int8": measured_rate(amount, times[-1], "flop/s", f"{note}, {num_threads} threads")}
    if full:
        found = [rates(amount, own) for own in times]
        values["compute.matmul_int8_by_threads"] = measured_list(found, "flop/s", [str(c) for c in counts], note)
    return values


def _int8_times(num_threads: int, cache_dir: Path) -> list[float]:
    """Seconds of one product with the head of a model that has hardly anything but a head."""
    shape = LlamaShape(
        num_layers=1,
        hidden_size=_HIDDEN,
        intermediate_size=32,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=_ROWS_OUT,
        max_context_tokens=16,
        rms_norm_eps=1e-6,
        inverse_frequencies=LlamaShape.default_frequencies(10000.0, 32),
    )
    random = np.random.default_rng(0)
    weights: dict[str, QuantTensor | np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {
        f"layers.0.{name}": _random_q8(rows, cols, random) for name, (rows, cols) in shape.matrix_shapes().items()
    }
    ones = np.ones(_HIDDEN, np.float32)
    weights |= {"norm": ones, "layers.0.input_norm": ones, "layers.0.post_attention_norm": ones}
    weights["embed_tokens"] = _random_q8(_ROWS_OUT, _HIDDEN, random)
    step = LlamaStep(
        shape,
        weights,
        num_blocks=2,
        page_size=16,
        num_threads=num_threads,
        activation="int8",
        max_batch_tokens=16,
        max_num_seqs=_ROWS_IN,
        cache_dir=cache_dir,
    )
    try:
        rows = random.standard_normal((_ROWS_IN, _HIDDEN), dtype=np.float32)
        return _times(lambda: step.head(rows))
    finally:
        step.close()


def _random_q8(rows: int, cols: int, random: np.random.Generator) -> QuantTensor:
    """A Q8_0 matrix: blocks of a float16 scale and 32 signed bytes."""
    blocks = np.empty((rows, cols // 32, 34), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks[..., 2:] = random.integers(0, 256, (rows, cols // 32, 32), np.uint8)
    return QuantTensor("Q8_0", (rows, cols), blocks.reshape(rows, -1))


def _times(work: Callable[[], object]) -> list[float]:
    work()  # pages touched, threads started
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


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
    median = positive_median(times)
    return Value(median, "s", "measured", spread=(times[180] - times[20]) / median, note="p10 to p90 of 200 exchanges")
