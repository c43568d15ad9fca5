"""Compiles a plan's Triton kernels in processes of their own while the engine imports PyTorch and reads weights.

    python -m dragoman_agent.device.precompile < order.json

A worker neither imports PyTorch nor touches the device: it runs the launchers on tensors without contents and leaves the
binaries in Triton's cache, where the first launch finds them. What it cannot compile is left to that launch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dragoman_agent.device.kernel_forms import Form, forms_of, shares
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.cpu_facts import free_host_bytes, usable_cores
from dragoman_agent.pal.host import this_host
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.tuning import kernel_hash

logger = logging.getLogger(__name__)

MAX_WORKERS = 12
FORMS_A_WORKER = 2  # fewer are not worth its start
WORKER_BYTES = 400 << 20  # of host memory; 160 MiB are what one takes
WAIT_SECONDS = 120.0
_ROWS = 8  # of a step: no binary depends on it


class Compilers:
    """The workers of one engine process. They end with it: each reads its order and writes nothing back."""

    def __init__(self, workers: list[subprocess.Popen[str]], marker: Path | None) -> None:
        """`marker` is made when all have done their work, so that the next start need not look; None: not all do."""
        self._workers = workers
        self._marker = marker
        self._begun = time.monotonic()

    def wait(self) -> bool:
        """Until everything is compiled, at most `WAIT_SECONDS`; what then is missing, its first launch compiles. False if so."""
        if not self._workers:
            return self._marker is not None
        deadline = time.monotonic() + WAIT_SECONDS
        codes = []
        for worker in self._workers:
            try:
                codes.append(worker.wait(max(deadline - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                worker.kill()
                codes.append(worker.wait())
        self._workers = []
        seconds = time.monotonic() - self._begun
        if any(codes):
            logger.warning("kernels could not all be compiled ahead; they are compiled when first launched")
            self._marker = None
            return False
        logger.debug("kernels compiled ahead in %d processes, %.1f s", len(codes), seconds)
        if self._marker is not None:
            try:
                self._marker.parent.mkdir(parents=True, exist_ok=True)
                self._marker.touch()
            except OSError as error:
                logger.debug("cannot note that kernels are compiled: %s", error)
        return self._marker is not None

    def close(self) -> None:
        """End what still runs."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers = []


def start_compilers(model: ModelConfig, plan: Plan, capability: str) -> Compilers:
    """Workers for every kernel of `plan` on a device of `capability` ("9.0"); none where all was compiled before."""
    order = order_of(model, plan, capability)
    done = _cache_dir() / f"dragoman-{_digest(order)}"
    if done.exists():
        return Compilers([], done)
    marker: Path | None = done
    forms = forms_of(model, plan)
    room = free_host_bytes(this_host()) // WORKER_BYTES
    count = max(1, min(MAX_WORKERS, usable_cores() - 1, room, len(forms) // FORMS_A_WORKER))
    workers: list[subprocess.Popen[str]] = []
    try:
        for own in shares(forms, count):
            worker = subprocess.Popen(
                [sys.executable, "-P", "-m", "dragoman_agent.device.precompile"], stdin=subprocess.PIPE, text=True,
                stdout=subprocess.DEVNULL, stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )  # fmt: skip
            workers.append(worker)
            assert worker.stdin is not None
            with worker.stdin:
                worker.stdin.write(json.dumps({**order, "forms": [dataclasses.asdict(form) for form in own]}))
    except OSError as error:  # no process to be had, or one that has ended before it read
        logger.warning("not all kernels are compiled ahead (%s); the others are compiled when first launched", error)
        marker = None
    return Compilers(workers, marker)


def order_of(model: ModelConfig, plan: Plan, capability: str) -> dict[str, Any]:
    """What a worker is told, with all forms."""
    return {
        "target": int(capability.replace(".", "")),
        "page_size": plan.page_size,
        "cache_dtype": "float8_e4m3fn" if plan.kv_dtype.startswith("float8") else "bfloat16",
        "eps": model.rms_norm_eps,
        "qk_norm": model.qk_norm,
        "heads": [model.num_heads, model.num_kv_heads, model.head_dim],
        "forms": [dataclasses.asdict(form) for form in forms_of(model, plan)],
    }


def _digest(order: dict[str, Any]) -> str:
    body = [kernel_hash(), order, sys.version]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]


def _cache_dir() -> Path:
    """Where Triton keeps binaries; its own rule, since importing it takes a second."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def compile_forms(order: dict[str, Any]) -> list[Any]:
    """Compile an order's forms in this process, which must not have imported PyTorch; Triton's compiled kernels.

    Raises RuntimeError naming what could not be compiled, once all that can be is.
    """
    from triton.backends.compiler import GPUTarget

    from dragoman_kernels.triton.compile_only import compiling, without_torch

    at = _Shapes(without_torch(), order)
    found: list[Any] = []
    problems: list[str] = []
    one, launches = Form(""), itertools.count()

    def is_of_part() -> bool:
        return next(launches) % one.num_parts == one.part

    with compiling(GPUTarget("cuda", order["target"], 32), lambda _, binary, __: found.append(binary), is_of_part):
        for form in order["forms"]:
            one, launches = Form(**{**form, "sizes": tuple(form["sizes"])}), itertools.count()
            try:
                _LAUNCH[one.kind](at, one)
            except Exception as error:  # whatever a compiler says: the others are compiled all the same
                problems.append(f"{one}: {type(error).__name__}: {error}")
    for binary in found:
        _build_launcher(binary)
    if problems:
        raise RuntimeError("; ".join(problems))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Shapes:
    """Tensors of the types, alignment and constants that the device's operations pass (cuda_ops.py, torch_steps.py)."""

    torch: Any
    order: dict[str, Any]

    def tensor(self, *size: int, dtype: str = "bfloat16") -> Any:
        return self.torch.empty(size, dtype=getattr(self.torch, dtype))

    def ints(self, *size: int) -> Any:
        return self.tensor(*size, dtype="int32")

    @property
    def heads(self) -> tuple[int, int, int]:
        num_heads, num_kv_heads, head_dim = self.order["heads"]
        return num_heads, num_kv_heads, head_dim

    def cache(self, form: Form) -> Any:
        _, num_kv_heads, head_dim = self.heads
        dtype = "bfloat16" if form.wide else self.order["cache_dtype"]
        return self.tensor(2, num_kv_heads, self.order["page_size"], head_dim, dtype=dtype)


def _norm(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.norm import rms_norm

    x, weight = at.tensor(_ROWS, *form.sizes), at.tensor(*form.sizes)
    rms_norm(x, weight, at.order["eps"], at.tensor(_ROWS, *form.sizes) if form.flag else None, dependent=form.dependent)


def _silu(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.activation import silu_mul

    silu_mul(at.tensor(_ROWS, 2 * form.sizes[0]), dependent=form.dependent)


def _rope(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.rope_cache import rope_and_cache

    heads, kv_heads, dim = at.heads
    angles, norm = at.tensor(64, dim // 2, dtype="float32"), at.tensor(dim) if at.order["qk_norm"] else None
    rope_and_cache(
        at.tensor(_ROWS, (heads + 2 * kv_heads) * dim), at.cache(form), at.cache(form), angles, angles, at.ints(_ROWS),
        at.ints(_ROWS), heads, norm, norm, at.order["eps"], dependent=form.dependent,
    )  # fmt: skip


def _sample(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

    workspace = SamplingWorkspace(_ROWS, form.sizes[0], at.torch.device("cpu"))
    floats, draws = at.tensor(_ROWS, dtype="float32"), at.tensor(_ROWS, dtype="float64")
    logits = at.tensor(_ROWS, *form.sizes)
    sample_rows(logits, floats, draws, workspace, at.ints(_ROWS), at.ints(_ROWS), dependent=form.dependent)


def _filters(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.filters import Drawn, FilterWorkspace, draw_rows
    from dragoman_kernels.triton.sampling import SamplingWorkspace

    vocab, device = form.sizes[0], at.torch.device("cpu")
    floats, draws = at.tensor(_ROWS, dtype="float32"), at.tensor(_ROWS, dtype="float64")
    draw_rows(
        at.tensor(_ROWS, vocab), at.tensor(_ROWS, vocab, dtype="float32"), at.ints(64), _ROWS,
        SamplingWorkspace(_ROWS, vocab, device), FilterWorkspace(_ROWS, vocab, device),
        Drawn(floats, draws, at.ints(_ROWS), at.ints(_ROWS)), has_filters=True, has_random=True,
    )  # fmt: skip


def _edits(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.edits import EditWorkspace, edit_rows
    from dragoman_kernels.triton.sampling import SamplingWorkspace

    vocab, device = form.sizes[0], at.torch.device("cpu")
    workspace, edits = SamplingWorkspace(_ROWS, vocab, device), EditWorkspace(_ROWS, vocab, device)
    for has_lists in (False, True):
        edit_rows(at.tensor(_ROWS, vocab), at.ints(256), 0, _ROWS, workspace, edits, has_lists=has_lists)


def _decode(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention

    heads, _, dim = at.heads
    splits, block_n, stages, warps = form.sizes
    workspace = DecodeWorkspace(_ROWS, heads, dim, splits, at.torch.device("cpu"))
    paged_decode_attention(
        at.tensor(_ROWS, heads, dim), at.cache(form), at.cache(form), at.ints(_ROWS, 4), at.ints(_ROWS), workspace, splits,
        block_n=block_n, num_stages=stages, num_warps=warps, dependent=form.dependent,
        group_rows=at.ints(1) if form.flag else None,
    )  # fmt: skip


def _list(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.attention_list import Cut, DecodeItems

    num_seqs, block_n = form.sizes
    items = DecodeItems(2 * _ROWS, num_seqs, at.heads[1], at.torch.device("cpu"))
    items.make(at.ints(_ROWS), Cut(2 * _ROWS, 1, block_n), dependent=form.dependent)


def _listed(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.attention_decode import DecodeWorkspace
    from dragoman_kernels.triton.attention_list import Cut, DecodeItems, listed_decode_attention

    heads, kv_heads, dim = at.heads
    block_n, stages, warps = form.sizes
    device = at.torch.device("cpu")
    listed_decode_attention(
        at.tensor(_ROWS, heads, dim), at.cache(form), at.cache(form), at.ints(_ROWS, 4),
        DecodeWorkspace(2 * _ROWS, heads, dim, 1, device), DecodeItems(2 * _ROWS, _ROWS, kv_heads, device),
        Cut(2 * _ROWS, 1, block_n), num_stages=stages, num_warps=warps, dependent=form.dependent,
    )  # fmt: skip


def _prefill(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.attention_prefill import paged_prefill_attention

    heads, _, dim = at.heads
    block_m, block_n, stages, warps, tma = form.sizes
    paged_prefill_attention(
        at.tensor(_ROWS, heads, dim), at.cache(form), at.cache(form), at.ints(1, 4), at.ints(2), at.ints(1), at.ints(1, 2),
        block_m=block_m, block_n=block_n, num_stages=stages, num_warps=warps, tma=bool(tma),
    )  # fmt: skip


def _gemm(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.gemm_decode import gemm_decode

    n, k, tile, block_n, block_k, stages, warps = form.sizes
    gemm_decode(
        at.tensor(tile, k), at.tensor(n, k), at.tensor(n) if form.flag else None, block_n=block_n, block_k=block_k,
        num_stages=stages, num_warps=warps, dependent=form.dependent,
    )  # fmt: skip


def _fixed_attention(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.attention_fixed import FixedWorkspace, fixed_decode_attention

    heads, _, dim = at.heads
    block_m, block_n, stages, warps, part_tokens = form.sizes
    fixed_decode_attention(
        at.tensor(_ROWS, heads, dim), at.cache(form), at.cache(form), at.ints(_ROWS, 4), at.ints(_ROWS),
        FixedWorkspace(_ROWS, heads, dim, 4, at.torch.device("cpu")), part_tokens, 2, rows=block_m, block_n=block_n,
        num_stages=stages, num_warps=warps,
    )  # fmt: skip


def _fixed_gemm(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.gemm_fixed import gemm_fixed

    n, k, block_m, block_n, block_k, stages, warps = form.sizes
    gemm_fixed(
        at.tensor(_ROWS, k), at.tensor(n, k), at.tensor(n) if form.flag else None, block_m=block_m, block_n=block_n,
        block_k=block_k, num_stages=stages, num_warps=warps,
    )  # fmt: skip


def _unpack(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.step_inputs import StepInputs

    StepInputs(_ROWS, 4, at.torch.device("cpu")).unpack(at.ints(256), at.ints(_ROWS), _ROWS)


def _resolve(at: _Shapes, form: Form) -> None:
    from dragoman_kernels.triton.step_inputs import resolve_tokens

    resolve_tokens(at.ints(_ROWS), at.ints(_ROWS))


def _driver(at: _Shapes, form: Form) -> None:
    """Triton's own C functions that load binaries: built once, and wanted by the first launch."""
    try:
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
    except Exception as error:  # as below
        logger.debug("no driver functions: %s", error)


_LAUNCH: dict[str, Callable[[_Shapes, Form], None]] = {
    "norm": _norm, "silu": _silu, "rope": _rope, "sample": _sample, "filters": _filters, "edits": _edits, "decode": _decode, "list": _list, "listed": _listed, "prefill": _prefill, "gemm": _gemm,
    "unpack": _unpack, "resolve": _resolve, "driver": _driver, "fixed-attention": _fixed_attention, "fixed-gemm": _fixed_gemm,
}  # fmt: skip


def _build_launcher(binary: Any) -> None:
    """The C function that passes a kernel's arguments: Triton builds one a signature with the system's compiler."""
    try:
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(binary.src, binary.metadata)
    except Exception as error:  # no CUDA library to link with, no compiler: the first launch says what it is
        logger.debug("no launcher of %s: %s", binary.metadata.name, error)


def main() -> int:
    """One worker."""
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    order = json.load(sys.stdin)
    begun = time.monotonic()
    try:
        found = compile_forms(order)
    except RuntimeError as error:
        logger.debug("not all kernels were compiled: %s", error)
        return 1
    logger.debug("%d kernels of %d forms in %.1f s", len(found), len(order["forms"]), time.monotonic() - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
