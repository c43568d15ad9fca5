"""Compiles every Triton kernel for every supported architecture without a GPU and checks it against its contract.

The launchers themselves are run, on small CPU tensors, with a driver that names a target and launches nothing: what is
compiled is what a GPU of that architecture would be asked to run.

python -m dragoman_kernels.triton.aot CONFIG.json... [--capability 90]... [--hip gfx942]... [--page 64]... [--jobs N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from dragoman_kernels.contract import SHARED_LIMIT_BYTES
from dragoman_kernels.registry import default_registry
from dragoman_kernels.triton.activation import silu_mul
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_fixed import FixedWorkspace, fixed_decode_attention
from dragoman_kernels.triton.attention_list import Cut, DecodeItems, listed_decode_attention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention
from dragoman_kernels.triton.compile_only import compiling
from dragoman_kernels.triton.contracts import contract_name
from dragoman_kernels.triton.edits import EditWorkspace, edit_rows
from dragoman_kernels.triton.filters import Drawn, FilterWorkspace, draw_rows
from dragoman_kernels.triton.gemm_decode import gemm_decode
from dragoman_kernels.triton.gemm_fixed import gemm_fixed
from dragoman_kernels.triton.launches import (
    DECODE_SPLITS,
    FIXED_PART_TOKENS,
    GEMM_LAUNCHES,
    DecodeLaunch,
    PrefillLaunch,
    decode_launches,
    fixed_attention_launches,
    fixed_gemm_launches,
    prefill_launches,
    tma_prefill_launches,
    ws_prefill_launches,
)
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.rope_cache import rope_and_cache
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows
from dragoman_kernels.triton.step_inputs import StepInputs, resolve_tokens
from dragoman_kernels.triton.stream_read import stream_read

CAPABILITIES = tuple(SHARED_LIMIT_BYTES)
_CPU = torch.device("cpu")
_KV_TYPES = (torch.bfloat16, torch.float8_e4m3fn)
_FLOAT8_CAPABILITY = 89  # the first whose instructions convert e4m3
_PAGE = 64
PAGES = (16, 64, 128)  # tokens in a page that plans choose among
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the kernels' constants come from."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    qk_norm: bool

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """From a Hugging Face config.json. Raises ValueError naming the file and the key it lacks."""
        try:
            config = json.loads(path.read_text())
            heads = config["num_attention_heads"]
            return cls(
                path.stem,
                heads,
                config.get("num_key_value_heads", heads),
                config.get("head_dim") or config["hidden_size"] // heads,
                config["hidden_size"],
                config["intermediate_size"],
                config["vocab_size"],
                config["model_type"] == "qwen3",
            )
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path}: cannot read a model's shapes: {error!r}; pass a model's config.json") from error


@dataclass(frozen=True, slots=True)
class Build:
    """One compiled kernel and what it uses."""

    kernel: str  # contract name
    capability: int
    num_registers: int  # a thread
    spill_bytes: int  # a thread
    shared_bytes: int  # a block
    constants: str

    def problems(self) -> list[str]:
        """What breaks the kernel's contract, each a sentence; empty when nothing does."""
        try:
            budget = default_registry().get(self.kernel).contract.resources
        except KeyError:
            return [f"{self.kernel} has no contract; add it to dragoman_kernels/triton/contracts.py"]
        if budget is None:
            return [f"{self.kernel}: its contract names no resources; give it a ResourceBudget"]
        where = f"{self.kernel} on sm_{self.capability} ({self.constants})"
        limits = (
            ("registers a thread", self.num_registers, budget.max_num_registers),
            ("bytes spilled a thread", self.spill_bytes, budget.max_spill_bytes),
            ("bytes of shared memory a block", self.shared_bytes, budget.shared_limit(self.capability)),
        )
        return [f"{where}: {used} {what}, {limit} allowed" for what, used, limit in limits if used > limit]


@contextmanager
def compiling_for(target: int | GPUTarget) -> Iterator[dict[str, tuple[str, Any, str]]]:
    """Launches inside compile for a compute capability or another target and run nothing; yields the kernels, by hash."""
    found: dict[str, tuple[str, Any, str]] = {}

    def note(function: Any, compiled: Any, options: dict[str, Any]) -> None:
        constants = {
            key: value for key, value in options.items() if key.isupper() or key in ("num_warps", "num_stages")
        }
        text = " ".join(f"{key}={value}" for key, value in constants.items())
        found.setdefault(compiled.hash, (contract_name(function.__name__), compiled, text))

    with compiling(GPUTarget("cuda", target, 32) if isinstance(target, int) else target, note):
        yield found


def launch_all(shape: ModelShape, capability: int, pages: Sequence[int]) -> None:
    """One launch of each form that serving `shape` in bfloat16 on `capability` with these pages may make."""
    launch_common(shape)
    if capability >= _FLOAT8_CAPABILITY:
        _launch_rope(shape, torch.float8_e4m3fn)
    _launch_gemm(shape, capability)
    _launch_attention(shape, capability, pages)


def launch_common(shape: ModelShape) -> None:
    """The kernels that are launched in one way everywhere."""
    _launch_rows(shape)
    _launch_sampling(shape)
    inputs = StepInputs(8, 4, _CPU)
    inputs.unpack(torch.zeros(256, dtype=torch.int32), _ints(8), 8)
    resolve_tokens(_ints(8), _ints(8))
    stream_read(torch.zeros(2 * 4096), torch.zeros(2))


def _zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def _ints(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def _launch_rows(shape: ModelShape) -> None:
    hidden = _zeros(2, shape.hidden_size)
    rms_norm(hidden, hidden[0], 1e-6)
    rms_norm(hidden, hidden[0], 1e-6, _zeros(2, shape.hidden_size))
    silu_mul(_zeros(2, 2 * shape.intermediate_size))
    _launch_rope(shape, torch.bfloat16)


def _launch_rope(shape: ModelShape, dtype: torch.dtype) -> None:
    cache = _cache(shape, _PAGE, dtype)
    qkv = _zeros(2, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    angles = torch.zeros(8, shape.head_dim // 2)
    norm = _zeros(shape.head_dim) if shape.qk_norm else None
    rope_and_cache(qkv, cache, cache, angles, angles, _ints(2), _ints(2), shape.num_heads, norm, norm)


def _launch_gemm(shape: ModelShape, capability: int) -> None:
    for k in (shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size):
        for launch in GEMM_LAUNCHES:
            gemm_decode(_zeros(8, k), _zeros(32, k), **asdict(launch))
        for tile in fixed_gemm_launches(SHARED_LIMIT_BYTES[capability]):
            gemm_fixed(_zeros(8, k), _zeros(32, k), **asdict(tile))


def _launch_attention(shape: ModelShape, capability: int, pages: Sequence[int]) -> None:
    """Every launch that a plan may choose for `capability` and these pages."""
    limit = SHARED_LIMIT_BYTES[capability]
    group, version = shape.num_heads // shape.num_kv_heads, divmod(capability, 10)
    for page, dtype in itertools.product(pages, _KV_TYPES if capability >= _FLOAT8_CAPABILITY else _KV_TYPES[:1]):
        for launch in decode_launches(group, shape.head_dim, page, limit):
            launch_decode(shape, page, launch, dtype)
            if dtype is torch.bfloat16:  # no plan groups or lists sequences whose K and V are in eight bits
                launch_decode(shape, page, launch, dtype, grouped=True)
                launch_listed(shape, page, launch)
        for choice in prefill_launches(shape.head_dim, page, version, limit):
            launch_prefill(shape, page, choice, dtype)
        if dtype is torch.bfloat16:
            for choices in (tma_prefill_launches, ws_prefill_launches):
                for choice in choices(shape.head_dim, page, version, limit):
                    launch_prefill(shape, page, choice)
        for choice in fixed_attention_launches(shape.head_dim, page, version, limit):
            _launch_fixed(shape, page, choice, dtype)


def _cache(shape: ModelShape, page: int, dtype: torch.dtype) -> torch.Tensor:
    return _zeros(2, shape.num_kv_heads, page, shape.head_dim).to(dtype)


def launch_decode(
    shape: ModelShape, page: int, launch: DecodeLaunch, dtype: torch.dtype = torch.bfloat16, *, grouped: bool = False
) -> None:
    """Unsplit, and split in the most parts: what lies between uses no more. K and V are in `dtype`; `grouped`: sequences
    share programs.
    """
    cache = _cache(shape, page, dtype)
    q = _zeros(1, shape.num_heads, shape.head_dim)
    for splits in (DECODE_SPLITS[0], DECODE_SPLITS[-1]):
        work = DecodeWorkspace(1, shape.num_heads, shape.head_dim, splits, _CPU)
        rows = _ints(1) if grouped else None
        paged_decode_attention(q, cache, cache, _ints(1, 4), _ints(1), work, splits, **asdict(launch), group_rows=rows)


def launch_listed(shape: ModelShape, page: int, launch: DecodeLaunch) -> None:
    """The work list, of as many sequences as the largest batch that may have one, and attention by it."""
    cache, q = _cache(shape, page, torch.bfloat16), _zeros(1, shape.num_heads, shape.head_dim)
    items, cut = DecodeItems(4, 1024, shape.num_kv_heads, _CPU), Cut(4, 4, launch.block_n)
    items.make(_ints(1), cut)
    work = DecodeWorkspace(4, shape.num_heads, shape.head_dim, 1, _CPU)
    listed_decode_attention(
        q, cache, cache, _ints(1, 4), work, items, cut, num_stages=launch.num_stages, num_warps=launch.num_warps
    )


def launch_prefill(shape: ModelShape, page: int, launch: PrefillLaunch, dtype: torch.dtype = torch.bfloat16) -> None:
    """A chunk of two tokens."""
    cache = _cache(shape, page, dtype)
    q = _zeros(2, shape.num_heads, shape.head_dim)
    paged_prefill_attention(q, cache, cache, _ints(1, 4), _ints(2), _ints(1), _ints(1, 2), **asdict(launch))


def _launch_fixed(shape: ModelShape, page: int, launch: PrefillLaunch, dtype: torch.dtype) -> None:
    """Parts that several programs share, and their fold: prompts run the same binary."""
    cache = _cache(shape, page, dtype)
    q = _zeros(1, shape.num_heads, shape.head_dim)
    work = FixedWorkspace(1, shape.num_heads, shape.head_dim, 4, _CPU)
    fixed_decode_attention(
        q, cache, cache, _ints(1, 4), _ints(1), work, FIXED_PART_TOKENS, 2, rows=launch.block_m,
        block_n=launch.block_n, num_stages=launch.num_stages, num_warps=launch.num_warps,
    )  # fmt: skip


def _launch_sampling(shape: ModelShape) -> None:
    work = SamplingWorkspace(2, shape.vocab_size, _CPU)
    uniforms = torch.zeros(2, dtype=torch.float64)
    logits, words = _zeros(2, shape.vocab_size), _ints(64)
    drawn = Drawn(torch.zeros(2), uniforms, _ints(2), _ints(2))
    sample_rows(logits, drawn.temperatures, uniforms, work, drawn.token_ids, drawn.finite)
    filters, edits = FilterWorkspace(2, shape.vocab_size, _CPU), EditWorkspace(2, shape.vocab_size, _CPU)
    for has_lists in (False, True):
        edit_rows(logits, words, 0, 2, work, edits, has_lists=has_lists)
    draw_rows(logits, edits.logits, words, 2, work, filters, drawn, has_filters=True, has_random=True)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread of the kernel in `cubin`, from Triton's own cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False)
    match = _USAGE.search(done.stdout)
    if done.returncode or match is None:
        raise RuntimeError(f"cuobjdump -res-usage gave no figures: {done.stdout}{done.stderr}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local


def compile_shapes(shapes: Sequence[ModelShape], capability: int, pages: Sequence[int] = PAGES) -> list[Build]:
    """Every kernel that serving `shapes` launches, compiled for `capability`; equal binaries once."""
    if os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted and cannot be compiled; unset it")
    with compiling_for(capability) as found:
        for shape in shapes:
            launch_all(shape, capability, pages)
    builds = []
    for name, compiled, constants in found.values():
        registers, spilled = resource_usage(compiled.asm["cubin"])
        builds.append(Build(name, capability, registers, spilled, compiled.metadata.shared, constants))
    return builds


def table(builds: Sequence[Build]) -> str:
    """One line a kernel and architecture: how many binaries, and the most each of them uses."""
    lines = [
        f"{'kernel':22} {'target':8} {'builds':>6} {'registers':>9} {'spill B':>8} {'shared B':>9} {'limit B':>9}  verdict"
    ]
    for name in sorted({build.kernel for build in builds}):
        for capability in sorted({build.capability for build in builds}):
            group = [build for build in builds if (build.kernel, build.capability) == (name, capability)]
            verdict = "broken" if any(build.problems() for build in group) else "kept"
            lines.append(
                f"{name:22} sm_{capability:<5} {len(group):>6} {max(b.num_registers for b in group):>9} "
                f"{max(b.spill_bytes for b in group):>8} {max(b.shared_bytes for b in group):>9} "
                f"{SHARED_LIMIT_BYTES[capability]:>9}  {verdict}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table, return 1 when a contract is broken."""
    from dragoman_kernels.triton.aot_hip import HIP_TARGETS, compile_hip, hip_table  # it builds on this module

    parser = argparse.ArgumentParser(prog="python -m dragoman_kernels.triton.aot", description=__doc__)
    parser.add_argument("configs", nargs="+", type=Path, help="config.json of each model")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="default: all")
    parser.add_argument("--page", type=int, action="append", choices=PAGES, help="tokens in a page (default: all)")
    parser.add_argument("--hip", action="append", choices=tuple(HIP_TARGETS), default=[], help="AMD targets")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    arguments = parser.parse_args(argv)
    try:
        shapes = [ModelShape.read(path) for path in arguments.configs]
    except ValueError as error:
        parser.error(str(error))
    pages = arguments.page or PAGES
    capabilities = arguments.capability or (() if arguments.hip else CAPABILITIES)
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        groups = list(pool.map(compile_shapes, [shapes] * len(capabilities), capabilities, [pages] * len(capabilities)))
        others = list(pool.map(compile_hip, [shapes] * len(arguments.hip), arguments.hip, [pages] * len(arguments.hip)))
    builds = [build for group in groups for build in group]
    hip = [build for group in others for build in group]
    for text in (table(builds) if builds else "", hip_table(hip) if hip else ""):
        print(text, end="\n" if text else "")
    problems = [problem for build in builds for problem in build.problems()]
    problems += [problem for build in hip for problem in build.problems()]
    for problem in problems:
        print(f"broken: {problem}")
    print(f"{len(builds) + len(hip)} binaries, {len(problems)} contracts broken")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
