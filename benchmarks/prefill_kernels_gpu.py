"""Every form of prefill attention on a GPU: by pointers, by tensor descriptors, and cuDNN's over the same pages.

python -m benchmarks.prefill_kernels_gpu [--seconds 45] [--shape 32/8/128]... [--no-roles]
Then, in a process of its own with a time limit, kernels with roles for warps, which no interpreter checks. Each form is compared
with the first one's result, on a step of uneven prompts too, and timed in turn with the others; one that cannot run is a line
that says why. TFLOP/s count the keys that a query sees.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import numpy as np
import torch
from benchmarks.kernels_gpu import graph_seconds
from triton.backends.compiler import GPUTarget

from dragoman_agent.device.cuda_library import AttentionSizes, CudnnAttention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list
from dragoman_kernels.triton.compile_only import compiling
from dragoman_kernels.triton.launches import PrefillLaunch, ws_prefill_launches

PAGE = 64
SHAPES = ((32, 8, 128), (32, 8, 64), (16, 8, 128))  # query heads, KV heads, head size
# (prompts, tokens of each that are computed, tokens before them)
CASES = ((1, 8192, 0), (16, 1024, 0), (24, 512, 0), (1, 2048, 6144))
UNEVEN = (
    (700, 0),
    (1, 900),
    (333, 64),
    (64, 1),
    (129, 63),
    (2, 126),
)  # queries and tokens before them: compared, not timed
OLD = tuple(PrefillLaunch(*launch) for launch in ((64, 64, 4, 3), (64, 64, 4, 5), (64, 64, 8, 3), (128, 64, 8, 3)))
NEW = tuple(
    PrefillLaunch(*launch, tma=True)
    for launch in (
        (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 5), (128, 64, 8, 3), (128, 64, 8, 5), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 4, 5), (128, 32, 4, 3), (128, 32, 4, 5),
    )
)  # fmt: skip
FORMS = (*OLD, *NEW)


ROLES_SECONDS = 25.0
TOLERANCE = 1e-2  # of two results in bfloat16, in the Euclidean norm
CALLS = 3  # in a graph


@dataclass(frozen=True, slots=True)
class Step:
    """Prompts of one step and their cache, on the card."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    starts: np.ndarray
    lens: np.ndarray

    @property
    def tera_flops(self) -> float:
        """Two products for each key that a query sees."""
        counts = np.diff(self.starts).astype(np.float64)
        seen = counts * (self.lens - counts) + counts * (counts + 1) / 2
        return float(4 * self.q.shape[1] * self.q.shape[2] * seen.sum()) * 1e-12

    def call(self, launch: PrefillLaunch, out: torch.Tensor) -> Callable[[], object]:
        """What attends into `out`."""
        work = torch.from_numpy(prefill_work_list(self.starts, self.lens, launch.block_m)).to(self.q.device)
        starts, lens = (torch.from_numpy(array).to(self.q.device) for array in (self.starts, self.lens))
        operands = (self.q, self.keys, self.values, self.tables, starts, lens, work)
        return lambda: paged_prefill_attention(*operands, out=out, **asdict(launch))

    def library_call(self, out: torch.Tensor) -> Callable[[], object]:
        """The same by cuDNN. Raises DeviceError where it is not there."""
        counts = np.diff(self.starts)
        sizes = AttentionSizes(
            self.q.shape[1], self.keys.shape[1], self.q.shape[2], self.keys.shape[2], self.keys.shape[0], len(self.lens),
            int(counts.max()), int(self.lens.max()),
        )  # fmt: skip
        library = CudnnAttention(sizes, torch.cuda.current_stream())
        library.take_tables(self.tables)
        part = library.part(torch.from_numpy(sizes.words(self.starts, self.lens)).to(self.q.device))
        return lambda: library.run(self.q, self.keys, self.values, part, out)


def make_step(
    prompts: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int, *, page: int = PAGE, device: str = "cuda"
) -> Step:
    """`prompts` are (queries, tokens before them); their pages lie anywhere."""
    card = torch.device(device)
    counts = np.array([count for count, _ in prompts])
    lens = (counts + [before for _, before in prompts]).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    width = -(-int(lens.max()) // page)
    tables = (torch.randperm(len(prompts) * width, device=card).int() + 1).view(len(prompts), width)
    size = (len(prompts) * width + 1, kv_heads, page, dim)
    keys, values, q = (torch.randn(s, device=card).bfloat16() for s in (size, size, (int(starts[-1]), heads, dim)))
    return Step(q, keys, values, tables, starts, lens)


def compile_form(shape: tuple[int, int, int], launch: PrefillLaunch, capability: int) -> str:
    """In a process of its own; what it uses, or why there is none. The binary stays in Triton's cache."""
    from dragoman_kernels.triton.aot import resource_usage

    heads, kv_heads, dim = shape
    cache, q = torch.zeros(2, kv_heads, PAGE, dim).bfloat16(), torch.zeros(2, heads, dim).bfloat16()

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    found = []
    try:
        with compiling(GPUTarget("cuda", capability, 32), lambda _, binary, __: found.append(binary)):
            operands = (q, cache, cache, ints(1, 4), ints(2), ints(1), ints(1, 2))
            paged_prefill_attention(*operands, **asdict(launch))
        registers, spilled = resource_usage(found[0].asm["cubin"])
        return f"{registers} registers, {spilled} B spilled, {found[0].metadata.shared} B shared"
    except Exception as error:  # whatever a compiler says: the form is left out
        return f"{type(error).__name__}: {str(error).splitlines()[-1]}"


def with_roles(shape: Sequence[int]) -> tuple[PrefillLaunch, ...]:
    """Those that an H200 can run."""
    return ws_prefill_launches(shape[2], PAGE, (9, 0), 227 << 10)


def name_of(launch: PrefillLaunch) -> str:
    """Short, as a plan's decision has it."""
    text = f"m{launch.block_m}-n{launch.block_n}-w{launch.num_warps}-g{launch.num_stages}"
    return text + ("-tma" if launch.tma else "")


def close(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; infinite where a value is no number."""
    difference = (out.float() - expected.float()).norm() / expected.float().norm()
    return float(difference) if torch.isfinite(out).all() else float("inf")


def calls_of(
    step: Step, forms: Sequence[PrefillLaunch]
) -> Iterator[tuple[str, Callable[[torch.Tensor], Callable[[], object]]]]:
    """Each form's name and what makes its call; the first is what the others are compared with."""
    for launch in forms:
        yield name_of(launch), lambda out, launch=launch: step.call(launch, out)  # type: ignore[misc]
    if forms is FORMS:
        yield "cudnn", step.library_call


def seconds_of(body: Callable[[], object]) -> float:
    """Of one call, several in a graph."""
    stream = torch.cuda.current_stream()  # cuDNN's calls go nowhere else
    return graph_seconds(lambda: [body() for _ in range(CALLS)], 5, stream) / CALLS


def measure(
    step: Step, uneven: Step | None, forms: Sequence[PrefillLaunch], uses: dict[str, str], deadline: float
) -> None:
    """One table, quickest first; `uneven` prompts are compared too where there are any."""
    expected: list[torch.Tensor] = []
    rows: dict[str, list[float]] = {}
    bodies: dict[str, Callable[[], object]] = {}
    steps = [step] if uneven is None else [step, uneven]
    for each in zip(*(calls_of(one, forms) for one in steps), strict=True):
        name = each[0][0]
        outs = [torch.full_like(one.q, float("nan")) for one in steps]
        try:
            calls = [make(out) for (_, make), out in zip(each, outs, strict=True)]
            for call in calls:
                call()
            torch.cuda.synchronize()
        except Exception as error:  # a form that cannot run is a line of the table
            print(f"    {name:18} {type(error).__name__}: {(str(error).splitlines() or [''])[0][:140]}", flush=True)
            continue
        expected = expected or outs
        errors = [close(out, right) for out, right in zip(outs, expected, strict=True)]
        if not max(errors) <= TOLERANCE:
            print(f"    {name:18} WRONG: off by {', '.join(f'{error:.1e}' for error in errors)}", flush=True)
            continue
        bodies[name] = calls[0]
    for _ in range(2):  # in turn, so that a clock that falls hits all of them
        for name, body in bodies.items():
            if time.monotonic() < deadline:
                rows.setdefault(name, []).append(seconds_of(body))
    for name, times in sorted(rows.items(), key=lambda row: min(row[1])):
        seconds = min(times)
        print(f"    {name:18} {seconds * 1e6:8.1f} us {step.tera_flops / seconds:6.1f} TFLOP/s  {uses.get(name, '')}")


def tables(
    shapes: Sequence[tuple[int, ...]], roles: bool, uses: dict[tuple[object, str], str], deadline: float
) -> None:
    """Every shape and case: the forms, or those with roles beside the first of each other kind."""
    for shape in shapes:
        forms: Sequence[PrefillLaunch] = (OLD[0], NEW[1], *with_roles(shape)) if roles else FORMS
        uneven = make_step(list(UNEVEN), *shape)
        for count, tokens, before in CASES:
            step = make_step([(tokens, before)] * count, *shape)
            behind = f" behind {before}" if before else ""
            print(f"prefill {'/'.join(map(str, shape))} page {PAGE}: {count} x {tokens}{behind}", flush=True)
            first = (count, tokens, before) == CASES[0]
            mine = {name: text for (of, name), text in uses.items() if of == shape and first}
            measure(step, uneven if first else None, forms, mine, deadline)


def main() -> None:
    """Compile everything, then time it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="after which no more is timed")
    parser.add_argument("--shape", action="append", help="heads/KV heads/head size (default: three)")
    parser.add_argument("--no-roles", action="store_true", help="leave kernels with roles for warps out")
    parser.add_argument("--roles", action="store_true", help="them alone")
    options = parser.parse_args()
    shapes = [tuple(map(int, text.split("/"))) for text in options.shape or ()] or list(SHAPES)
    begun = time.monotonic()
    capability = torch.cuda.get_device_capability()
    own = [] if options.no_roles else [(shape, form) for shape in shapes for form in with_roles(shape)]
    jobs = own if options.roles else [*((shape, form) for shape in shapes for form in FORMS), *own]
    with ProcessPoolExecutor(max(1, min(14, (os.cpu_count() or 2) - 1)), mp_context=get_context("spawn")) as pool:
        target = [10 * capability[0] + capability[1]] * len(jobs)
        used = list(pool.map(compile_form, *zip(*jobs, strict=True), target)) if not options.roles else [""] * len(jobs)
    uses = {(shape, name_of(launch)): text for (shape, launch), text in zip(jobs, used, strict=True)}
    for (shape, name), text in uses.items():
        if text and not options.roles and name not in {name_of(form) for form in FORMS}:
            print(f"{'/'.join(map(str, shape))} {name}: {text}")
    print(f"{len(jobs)} forms compiled in {time.monotonic() - begun:.1f} s", flush=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        tables(shapes, options.roles, uses, begun + options.seconds)
    print(f"{time.monotonic() - begun:.1f} s in all", flush=True)
    if not (options.no_roles or options.roles):
        command = [
            sys.executable,
            "-m",
            "benchmarks.prefill_kernels_gpu",
            "--roles",
            "--seconds",
            str(ROLES_SECONDS),
        ]
        try:
            subprocess.run(
                [*command, *(f"--shape={text}" for text in options.shape or ())],
                check=False,
                timeout=ROLES_SECONDS + 10,
            )
        except subprocess.TimeoutExpired:
            print("roles: they did not end, and were ended")


if __name__ == "__main__":
    main()
