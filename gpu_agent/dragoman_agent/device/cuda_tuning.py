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
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from dragoman_agent.device.cuda_library import AttentionSizes, CudnnAttention
from dragoman_agent.device.cuda_ops import CudaOps, CudaStep, DecodePart
from dragoman_agent.device.cuda_products import LibraryProducts
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.torch_runtime import Runtime, Stream, open_runtime
from dragoman_agent.model.config import ModelConfig, RopeScaling
from dragoman_agent.model.layers import PagedCache
from dragoman_agent.model.llama import LlamaWeights, assemble, forward
from dragoman_agent.model.registry import needed_tensors
from dragoman_agent.pal.list_timing import list_lens
from dragoman_agent.pal.plan import DecodeAttention, GemmDecode, LibraryGemm, PrefillAttention
from dragoman_kernels.triton.activation import silu_mul
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_list import Cut, DecodeItems, listed_decode_attention
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list
from dragoman_kernels.triton.gemm_decode import gemm_decode
from dragoman_kernels.triton.gemm_fixed import gemm_fixed
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.rope_cache import rope_and_cache
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

Case = dict[str, Any]
Call = Callable[[], object]

_REPEATS = 3
_MORE_REPEATS = 7
_CLOSE_KINDS = ("decode-layers", "decode-grouped", "decode-list")  # whose differences are small
_LOADED_KIND = "gemm-library"  # timed under the load of its own kind, where a card may have come to its power limit
_LOADED_SECONDS = 0.06  # of that before
_FEWER_CALLS = 8  # of those, which are long
_MIN_CALLS = 16  # in a graph: enough for the gap between two kernels to count as it does in a step
_MIN_CHAINS = 4  # of layers, each of them tens of kernels
_MAX_COPIES = 48
_ALIKE = 0.02  # of two results in bfloat16, in the Euclidean norm


def time_cases(cases: Sequence[Case], index: int, *, compile_only: bool = False) -> dict[str, float | str]:
    """Seconds a call by key, or why a case cannot run; see `pal.candidates.TuningCase` for kinds and shapes, GroupCase and ListCase."""
    runtime = open_runtime("cuda", index)
    runtime.activate()
    device, stream = runtime.device, runtime.new_stream()
    cold = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    found: dict[str, float | str] = {}
    with torch.inference_mode(), runtime.on(stream):
        for case in cases:
            try:
                calls = _BUILDERS[case["kind"]](case, device, 0 if compile_only else cold)
                if compile_only:
                    calls[0]()
                    runtime.synchronize()
                else:
                    found[case["key"]] = _time(calls, runtime, stream, case["kind"])
            except Exception as error:  # whatever a compiler, a driver or torch says: this case alone is left out
                found[case["key"]] = f"{type(error).__name__}: {first_line(error)}"
            runtime.release()
    return found


def _time(calls: list[Call], runtime: Runtime, stream: Stream, kind: str) -> float:
    """Median seconds a call: `calls` in turn, in one graph, so that none finds its operands in L2."""
    repeats = _MORE_REPEATS if kind in _CLOSE_KINDS else _REPEATS
    calls_wanted = {"decode-layers": _MIN_CHAINS, _LOADED_KIND: _FEWER_CALLS}.get(kind, _MIN_CALLS)
    rounds = -(-calls_wanted // len(calls))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    calls[0]()
    runtime.synchronize()
    graph, _ = runtime.capture(stream, run, None)
    until = time.perf_counter() + (_LOADED_SECONDS if kind == _LOADED_KIND else 0.0)
    while time.perf_counter() < until:
        graph.replay()
        stream.synchronize()
    times: list[float] = []
    for repeat in range(repeats + 1):
        begin, end = runtime.new_event(), runtime.new_event()
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
    if case["kind"] == "gemm-fixed":
        return [lambda w=w: gemm_fixed(x, w, **launch) for w in weights]  # type: ignore[misc]
    return [lambda w=w: gemm_decode(x, w, **launch) for w in weights]  # type: ignore[misc]


def _gemm_library(case: Case, device: torch.device, cold: int) -> list[Call]:
    m, n, k = (case["shape"][name] for name in "mnk")
    if not cold:
        return [lambda: None]  # nothing is built
    launch = case.get("config")
    if launch is None:
        return _gemm(case, device, cold)
    products = LibraryProducts((LibraryGemm(n, k, m, m, m, launch["rank"]),))
    if products.missing:
        raise ValueError("the library names fewer algorithms for this product on this device")
    x = _randn(device, m, k)
    weights = [_randn(device, n, k) for _ in range(_copies(2 * n * k, cold))]
    _check_alike(_given(products.product(x, weights[0])), functional.linear(x, weights[0]))
    return [lambda w=w: _given(products.product(x, w)) for w in weights]  # type: ignore[misc]


def _given(out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        raise ValueError("operands lie otherwise than the library's algorithm needs")
    return out


def _caches(
    shape: dict[str, int], lens: Sequence[int], device: torch.device, cold: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(keys, values, tables) of sequences of `lens` tokens whose pages lie anywhere in the arena."""
    counts = torch.tensor([-(-length // shape["page_size"]) for length in lens], device=device)
    num_blocks, width = int(counts.sum()), int(counts.max())
    size = (num_blocks + 1, shape["num_kv_heads"], shape["page_size"], shape["head_dim"])
    num_bytes = 4 * int(np.prod(size))
    is_held = torch.arange(width, device=device) < counts[:, None]
    made = []
    for _ in range(min(_copies(num_bytes, cold), 8 if num_bytes > 64 << 20 else _MAX_COPIES)):
        tables = torch.zeros((len(lens), width), dtype=torch.int32, device=device)
        tables[is_held] = torch.randperm(num_blocks, device=device).int() + 1
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
    caches = _caches(shape, [shape["context"]] * batch, device, cold)
    rows = shape.get("rows", 0)  # that share a program
    word = torch.full((1,), rows, dtype=torch.int32, device=device) if rows else None
    if word is not None and cold:
        alone = paged_decode_attention(q, *caches[0], lens, workspace, splits, **launch)
        if not torch.equal(
            alone, paged_decode_attention(q, *caches[0], lens, workspace, splits, **launch, group_rows=word)
        ):
            raise ValueError(f"a sequence has other bits where {rows} share a program")
    return [
        lambda k=k, v=v, t=t: paged_decode_attention(q, k, v, t, lens, workspace, splits, **launch, group_rows=word)  # type: ignore[misc]
        for k, v, t in caches
    ]


def _decode_list(case: Case, device: torch.device, cold: int) -> list[Call]:
    """As many layers as a step has, of contexts that differ; the list, where there is one, is made before the first."""
    shape, config = case["shape"], case["config"]
    lens = list_lens(shape)
    num_items, heads = shape["items"], (shape["num_heads"], shape["head_dim"])
    q = _randn(device, len(lens), *heads)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    caches = _caches(shape, lens, device, cold)
    launch = {name: config[name] for name in ("num_stages", "num_warps")}
    splits, block_n = config["num_splits"], config["block_n"]
    workspace = DecodeWorkspace(max(num_items, len(lens) * splits), *heads, 1, device)

    def plain(k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        return paged_decode_attention(q, k, v, tables, lengths, workspace, splits, block_n=block_n, **launch)

    layers = [caches[layer % len(caches)] for layer in range(shape["layers"] if cold else 1)]
    if not num_items:
        return [lambda one=one: plain(*one) for one in layers]  # type: ignore[misc]
    items = DecodeItems(num_items, len(lens), shape["num_kv_heads"], device)
    cut = Cut(num_items, shape["min_tiles"], block_n)

    def listed(k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        return listed_decode_attention(q, k, v, tables, workspace, items, cut, **launch)

    items.make(lengths, cut)
    if cold:
        _check_alike(listed(*caches[0]), plain(*caches[0]))

    def first() -> torch.Tensor:
        items.make(lengths, cut)
        return listed(*layers[0])

    return [first, *(lambda one=one: listed(*one) for one in layers[1:])]


def _prefill(case: Case, device: torch.device, cold: int) -> list[Call]:
    shape, config = {"context": case["shape"]["tokens"], "prompts": 1, **case["shape"]}, case["config"]
    tokens, prompts = shape["tokens"], shape["prompts"]
    q = _randn(device, prompts * tokens, shape["num_heads"], shape["head_dim"])
    starts = tokens * np.arange(prompts + 1, dtype=np.int32)
    lens = np.full(prompts, shape["context"], dtype=np.int32)
    work = torch.from_numpy(prefill_work_list(starts, lens, config["block_m"])).to(device)
    query_starts, context_lens = (torch.from_numpy(array).to(device) for array in (starts, lens))
    launch = {name: config[name] for name in ("block_m", "block_n", "num_stages", "num_warps", "tma")}
    caches = _caches(shape, [shape["context"]] * prompts, device, 0)
    if launch["tma"] and cold:
        plain = torch.from_numpy(prefill_work_list(starts, lens)).to(device)
        _check_alike(
            paged_prefill_attention(q, *caches[0], query_starts, context_lens, work, **launch),
            paged_prefill_attention(q, *caches[0], query_starts, context_lens, plain),
        )
    return [
        lambda k=k, v=v, t=t: paged_prefill_attention(q, k, v, t, query_starts, context_lens, work, **launch)  # type: ignore[misc]
        for k, v, t in caches
    ]


def _check_alike(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Quick and wrong must not be chosen: what a copy engine fetches is compared with what threads do. Raises ValueError."""
    off = float((out.float() - expected.float()).norm() / expected.float().norm())
    if not off <= _ALIKE:
        raise ValueError(
            f"its results are otherwise than those of the kernel that it is compared with, by {off:.2g} of them"
        )


def _prefill_library(case: Case, device: torch.device, cold: int) -> list[Call]:
    shape = case["shape"]
    tokens, context = shape["tokens"], shape["context"]
    if not cold:
        return [lambda: None]  # its kernels are built in the process that runs them
    caches = _caches(shape, [context], device, 0)
    sizes = AttentionSizes(
        shape["num_heads"], shape["num_kv_heads"], shape["head_dim"], shape["page_size"], caches[0][0].shape[0], 1, tokens,
        context,
    )  # fmt: skip
    library = CudnnAttention(sizes, torch.cuda.current_stream(device))
    q = _randn(device, tokens, shape["num_heads"], shape["head_dim"])
    out = torch.empty_like(q)
    words = sizes.words(np.array([0, tokens], dtype=np.int32), np.array([context], dtype=np.int32))
    library.take_tables(caches[0][2])
    part = library.part(torch.from_numpy(words).to(device))
    return [lambda k=k, v=v: library.run(q, k, v, part, out) for k, v, _ in caches]  # type: ignore[misc]


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


def _decode_layers(case: Case, device: torch.device, cold: int) -> list[Call]:
    """Decoder layers one after another as a step runs them, their weights together larger than L2."""
    shape, config = case["shape"], case["config"]
    batch, context, page = shape["batch"], shape["context"], config["page_size"]
    model = _model_of(config["model"], num_layers=shape["layers"] if cold else 1)
    weights = _layer_weights(json.dumps(config["model"]), model.num_layers, device)
    blocks = -(-context // page)
    size = (model.num_layers, batch * blocks + 1, model.num_kv_heads, page, model.head_dim)
    cache = PagedCache(torch.zeros(size, dtype=torch.bfloat16, device=device), _zeros(device, *size))
    angles = torch.ones(context, model.head_dim // 2, device=device)
    gemm = [GemmDecode(**choice) for choice in config["gemm_decode"]]
    attention = DecodeAttention(**config["attention"])
    workspace = DecodeWorkspace(batch, model.num_heads, model.head_dim, attention.num_splits, device)
    ops = CudaOps(angles, angles, PrefillAttention("paged", 64, 64, 4, 3), gemm, workspace)
    ops.dependent = config["dependent"]
    rows = max(batch, config["min_gemm_rows"])
    tables = (torch.randperm(batch * blocks, device=device).int() + 1).view(batch, blocks)
    positions = torch.zeros(rows, dtype=torch.int32, device=device)
    slots = positions.clone()
    positions[:batch] = context - 1
    slots[:batch] = tables[:, -1] * page + (context - 1) % page
    part = DecodePart(tables, positions[:batch] + 1, attention)
    step = CudaStep(torch.zeros_like(positions), None, positions, slots, part, None, batch if rows > batch else None)
    return [lambda: forward(model, weights, cache, step, ops)]


@lru_cache(maxsize=1)
def _layer_weights(body: str, num_layers: int, device: torch.device) -> LlamaWeights:
    """Kept for the chains of the same model, which come one after another."""
    model = _model_of(json.loads(body), num_layers)
    return assemble(model, lambda name: _random_weight(model, name, device))


def _model_of(body: dict[str, Any], num_layers: int) -> ModelConfig:
    scaling = RopeScaling(**body["rope_scaling"])
    return ModelConfig(**{**body, "rope_scaling": scaling, "num_layers": num_layers, "vocab_size": 16})


def _random_weight(model: ModelConfig, name: str, device: torch.device) -> torch.Tensor | None:
    stored = needed_tensors(model).get(name)
    return None if stored is None else 0.02 * _randn(device, *stored)


def _zeros(device: torch.device, *size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16, device=device)


_BUILDERS: dict[str, Callable[[Case, torch.device, int], list[Call]]] = {
    "gemm": _gemm,
    "gemm-fixed": _gemm,
    "gemm-library": _gemm_library,
    "decode-attention": _decode,
    "decode-grouped": _decode,
    "decode-list": _decode_list,
    "prefill-attention": _prefill,
    "prefill-batch": _prefill,
    "prefill-library": _prefill_library,
    "rms-norm": _rms_norm,
    "add-rms-norm": _rms_norm,
    "silu-mul": _silu_mul,
    "rope-cache": _rope,
    "sample": _sample,
    "decode-layers": _decode_layers,
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
