"""Steps of the GPU probe: what starting, ordering and synchronising kernels costs, and atomics."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from dragoman_agent.device.cuda_probe_bench import MIB, Bench, StepError
from dragoman_agent.pal.analysis import measured, measured_cost, measured_gain, measured_list, rates
from dragoman_agent.pal.profile import Value
from dragoman_kernels.probe.driver import Launch, pointer, u32

_THREADS = 256
_DEPENDENT_LAUNCH_CAPABILITY = 90
_EXCHANGE_128_CAPABILITY = 90
# Of the driver's events, as it documents cuEventElapsedTime. A difference of many pieces tells as much less of one.
_EVENT_TICK_SECONDS = 0.5e-6
_ERRORS = 384  # byte offset beside the barriers' counter (0) and flag (256)


def _empty(bench: Bench, name: str = "empty", *, dependent: bool = False) -> Launch:
    return bench.session.launch("launch", name, bench.session.num_multiprocessors, _THREADS, dependent=dependent)


def _grid_note(bench: Bench) -> str:
    return f"an empty kernel of {bench.session.num_multiprocessors} x {_THREADS} threads"


def _a_piece(bench: Bench, queue: Callable[[int], Callable[[], object]], few: int, many: int) -> list[float]:
    """Seconds that one of `many - few` further pieces of work takes on the device."""
    session = bench.session
    short, long = queue(few), queue(many)
    for work in (short, long):
        work()
    session.synchronize()
    return [(session.seconds(long) - session.seconds(short)) / (many - few) for _ in range(bench.repeats + 2)]


def graph_node(bench: Bench) -> dict[str, Value]:
    """Seconds a kernel adds to a chain in a graph; on compute capability 9.0 also with dependent launch."""
    session = bench.session

    def graph_of(launch: Launch) -> Callable[[int], Callable[[], object]]:
        return lambda count: session.capture(lambda: launch.times(count))

    plain = _a_piece(bench, graph_of(_empty(bench)), 200, 1000)
    values = {"scheduling.graph_node": measured(plain, "s", _grid_note(bench) + ", dependent on the one before")}
    if session.capability >= _DEPENDENT_LAUNCH_CAPABILITY:
        early = _a_piece(bench, graph_of(_empty(bench, "empty_dependent", dependent=True)), 200, 1000)
        values["scheduling.graph_node_dependent"] = measured(early, "s", _grid_note(bench) + ", dependent launch")
        values["scheduling.dependent_launch_gain"] = measured_gain(
            plain, early, "s", _EVENT_TICK_SECONDS / 800, "a node less a node with dependent launch"
        )
    session.drop_graphs()
    return values


def stream_launch(bench: Bench) -> dict[str, Value]:
    """Seconds between kernels queued one by one: on the device when all are queued already, and to queue one."""
    session = bench.session
    launch = _empty(bench)

    def many_of(count: int) -> Callable[[], object]:
        return lambda: launch.times(count)

    gap = _a_piece(bench, many_of, 100, 400)
    host = []
    for _ in range(bench.repeats):
        session.synchronize()
        start = time.perf_counter()
        launch.times(200)
        host.append((time.perf_counter() - start) / 200)
    session.synchronize()
    return {
        "scheduling.stream_launch": measured(gap, "s", _grid_note(bench) + ", all queued before the first starts"),
        "scheduling.host_launch": measured(host, "s", "to queue one kernel from Python through the driver API"),
    }


def grid_barrier(bench: Bench) -> dict[str, Value]:
    """Seconds for all multiprocessors to wait for each other within a kernel; two barriers, the quicker is given."""
    session = bench.session
    grid = session.num_multiprocessors
    if not session.attribute("COOPERATIVE_LAUNCH"):
        raise StepError("the device does not start all blocks of a kernel together (cooperative launch)")
    words = {"barrier_counter": "all wait on the counter", "barrier_flag": "all wait on a flag of the last to come"}
    found = {}
    with session.memory(512) as counter, session.memory(4 * grid) as seen:
        for name in words:

            def rounds(count: int, check: bool = False, name: str = name) -> Callable[[], object]:
                watched = [pointer(seen), pointer(counter + _ERRORS)] if check else [pointer(0), pointer(0)]
                arguments = [pointer(counter), u32(count), *watched]
                launch = session.launch("launch", name, grid, _THREADS, arguments, cooperative=True)

                def work() -> None:
                    session.set_words(counter, 0, 128)
                    launch()

                return work

            session.set_words(seen, 0, grid)
            rounds(100, True)()
            errors = session.read_words(counter + _ERRORS, 1)[0]
            if errors:
                raise StepError(f"{name} let {errors} blocks pass early, so its time cannot be trusted")
            found[name] = _a_piece(bench, rounds, 500, 2500)
    name = min(found, key=lambda each: statistics.median(found[each]))
    note = f"{grid} blocks of {_THREADS} threads; {words[name]}"
    return {"scheduling.grid_barrier": measured(found[name], "s", note)}


def events(bench: Bench) -> dict[str, Value]:
    """What an event costs on the device: a record between two kernels, and a wait of one stream for another."""
    session, driver = bench.session, bench.session.driver
    launch = _empty(bench)
    other = session.new_stream()
    there, back, plain = session.event(), session.event(), session.event()

    def kernels(count: int) -> Callable[[], object]:
        return lambda: launch.times(count)

    def recorded(count: int) -> Callable[[], object]:
        def work() -> None:
            for _ in range(count):
                launch()
                session.call(driver.cuEventRecord(plain, session.stream))

        return work

    def turns(count: int) -> Callable[[], object]:
        def work() -> None:
            for _ in range(count):
                launch()
                session.call(driver.cuEventRecord(there, session.stream))
                session.call(driver.cuStreamWaitEvent(other, there, 0))
                launch(other)
                session.call(driver.cuEventRecord(back, other))
                session.call(driver.cuStreamWaitEvent(session.stream, back, 0))

        return work

    alone = _a_piece(bench, kernels, 50, 150)
    with_record = _a_piece(bench, recorded, 50, 150)
    with_wait = [each / 2 for each in _a_piece(bench, turns, 20, 80)]
    tick = _EVENT_TICK_SECONDS / 100
    return {
        "scheduling.event_record": measured_cost(
            with_record, alone, "s", tick, "on the device, between two kernels of a stream"
        ),
        "scheduling.event_wait": measured_cost(
            with_wait, alone, "s", tick, "on the device, from a kernel to one of another stream, beyond a launch"
        ),
    }


def atomics(bench: Bench) -> dict[str, Value]:
    """Atomic exchanges a second by width in bits."""
    session = bench.session
    widths = [32, 64] + ([128] if session.capability >= _EXCHANGE_128_CAPABILITY else [])
    grid = session.num_multiprocessors * 4
    rounds, block = 256, 512
    size = 4 * MIB
    found = []
    with session.memory(size + 64) as words:
        for width in widths:
            arguments = [pointer(words), u32(size * 8 // width - 1), u32(rounds), pointer(words + size)]
            launch = session.launch("atomics", f"exchange_{width}", grid, block, arguments)
            found.append(rates(grid * block * rounds, session.samples(launch, bench.repeats)))
    note = f"exchanges on neighbouring words of {size // MIB} MiB in L2"
    return {"scheduling.atomics": measured_list(found, "operations/s", [str(width) for width in widths], note)}
