"""Times kernels as a step runs them: in one graph, on cold weights and caches. Run in a process of its own.

python -m dragoman_agent.device.cuda_tuning INDEX [--compile] < cases.json
prints a line {"key", "seconds"} or {"key", "error"} a case; with --compile it only builds the kernels, so that several
processes can share that work before one of them times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from dragoman_kernels.triton.activation import silu_mul
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list
from dragoman_kernels.triton.gemm_decode import gemm_decode
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.rope_cache import rope_and_cache
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

Case = dict[str, Any]
Call = Callable[[], object]

_REPEATS = 5
_MIN_CALLS = 24  # in a graph: enough for the gap between two kernels to count as it does in a step
_MAX_COPIES = 48


def time_cases(cases: Sequence[Case], index: int, *, compile_only: bool = False) -> dict[str, float | str]:
    """Seconds a call by key, or why a case cannot run; see `pal.candidates.TuningCase` for kinds and shapes."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    cold = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    found: dict[str, float | str] = {}
    with torch.inference_mode():
        for case in cases:
            try:
                calls = _BUILDERS[case["kind"]](case, device, 0 if compile_only else cold)
                if compile_only:
                    calls[0]()
                    torch.cuda.synchronize()
                else:
                    found[case["key"]] = _time(calls)
            except Exception as error:  # whatever a compiler, a driver or torch says: this case alone is left out
                found[case["key"]] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            torch.cuda.empty_cache()
    return found


def _time(calls: list[Call]) -> float:
    """Median seconds a call: `calls` in turn, in one graph, so that none finds its operands in L2."""
    rounds = -(-_MIN_CALLS // len(calls))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for repeat in range(_REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat:
            times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times) / (rounds * len(calls))


def _copies(num_bytes: int, cold: int) -> int:
    """Sets of operands that together do not fit in L2."""
    return max(2, min(_MAX_COPIES, -(-cold // max(num_bytes, 1))))


def _randn(device: torch.device, *size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device)


def _gemm(case: Case, device: torch.device, cold: int) -> list[Call]:
    m, n, k = (case["shape"][name] for name in "mnk")
    x = _randn(device, m, k)
    weights = [_randn(device, n, k) for _ in range(_copies(2 * n * k, cold))]
    launch = case.get("config")
    if launch is None:
        return [lambda w=w: functional.linear(x, w) for w in weights]  # type: ignore[misc]
    return [lambda w=w: gemm_decode(x, w, **launch) for w in weights]  # type: ignore[misc]


def _caches(
    shape: dict[str, int], device: torch.device, num_seqs: int, cold: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(keys, values, tables) of sequences whose pages lie anywhere in the arena."""
    blocks = -(-shape["context"] // shape["page_size"])
    size = (num_seqs * blocks + 1, shape["num_kv_heads"], shape["page_size"], shape["head_dim"])
    num_bytes = 4 * int(np.prod(size))
    made = []
    for _ in range(min(_copies(num_bytes, cold), 8 if num_bytes > 64 << 20 else _MAX_COPIES)):
        tables = (torch.randperm(num_seqs * blocks, device=device).int() + 1).view(num_seqs, blocks)
        made.append((_randn(device, *size), _randn(device, *size), tables))
    return made


def _decode(case: Case, device: torch.device, cold: int) -> list[Call]:
    shape, config = case["shape"], case["config"]
    batch = shape["batch"]
    q = _randn(device, batch, shape["num_heads"], shape["head_dim"])
    lens = torch.full((batch,), shape["context"], dtype=torch.int32, device=device)
    splits = config["num_splits"]
    workspace = DecodeWorkspace(batch, shape["num_heads"], shape["head_dim"], splits, device)
    launch = {name: config[name] for name in ("block_n", "num_stages", "num_warps")}
    return [
        lambda k=k, v=v, t=t: paged_decode_attention(q, k, v, t, lens, workspace, splits, **launch)  # type: ignore[misc]
        for k, v, t in _caches(shape, device, batch, cold)
    ]


def _prefill(case: Case, device: torch.device, cold: int) -> list[Call]:
    shape, config = case["shape"], case["config"]
    tokens = shape["tokens"]
    q = _randn(device, tokens, shape["num_heads"], shape["head_dim"])
    starts = np.array([0, tokens], dtype=np.int32)
    lens = np.array([shape["context"]], dtype=np.int32)
    work = torch.from_numpy(prefill_work_list(starts, lens, config["block_m"])).to(device)
    query_starts, context_lens = (torch.from_numpy(array).to(device) for array in (starts, lens))
    launch = {name: config[name] for name in ("block_m", "block_n", "num_stages", "num_warps")}
    return [
        lambda k=k, v=v, t=t: paged_prefill_attention(q, k, v, t, query_starts, context_lens, work, **launch)  # type: ignore[misc]
        for k, v, t in _caches(shape, device, 1, 0)
    ]


def _rms_norm(case: Case, device: torch.device, cold: int) -> list[Call]:
    tokens, width = case["shape"]["tokens"], case["shape"]["width"]
    x, weight = _randn(device, tokens, width), _randn(device, width)
    residual = _randn(device, tokens, width) if case["kind"] == "add-rms-norm" else None
    return [lambda: rms_norm(x, weight, 1e-6, residual)]


def _silu_mul(case: Case, device: torch.device, cold: int) -> list[Call]:
    gate_up = _randn(device, case["shape"]["tokens"], 2 * case["shape"]["width"])
    return [lambda: silu_mul(gate_up)]


def _rope(case: Case, device: torch.device, cold: int) -> list[Call]:
    shape = case["shape"]
    tokens, heads, kv_heads, dim = (shape[name] for name in ("tokens", "num_heads", "num_kv_heads", "head_dim"))
    qkv = _randn(device, tokens, (heads + 2 * kv_heads) * dim)
    page = 64
    keys, values = (_randn(device, tokens // page + 2, kv_heads, page, dim) for _ in "kv")
    angles = torch.ones(tokens, dim // 2, device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    norm = _randn(device, dim) if shape.get("qk_norm") else None
    return [lambda: rope_and_cache(qkv, keys, values, angles, angles, positions, positions + page, heads, norm, norm)]


def _sample(case: Case, device: torch.device, cold: int) -> list[Call]:
    rows, vocab = case["shape"]["rows"], case["shape"]["vocab_size"]
    logits = _randn(device, rows, vocab)
    temperatures = torch.full((rows,), 0.7, device=device)
    uniforms = torch.rand(rows, dtype=torch.float64, device=device)
    workspace = SamplingWorkspace(rows, vocab, device)
    ids, finite = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
    return [lambda: sample_rows(logits, temperatures, uniforms, workspace, ids, finite)]


_BUILDERS: dict[str, Callable[[Case, torch.device, int], list[Call]]] = {
    "gemm": _gemm,
    "decode-attention": _decode,
    "prefill-attention": _prefill,
    "rms-norm": _rms_norm,
    "add-rms-norm": _rms_norm,
    "silu-mul": _silu_mul,
    "rope-cache": _rope,
    "sample": _sample,
}


def main() -> None:
    """Read cases, print times."""
    parser = argparse.ArgumentParser(prog="python -m dragoman_agent.device.cuda_tuning", description=__doc__)
    parser.add_argument("index", type=int)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    for key, seconds in time_cases(json.load(sys.stdin), options.index, compile_only=options.compile).items():
        print(json.dumps({"key": key, "seconds" if isinstance(seconds, float) else "error": seconds}), flush=True)


if __name__ == "__main__":
    main()
