"""Steps of the GPU probe: copies between the host's memory and the device's."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

from dragoman_agent.device.cuda_probe_bench import MIB, Bench
from dragoman_agent.pal.analysis import measured_rate
from dragoman_agent.pal.profile import Value

_QUICK_BYTES = 128 * MIB  # pinning takes longer than copying, and the rate is level from 16 MiB on


def pinned(bench: Bench) -> dict[str, Value]:
    """Copies from and to pinned memory, one way at a time; the full probe adds both ways together."""
    session, driver = bench.session, bench.session.driver
    size = min(1024 * MIB if bench.full else _QUICK_BYTES, bench.memory_budget() // 8)
    note = f"{size // MIB} MiB at a time, pinned"
    with session.memory(size) as card, session.pinned(size) as host:

        def up(stream: object = None) -> None:
            session.call(driver.cuMemcpyHtoDAsync(card, host, size, stream or session.stream))

        def down() -> None:
            session.call(driver.cuMemcpyDtoHAsync(host, card, size, session.stream))

        values = {
            "link.h2d_pinned": measured_rate(size, session.samples(up, bench.repeats), "bytes/s", note),
            "link.d2h_pinned": measured_rate(size, session.samples(down, bench.repeats), "bytes/s", note),
        }
        if bench.full:
            with session.memory(size) as second_card, session.pinned(size) as second_host:
                both = _both_ways(bench, up, (second_host, second_card, size))
                values["link.both_ways"] = measured_rate(
                    2 * size,
                    session.samples(both, bench.repeats),
                    "bytes/s",
                    f"{note}; one copy each way at once, summed",
                )
    return values


def _both_ways(bench: Bench, up: Callable[[object], None], down: tuple[int, int, int]) -> Callable[[], None]:
    """One copy up on another stream while one goes down on the session's."""
    session, driver = bench.session, bench.session.driver
    other, started, ended = session.new_stream(), session.event(), session.event()
    host, card, size = down

    def work() -> None:
        session.call(driver.cuEventRecord(started, session.stream))
        session.call(driver.cuStreamWaitEvent(other, started, 0))
        up(other)
        session.call(driver.cuEventRecord(ended, other))
        session.call(driver.cuMemcpyDtoHAsync(host, card, size, session.stream))
        session.call(driver.cuStreamWaitEvent(session.stream, ended, 0))

    return work


def pageable(bench: Bench) -> dict[str, Value]:
    """Copies from and to ordinary memory: the host's time, for the driver copies through its own pinned buffer."""
    session, driver = bench.session, bench.session.driver
    size = min(256 * MIB, bench.memory_budget() // 8)
    with session.memory(size) as card, mmap.mmap(-1, size) as pages:
        view = (ctypes.c_char * size).from_buffer(pages)
        host = ctypes.addressof(view)
        ctypes.memset(host, 1, size)  # touched, so that no page fault is measured
        try:
            up = [_host_seconds(bench, lambda: session.call(driver.cuMemcpyHtoD(card, host, size))) for _ in range(6)]
            down = [_host_seconds(bench, lambda: session.call(driver.cuMemcpyDtoH(host, card, size))) for _ in range(6)]
        finally:
            del view
    note = f"{size // MIB} MiB at a time, pageable, the host's time"
    return {
        "link.h2d_pageable": measured_rate(size, up[1:], "bytes/s", note),
        "link.d2h_pageable": measured_rate(size, down[1:], "bytes/s", note),
    }


def _host_seconds(bench: Bench, work: Callable[[], object]) -> float:
    bench.session.synchronize()
    start = time.perf_counter()
    work()
    bench.session.synchronize()
    return time.perf_counter() - start
