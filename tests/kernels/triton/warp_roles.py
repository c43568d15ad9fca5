"""The prefill kernel with roles for warps, run by threads: what Triton's interpreter, which knows no Gluon, cannot check.

python tests/kernels/triton/warp_roles.py      a line a case: its name and the largest error against float64
Each role is a thread; barriers have the phases, arrivals and bytes of Hopper's; copies come late, products read their
operands as late as a wait allows and loads are done when what they brought is used, so that a tile given back too early, or
waited for in the wrong phase, shows.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from dragoman_kernels.triton import attention_prefill_ws
from dragoman_kernels.triton.attention_prefill import prefill_work_list

PATIENCE = 10.0  # seconds until a barrier that nobody completes is called a deadlock
LATE = 1e-3  # seconds that a copy may take
PROMPTS = [(70, 0), (1, 90), (33, 64), (64, 1), (129, 63), (2, 126), (200, 200)]  # queries, tokens before them


class Pointer:
    """Into a flat array: what is read or written outside it is an error."""

    def __init__(self, values: np.ndarray, offset: Any = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.values, self.offset + more)


class Barrier:
    """In shared memory: a phase ends with the last arrival and the last byte."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._missing = self._num_bytes = self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, num_bytes: int = 0) -> None:
        with self._changed:
            assert self._missing > 0, "more arrivals than a phase has"
            self._missing -= 1
            self._settle(num_bytes)

    def take(self, num_bytes: int) -> None:
        with self._changed:
            self._settle(-num_bytes)

    def _settle(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._missing == 0 and self._num_bytes == 0:
            self._phase ^= 1
            self._missing = self._count
            self._changed.notify_all()

    def wait(self, phase: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._phase != phase, PATIENCE), "deadlock"


class Loaded:
    """Registers: nothing but their first use waits for a load, no barrier does."""

    def __init__(self, source: np.ndarray) -> None:
        self._source = source
        self._values: np.ndarray | None = None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._values is None:
            self._values = self._source.copy()
        return self._values


class Shared:
    """Tiles in shared memory, NaN until something comes."""

    dtype = np.float32

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def index(self, place: int) -> Shared:
        return Shared(self.values[place])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.transpose(order))

    def load(self, layout: object) -> Loaded:
        return Loaded(self.values)

    def store(self, values: np.ndarray) -> None:
        self.values[...] = values


class Barriers(list[Barrier]):
    def index(self, place: int) -> Barrier:
        return self[place]


class Descriptor:
    """Of a tensor with two dimensions; what lies past its rows is 0."""

    dtype, layout = np.float32, None

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def copy(self, place: Sequence[int], barrier: Barrier, tile: Shared) -> None:
        row, column = map(int, place)
        height, width = tile.values.shape

        def late() -> None:
            time.sleep(random.random() * LATE)
            part = self.values[row : row + height, column : column + width]
            tile.values[...] = 0
            tile.values[: len(part)] = part
            barrier.take(2 * height * width)

        threading.Thread(target=late, daemon=True).start()


class Product:
    """Under way: computed when it is waited for, from what then lies in shared memory."""

    def __init__(self, left: np.ndarray | Loaded, right: Shared, acc: Any, use_acc: bool) -> None:
        self.left, self.right, self.acc = left, right, acc if use_acc else None

    def result(self) -> np.ndarray:
        before = self.acc.result() if isinstance(self.acc, Product) else self.acc
        made = np.asarray(self.left) @ self.right.values
        return made if before is None else before + made


def wait_for_products(num_outstanding: int, products: Sequence[Product]) -> Any:
    time.sleep(random.random() * LATE)
    found = tuple(product.result() for product in products)
    return found[0] if len(found) == 1 else found


def read(pointer: Pointer) -> int:
    assert 0 <= pointer.offset < pointer.values.size, "read outside an array"
    return int(pointer.values.reshape(-1)[pointer.offset])


def write(pointer: Pointer, values: np.ndarray, mask: np.ndarray) -> None:
    offsets, mask = np.broadcast_to(pointer.offset, values.shape), np.broadcast_to(mask, values.shape)
    pointer.values.reshape(-1)[offsets[mask]] = values[mask]


def run_roles(functions: Sequence[tuple[Any, tuple[Any, ...]]], num_warps: object, num_registers: object) -> None:
    wrong: list[BaseException] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # told by the thread that waits
            wrong.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE + 5)
    if wrong:
        raise wrong[0]


def language(place: int) -> types.SimpleNamespace:
    """What the kernel asks of Gluon, for block `place`."""

    def allocate(dtype: object, size: Sequence[int], layout: object) -> Any:
        if dtype != "barrier":
            return Shared(np.full(size, np.nan, np.float32))
        return Barrier() if len(size) == 1 else Barriers(Barrier() for _ in range(size[0]))

    def nothing(*arguments: object) -> None:
        return None

    return types.SimpleNamespace(
        constexpr=None, float32=np.float32, int64="barrier", program_id=lambda axis: place, load=read, store=write,
        arange=lambda begin, end, layout: np.arange(begin, end), expand_dims=np.expand_dims, where=np.where,
        maximum=np.maximum, minimum=np.minimum, max=np.max, sum=np.sum, exp2=np.exp2, full_like=np.full_like,
        zeros=lambda size, dtype, layout: np.zeros(size, dtype), cast=lambda value, dtype: value,
        full=lambda size, value, dtype, layout: np.full(size, value, dtype), convert_layout=lambda value, layout: value,
        SliceLayout=nothing, NVMMADistributedLayout=nothing, DotOperandLayout=nothing, BlockedLayout=nothing,
        inline_asm_elementwise=lambda text, constraints, values, **options: values[0], thread_barrier=nothing,
        static_range=range, allocate_shared_memory=allocate, warp_specialize=run_roles,
    )  # fmt: skip


def functions(place: int) -> dict[str, Any]:
    """The kernel's functions, in this module's terms."""
    names: dict[str, Any] = {
        "gl": language(place), "ROWS": 64, "fence_async_shared": lambda: None,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=False: Product(a, b, acc, use_acc),
        "warpgroup_mma_wait": wait_for_products,
        "tma": types.SimpleNamespace(async_copy_global_to_shared=Descriptor.copy),
        "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=Barrier.init, expect=Barrier.arrive, arrive=Barrier.arrive, wait=Barrier.wait
        ),
    }  # fmt: skip
    for name, value in vars(attention_prefill_ws).items():
        if isinstance(value, JITFunction):
            names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
    return names


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, before: int) -> np.ndarray:
    """float64; q [num_queries, num_heads, dim], keys and values [context, num_kv_heads, dim]."""
    keys, values = (np.repeat(x.astype(np.float64), q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), keys) * q.shape[2] ** -0.5
    visible = np.arange(len(keys)) <= before + np.arange(len(q))[:, None]
    weights = np.exp(np.where(visible, scores, -np.inf) - np.where(visible, scores, -np.inf).max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)


def check(
    prompts: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int, page: int, groups: int, stages: int, parts: int,
    programs: int, num_padded: int = 0,
) -> float:  # fmt: skip
    """The largest error; infinite where a value was not written. What no token lies at holds NaN; `num_padded` work items
    are of a sequence without queries and context.
    """
    rng = np.random.default_rng(3)
    counts, befores = (np.array(column) for column in zip(*prompts, strict=True))
    lens = (counts + befores).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    width = -(-int(lens.max()) // page)
    num_blocks = len(prompts) * width + 1
    tables = (rng.permutation(num_blocks - 1) + 1).astype(np.int32).reshape(len(prompts), width)
    keys, values = np.full((2, num_blocks, kv_heads, page, dim), np.nan, np.float32)
    wanted = []
    q = rng.standard_normal((int(starts[-1]), heads, dim)).astype(np.float32)
    for table, begin, end, length, before in zip(tables, starts, starts[1:], lens, befores, strict=False):
        tokens = rng.standard_normal((2, length, kv_heads, dim)).astype(np.float32)
        for cache, mine in zip((keys, values), tokens, strict=True):
            for at in range(0, length, page):
                cache[table[at // page], :, : min(page, length - at)] = mine[at : at + page].transpose(1, 0, 2)
        wanted.append(attention(q[begin:end], *tokens, before))
    work = prefill_work_list(starts, lens, 64 * groups)
    if num_padded:
        starts, lens = np.append(starts, starts[-1:]), np.append(lens, np.int32(0))
        tables = np.vstack((tables, np.zeros_like(tables[:1])))
        work = np.vstack((work, np.full((num_padded, 2), (len(prompts), 0), np.int32)))
    out = np.full_like(q, np.nan)
    programs = min(programs, heads * len(work))
    for place in range(programs):
        functions(place)["_prefill_ws_kernel"](
            Descriptor(q.reshape(len(q), -1)), Descriptor(keys.reshape(-1, dim)), Descriptor(values.reshape(-1, dim)),
            *map(Pointer, (tables, starts, lens, work, out)), dim**-0.5 * np.log2(np.e), width, len(work), programs,
            heads, kv_heads, dim, page, 64, groups, stages, parts, 240,
        )  # fmt: skip
    error = np.abs(out - np.concatenate(wanted)).max()
    return float(error) if np.isfinite(error) else float("inf")


def cases() -> Iterator[tuple[str, float]]:
    """Every number of groups and tiles a stage."""
    for groups, parts in itertools.product((2, 3), (1, 2)):
        name = f"groups-{groups}-parts-{parts}"
        yield f"{name}-uneven", check(PROMPTS, 4, 2, 16, 64, groups, 2, parts, 5)
        yield f"{name}-padded", check([(300, 0)], 2, 1, 16, 64, groups, 3, parts, 3, num_padded=3)
        yield f"{name}-page128", check([(130, 70)] * 2, 2, 2, 32, 128, groups, 2, parts, 132)


def main() -> int:
    """Every case; 1 when one is off."""
    failed = 0
    for name, error in cases():
        failed += not error < 1e-5
        print(f"{name:28s} {error:.2e} {'ok' if error < 1e-5 else 'TOO LARGE'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
