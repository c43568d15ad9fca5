"""Steps of the GPU probe: how fast memory and L2 are read and copied, and how long one load takes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dragoman_agent.device.cuda_probe_bench import MIB, Bench, StepError, expected_sum
from dragoman_agent.pal.analysis import (
    find_knee,
    fit_line,
    measured,
    measured_list,
    measured_rate,
    rates,
    significance_note,
)
from dragoman_agent.pal.profile import Value
from dragoman_kernels.probe.driver import Launch, pointer, u32, u64

_BY_SIZE = tuple(mib * MIB for mib in (2, 8, 32, 128, 512, 1152, 2304))
_PHASE_SIZES = tuple(mib * MIB for mib in (1, 2, 4, 8, 16, 32, 64))
_NUM_REGIONS = 16
_NODE_BYTES = 256  # between the nodes of a ring: no two share a line or a pair of lines
_MAX_GRID = 1 << 19
_MIN_SEARCHED = 512 * MIB
_MIN_COPIED = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """How a stream is cut: loads in flight a thread, threads, rounds of them a chunk, blocks a multiprocessor (0: one a chunk)."""

    depth: int
    block: int
    rounds: int
    resident: int = 0

    @property
    def chunk_bytes(self) -> int:
        """What one block reads before it takes the next chunk or ends."""
        return 16 * self.depth * self.block * self.rounds

    def grid(self, num_bytes: int, num_multiprocessors: int) -> int:
        """Blocks for `num_bytes`."""
        chunks = num_bytes // self.chunk_bytes
        return min(chunks, self.resident * num_multiprocessors) if self.resident else chunks

    def note(self) -> str:
        """In words."""
        how = f"{self.resident} blocks a multiprocessor" if self.resident else "one block a chunk"
        return (
            f"{self.depth} x 16 bytes in flight, {self.block} threads, chunks of {self.chunk_bytes // 1024} KiB, {how}"
        )


STREAM_SHAPES = (
    *(Shape(depth, block, rounds) for depth in (4, 8) for block in (256, 512) for rounds in (1, 2, 4, 8)),
    Shape(4, 512, 1, 4), Shape(4, 1024, 1, 2), Shape(8, 256, 1, 4), Shape(8, 512, 1, 2), Shape(4, 256, 4, 8),
)  # fmt: skip
_FEWEST_BLOCKS = max(STREAM_SHAPES, key=lambda shape: shape.chunk_bytes)  # whose sums are soon read back
CHAIN_SHAPES = (
    Shape(1, 256, 1), Shape(2, 256, 1), Shape(4, 256, 1), Shape(8, 256, 1), Shape(4, 512, 1), Shape(4, 256, 1, 4),
    Shape(8, 256, 1, 4),
)  # fmt: skip


def read_launch(bench: Bench, shape: Shape, address: int, num_bytes: int, sums: int) -> Launch:
    """One read of `num_bytes`; `sums` has a word for each block."""
    grid = shape.grid(num_bytes, bench.session.num_multiprocessors)
    arguments = [pointer(address), u64(num_bytes // 16), u32(shape.chunk_bytes // 16), pointer(sums)]
    return bench.session.launch("stream", f"read_{shape.depth}", grid, shape.block, arguments)


def check_sum(bench: Bench, address: int, num_bytes: int, sums: int, shape: Shape) -> None:
    """Raises StepError unless a read by `shape` sees every word of the pool's pattern once."""
    read_launch(bench, shape, address, num_bytes, sums)()
    grid = shape.grid(num_bytes, bench.session.num_multiprocessors)
    if sum(bench.session.read_words(sums, grid)) % (1 << 32) != expected_sum(num_bytes):
        raise StepError("a stream over memory returned a wrong sum, so its rate cannot be trusted")


def read(bench: Bench) -> dict[str, Value]:
    """Read-only bandwidth of a buffer far larger than L2."""
    address, size = bench.pool()
    with bench.session.memory(4 * _MAX_GRID) as sums:
        part = _searched(bench, size)
        shape = _best(
            STREAM_SHAPES, lambda shape: bench.session.samples(read_launch(bench, shape, address, part, sums), 2)
        )
        check_sum(bench, address, size, sums, shape)
        seconds = bench.session.samples(read_launch(bench, shape, address, size, sums), bench.repeats)
    return {"memory.read_bandwidth": measured_rate(size, seconds, "bytes/s", f"{size // MIB} MiB; {shape.note()}")}


def _searched(bench: Bench, size: int) -> int:
    """Bytes that shapes are compared on: a quarter of the buffer in a quick probe, as long as that is far larger than L2."""
    return size if bench.full or size < 4 * _MIN_SEARCHED else size // 4


def copy(bench: Bench) -> dict[str, Value]:
    """Bandwidth of a copy on the device, counting what is read and what is written."""
    session = bench.session
    source, size = bench.pool()
    if not bench.full and size >= 2 * _MIN_COPIED:
        size //= 2  # memory takes longer to be given than to be copied
    with session.memory(size) as target, session.memory(4 * _MAX_GRID) as sums:

        def launch(shape: Shape, num_bytes: int) -> Launch:
            arguments = [pointer(source), pointer(target), u64(num_bytes // 16), u32(shape.chunk_bytes // 16)]
            grid = shape.grid(num_bytes, session.num_multiprocessors)
            return session.launch("stream", f"copy_{shape.depth}", grid, shape.block, arguments)

        def by_driver() -> None:
            session.call(session.driver.cuMemcpyDtoDAsync(target, source, size, session.stream))

        part = _searched(bench, size)
        shape = _best(STREAM_SHAPES, lambda shape: session.samples(launch(shape, part), 2))
        session.set_words(target, 0, size // 4)
        launch(shape, size)()
        check_sum(bench, target, size, sums, _FEWEST_BLOCKS)
        own = session.samples(launch(shape, size), bench.repeats)
        library = session.samples(by_driver, bench.repeats)
    quicker = statistics.median(own) < statistics.median(library)
    note = f"{size // MIB} MiB read and written; " + (shape.note() if quicker else "the driver's copy")
    return {"memory.copy_bandwidth": measured_rate(2 * size, own if quicker else library, "bytes/s", note)}


def phase(bench: Bench) -> dict[str, Value]:
    """What a dependent kernel costs beyond its bytes: the intercept over chained reads of 1 to 64 MiB."""
    with bench.session.memory(4 * _MAX_GRID) as sums:
        times = [_chain(bench, size, sums)[1] for size in _PHASE_SIZES]
    medians = [statistics.median(each) for each in times]
    line = fit_line(_PHASE_SIZES, medians)
    by_repeat = [fit_line(_PHASE_SIZES, each) for each in zip(*times, strict=True)]
    note = f"chained reads of 1 to 64 MiB in a graph; the line is within {line.max_error:.1%} of each"
    if line.intercept <= 0:
        raise StepError(f"the intercept of {len(medians)} sizes is {line.intercept:.2e} s: no phase was seen")
    return {
        "scheduling.phase": Value(
            line.intercept,
            "s",
            "measured",
            spread=_spread([each.intercept for each in by_repeat], line.intercept),
            note=note,
        ),
        "scheduling.phase_rate": Value(
            line.rate, "bytes/s", "measured", spread=_spread([each.rate for each in by_repeat], line.rate), note=note
        ),
    }


def read_by_size(bench: Bench) -> dict[str, Value]:
    """Rate of one cold read by its size, launch included: each node of a graph reads another region."""
    _, pool = bench.pool()
    sizes = [size for size in _BY_SIZE if size <= pool // 2]
    with bench.session.memory(4 * _MAX_GRID) as sums:
        found = [rates(size, _chain(bench, size, sums)[1]) for size in sizes]
    note = "cold, one node of a graph each; the best of several grids"
    return {"memory.read_by_size": measured_list(found, "bytes/s", [str(size) for size in sizes], note)}


def _chain(bench: Bench, size: int, sums: int) -> tuple[Shape, list[float]]:
    """Seconds of one read of `size` bytes within a chain of reads, by the best shape for that size."""
    count = bench.session.num_multiprocessors
    candidates = [
        shape
        for shape in CHAIN_SHAPES
        if size >= shape.chunk_bytes * count // 4 and shape.grid(size, count) <= _MAX_GRID
    ]
    shape = _best(candidates or CHAIN_SHAPES[:1], lambda shape: _chain_samples(bench, shape, size, sums, 2))
    return shape, _chain_samples(bench, shape, size, sums, bench.repeats)


def _chain_samples(bench: Bench, shape: Shape, size: int, sums: int, count: int) -> list[float]:
    """A long chain less a short one, over the difference: what starting and ending a graph costs drops out."""
    session = bench.session
    pool, pool_bytes = bench.pool()
    regions = pool_bytes // size
    few = max(2, min(64, (512 * MIB) // size))
    launches = [read_launch(bench, shape, pool + i * size, size, sums) for i in range(min(regions, 4 * few))]

    def chain(first: int, number: int) -> Callable[[], None]:
        return session.capture(lambda: [launches[(first + i) % len(launches)]() for i in range(number)])

    short, long = chain(3 * few, few), chain(0, 3 * few)
    for graph in (long, short):
        graph()
    samples = [(session.seconds(long) - session.seconds(short)) / (2 * few) for _ in range(count)]
    session.drop_graphs()
    return samples


def level_two(bench: Bench) -> dict[str, Value]:
    """Rate of reads served by L2, and the size from which they no longer are."""
    session = bench.session
    address, pool = bench.pool()
    reported = session.attribute("L2_CACHE_SIZE")
    unit = 4 * 512 * 16
    parts = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 32, 48, 64)
    sizes = sorted({reported * part // 16 // unit * unit for part in parts})
    sizes = [size for size in sizes if unit <= size <= pool]
    grid = session.num_multiprocessors * session.blocks_per_multiprocessor("stream", "reread", 512)
    found = []
    with session.memory(4 * grid) as sums:
        for size in sizes:
            few = max(2, (256 * MIB) // size)

            def launch(passes: int, size: int = size) -> Launch:
                arguments = [pointer(address), u64(size // 16), u32(passes), pointer(sums)]
                return session.launch("stream", "reread", grid, 512, arguments)

            short, long = launch(few), launch(5 * few)
            long()
            differences = [session.seconds(long) - session.seconds(short) for _ in range(bench.repeats)]
            found.append(rates(4 * few * size, differences))
    medians = [statistics.median(each) for each in found]
    knee = find_knee(sizes, medians)
    best = medians.index(max(medians))
    note = (
        f"halfway between {knee.plateau / 1e9:.0f} and {knee.floor / 1e9:.0f} GB/s; nine tenths of the gain up to "
        f"{knee.full_size / MIB:.1f} MiB; the driver reports {reported / MIB:.0f} MiB"
    )
    labels = [str(size) for size in sizes]
    return {
        "memory.reread_by_size": measured_list(found, "bytes/s", labels, "repeated reads of one buffer, past L1"),
        "memory.l2_knee": Value(knee.size, "bytes", "measured", note=note),
        "memory.l2_bandwidth": measured(
            found[best], "bytes/s", f"repeated reads of {sizes[best] / MIB:.1f} MiB, past L1; all multiprocessors"
        ),
    }


class _Ring:
    """A ring of pointers in a piece of memory, followed by one thread; each run goes on where the last one ended."""

    def __init__(self, bench: Bench, address: int, size: int, node_bytes: int, last: int) -> None:
        count = 1 << ((size // node_bytes).bit_length() - 1)
        self._bench, self._address, self._last = bench, address, last
        self.count, self.num_bytes = count, count * node_bytes
        session = bench.session
        arguments = [pointer(address), u64(count), u64(node_bytes)]
        session.launch("chase", "make_ring", session.num_multiprocessors * 4, 256, arguments)()
        self._start = address

    def seconds_a_load(self, steps: int) -> float:
        """A long run less a short one."""
        short = self._run(steps // 4)
        return (self._run(steps) - short) / (steps - steps // 4)

    def _run(self, steps: int) -> float:
        session = self._bench.session
        launch = session.launch("chase", "chase", 1, 1, [pointer(self._start), u32(steps), pointer(self._last)])
        seconds = session.seconds(launch)
        low, high = session.read_words(self._last, 2)
        self._start = low | high << 32
        if not self._address <= self._start < self._address + self.num_bytes:
            raise StepError("a chase over memory left its ring, so its time cannot be trusted")
        return seconds


def latency(bench: Bench) -> dict[str, Value]:
    """Seconds of one load that the next one depends on: in memory and in L2."""
    session = bench.session
    bench.drop_pool()
    size = min(1 << 30, bench.memory_budget() // 2)
    near = max(1 * MIB, session.attribute("L2_CACHE_SIZE") // 8)
    with session.memory(size) as address, session.memory(64) as last:
        wide = _Ring(bench, address, size, _NODE_BYTES, last)
        memory = [wide.seconds_a_load(2048) for _ in range(bench.repeats)]
        close = _Ring(bench, address, near, 128, last)
        close.seconds_a_load(2 * close.count)  # all of it in L2
        cached = [close.seconds_a_load(8192) for _ in range(bench.repeats)]
    return {
        "memory.latency": measured(memory, "s", f"dependent loads over {wide.num_bytes // MIB} MiB, one thread"),
        "memory.l2_latency": measured(cached, "s", f"dependent loads over {close.num_bytes // MIB} MiB, one thread"),
    }


def latency_by_region(bench: Bench) -> dict[str, Value]:
    """Latency in regions spread over half of the free memory, measured in turns, and whether they differ."""
    session = bench.session
    bench.drop_pool()
    arena = bench.memory_budget() // 2 // (2 * MIB) * (2 * MIB)
    region = min(256 * MIB, arena // _NUM_REGIONS // MIB * MIB)
    step = (arena - region) // (_NUM_REGIONS - 1) // (2 * MIB) * (2 * MIB)
    with session.memory(arena) as address, session.memory(64) as last:
        rings = [_Ring(bench, address + i * step, region, _NODE_BYTES, last) for i in range(_NUM_REGIONS)]
        samples: list[list[float]] = [[] for _ in rings]
        order = random.Random(0)
        for ring in rings:
            ring.seconds_a_load(256)
        for _ in range(bench.repeats):
            for index in order.sample(range(_NUM_REGIONS), _NUM_REGIONS):
                samples[index].append(rings[index].seconds_a_load(1024))
    note = f"{_NUM_REGIONS} regions of {region // MIB} MiB over {arena // MIB} MiB, {bench.repeats} turns; {significance_note(samples)}"
    labels = [str(i * step) for i in range(_NUM_REGIONS)]
    return {"memory.latency_by_region": measured_list(samples, "s", labels, note)}


def by_block_size(bench: Bench) -> dict[str, Value]:
    """Throughput and occupancy of a read by its threads a block, with as many blocks as fit at a time."""
    session = bench.session
    address, pool = bench.pool()
    size = min(pool, 1 << 30)
    sizes = [64, 128, 256, 512, 768, 1024]
    most = session.attribute("MAX_THREADS_PER_MULTIPROCESSOR")
    found, occupancy = [], []
    with session.memory(4 * _MAX_GRID) as sums:
        for block in sizes:
            resident = session.blocks_per_multiprocessor("stream", "read_4", block)
            occupancy.append(resident * block / most)
            whole = size // (64 * block) * (64 * block)
            launch = read_launch(bench, Shape(4, block, 1, resident), address, whole, sums)
            found.append(rates(whole, session.samples(launch, bench.repeats)))
    labels = [str(block) for block in sizes]
    note = f"a read of {size // MIB} MiB, 4 x 16 bytes in flight a thread"
    return {
        "scheduling.throughput_by_block_size": measured_list(found, "bytes/s", labels, note),
        "scheduling.occupancy_by_block_size": Value(
            tuple(occupancy), "", "reported", labels=tuple(labels), note="share of the threads a multiprocessor holds"
        ),
    }


def _best(shapes: Sequence[Shape], samples: Callable[[Shape], list[float]]) -> Shape:
    return min(shapes, key=lambda shape: statistics.median(samples(shape)))


def _spread(values: Sequence[float], median: float) -> float:
    return (max(values) - min(values)) / median
