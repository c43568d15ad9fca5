"""Checks every Triton op against float64. Run by pytest under the interpreter, and directly on a GPU:

python tests/kernels/triton/check_ops.py cuda bfloat16
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict

if __name__ == "__main__" and sys.argv[1] == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before a kernel module is imported

import numpy as np
import torch

from dragoman_kernels.triton import reference
from dragoman_kernels.triton.activation import silu_mul
from dragoman_kernels.triton.attention_decode import DecodeWorkspace, paged_decode_attention
from dragoman_kernels.triton.attention_fixed import (
    FixedWorkspace,
    fixed_decode_attention,
    fixed_prefill_attention,
    queries_a_tile,
)
from dragoman_kernels.triton.attention_prefill import paged_prefill_attention, prefill_work_list
from dragoman_kernels.triton.gemm_fixed import gemm_fixed
from dragoman_kernels.triton.launches import FIXED_GEMM_LAUNCHES, tma_prefill_launches, ws_prefill_launches
from dragoman_kernels.triton.norm import rms_norm
from dragoman_kernels.triton.rope_cache import rope_and_cache
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows
from dragoman_kernels.triton.step_inputs import StepInputs, resolve_tokens

# On a GPU a float32 dot runs on the matrix units in tf32.
TOLERANCE = {
    torch.float32: 1e-5 if os.environ.get("TRITON_INTERPRET") else 3e-3,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm; infinite when an element was not written."""
    if not torch.isfinite(out.double()).all():
        return float("inf")
    return float((out.double() - expected).norm() / expected.norm())


def paged(device: torch.device, dtype: torch.dtype, lens: list[int], kv_heads: int, page: int, dim: int, seed: int):
    """Random caches and tables whose blocks are shuffled; unused slots hold NaN, so that reading one shows."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-max(length, 1) // page) for length in lens]
    order = torch.randperm(sum(blocks), generator=generator) + 1
    width = max(blocks) + 1
    tables = torch.zeros((len(lens), width), dtype=torch.int32)
    shape = (sum(blocks) + 1, kv_heads, page, dim)
    k = torch.randn(shape, generator=generator)
    v = torch.randn(shape, generator=generator)
    taken = 0
    for seq, count in enumerate(blocks):
        tables[seq, :count] = order[taken : taken + count].int()
        taken += count
        rest = count * page - lens[seq]
        if rest:
            k[tables[seq, count - 1], :, page - rest :] = float("nan")
            v[tables[seq, count - 1], :, page - rest :] = float("nan")
    return k.to(device, dtype), v.to(device, dtype), tables.to(device)


def check_decode(device, dtype, lens, heads, kv_heads, dim, page, num_splits, **launch) -> float:
    k, v, tables = paged(device, dtype, lens, kv_heads, page, dim, seed=len(lens))
    q = torch.randn((len(lens), heads, dim), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    workspace = DecodeWorkspace(len(lens), heads, dim, num_splits, device)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    out = paged_decode_attention(q, k, v, tables, lengths, workspace, num_splits, **launch)
    expected = reference.paged_attention(q, k, v, tables, list(range(len(lens) + 1)), lens)
    return error(out, expected)


def check_grouped(device, dtype, lens, heads, kv_heads, dim, page, num_splits, *, float8=False, **launch) -> float:
    """Against float64, with rows of padding; infinite where a row has other bits when several share a program, or padding any."""
    k, v, tables = paged(device, torch.float32 if float8 else dtype, lens, kv_heads, page, dim, seed=31)
    k, v = (one.to(torch.float8_e4m3fn) for one in (k, v)) if float8 else (k, v)
    q = torch.randn((len(lens), heads, dim), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    workspace = DecodeWorkspace(len(lens), heads, dim, num_splits, device)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    word = torch.ones(1, dtype=torch.int32, device=device)

    def attend(group_rows: torch.Tensor | None) -> torch.Tensor:
        for kept in (workspace.partial, workspace.lse):
            kept.fill_(float("nan"))
        out = torch.full_like(q, float("nan"))
        return paged_decode_attention(
            q, k, v, tables, lengths, workspace, num_splits, group_rows=group_rows, out=out, **launch
        )

    alone = attend(None)
    for rows in (1, 2, 4, 8):
        if not torch.equal(attend(word.fill_(rows)), alone):
            return float("inf")
    held = lengths > 0
    if alone[~held].any():
        return float("inf")
    starts, kept = list(range(int(held.sum()) + 1)), [length for length in lens if length]
    expected = reference.paged_attention(q[held], k.float(), v.float(), tables[held], starts, kept)
    return error(alone[held], expected) / (100 if float8 else 1)


def check_prefill(device, dtype, chunks, befores, heads, kv_heads, dim, page, block_m=64, **launch) -> float:
    lens = [a + b for a, b in zip(chunks, befores, strict=True)]
    k, v, tables = paged(device, dtype, lens, kv_heads, page, dim, seed=7)
    starts = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    q = torch.randn((int(starts[-1]), heads, dim), generator=torch.Generator().manual_seed(2)).to(device, dtype)
    work = torch.from_numpy(prefill_work_list(starts, np.array(lens, np.int32), block_m)).to(device)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    out = paged_prefill_attention(
        q, k, v, tables, torch.from_numpy(starts).to(device), lengths, work, block_m=block_m, **launch
    )
    return error(out, reference.paged_attention(q, k, v, tables, starts.tolist(), lens))


def check_fixed_gemm(device, dtype, rows, n, k, **tile) -> float:
    """Against float64; infinite where a row has other bits alone, or at another place among others."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(size, generator=generator).to(device, dtype) for size in ((rows, k), (n, k), (n,)))
    out = gemm_fixed(x, weight, bias, **tile)
    for row in sorted({0, rows // 2, rows - 1}):
        alone = gemm_fixed(x[row : row + 1], weight, bias, **tile)[0]
        moved = gemm_fixed(torch.cat((x[row:], x[:row])), weight, bias, **tile)[0]
        if not (torch.equal(alone, out[row]) and torch.equal(moved, out[row])):
            return float("inf")
    return error(out, x.double() @ weight.double().T + bias.double())


def check_fixed_attention(device, dtype, chunks, befores, heads, kv_heads, dim, page, part=32, **launch) -> float:
    """Prompts in chunks against float64; infinite where other chunks, or each token as a decode step by any number of
    programs, have other bits.
    """
    lens = [a + b for a, b in zip(chunks, befores, strict=True)]
    k, v, tables = paged(device, dtype, lens, kv_heads, page, dim, seed=11)
    rows = launch.get("rows", 64)
    work = FixedWorkspace(len(lens), heads, dim, -(-max(lens) // part), device)
    for kept in (work.partial, work.best, work.total):
        kept.fill_(float("nan"))
    ends = np.cumsum(chunks)
    starts = np.concatenate([[0], ends]).astype(np.int32)
    q = torch.randn((int(starts[-1]), heads, dim), generator=torch.Generator().manual_seed(2)).to(device, dtype)

    def prefill(first: list[int], last: list[int]) -> torch.Tensor:
        """Queries first[i] ... last[i] - 1 of each chunk."""
        count = np.subtract(last, first)
        begins = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
        seen = np.add(befores, last).astype(np.int32)
        items = torch.from_numpy(prefill_work_list(begins, seen, queries_a_tile(rows, heads, kv_heads))).to(device)
        mine = torch.cat([q[starts[i] + first[i] : starts[i] + last[i]] for i in range(len(lens))])
        return fixed_prefill_attention(
            mine, k, v, tables, torch.from_numpy(begins).to(device), torch.from_numpy(seen).to(device), items, work, part,
            **launch,
        )  # fmt: skip

    out = prefill([0] * len(lens), chunks)
    half = [count // 2 for count in chunks]
    parts = prefill([0] * len(lens), half), prefill(half, chunks)
    for i, count in enumerate(chunks):
        mine = out[starts[i] : starts[i] + count]
        begin = sum(half[:i]), sum(c - h for c, h in zip(chunks[:i], half[:i], strict=True))
        cut = torch.cat((parts[0][begin[0] :][: half[i]], parts[1][begin[1] :][: count - half[i]]))
        if not torch.equal(cut, mine):
            return float("inf")
    for back in (1, min(chunks)):
        seen = torch.tensor([length - back + 1 for length in lens], dtype=torch.int32, device=device)
        at = torch.from_numpy(ends - back).to(device)
        for programs in (1, 2, 4):
            decoded = fixed_decode_attention(q[at], k, v, tables, seen, work, part, programs, **launch)
            if not torch.equal(decoded, out[at]):
                return float("inf")
    return error(out, reference.paged_attention(q, k, v, tables, starts.tolist(), lens))


def check_float8(device, dtype, kind: str) -> float:
    """Attention over K and V in eight bits against float64 of what they hold, divided by what float16 may lose."""
    heads, kv_heads, dim, page, key_scale, value_scale = 6, 2, 64, 64, 0.5, 4.0
    lens = [1, 64, 65, 200]
    k, v, tables = paged(device, torch.float32, lens, kv_heads, page, dim, seed=21)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    meant = k.float() * key_scale, v.float() * value_scale
    starts = np.arange(len(lens) + 1, dtype=np.int32)
    q = torch.randn((len(lens), heads, dim), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    work = FixedWorkspace(len(lens), heads, dim, -(-max(lens) // 64), device)
    if kind == "decode":
        workspace = DecodeWorkspace(len(lens), heads, dim, 4, device)
        out = paged_decode_attention(q, k, v, tables, lengths, workspace, 4, **scales)
    elif kind == "prefill":
        items = torch.from_numpy(prefill_work_list(starts, np.array(lens, np.int32), 64)).to(device)
        begins = torch.from_numpy(starts).to(device)
        out = paged_prefill_attention(q, k, v, tables, begins, lengths, items, **scales)
    else:
        out, shared = (
            fixed_decode_attention(q, k, v, tables, lengths, work, 64, programs, **scales) for programs in (1, 4)
        )
        if not torch.equal(out, shared):
            return float("inf")
    expected = reference.paged_attention(q, *meant, tables, starts.tolist(), lens)
    return error(out, expected) / 100


def check_rope_float8(device, dtype) -> float:
    """0 when K over its scale and V over its own are stored, cut to what eight bits hold, NaN kept as it is.

    Numbers are ones that eight bits hold: the interpreter rounds others wrongly, a GPU is compared with torch.
    """
    heads, kv_heads, dim, page, tokens = 2, 2, 32, 16, 5
    generator = torch.Generator().manual_seed(22)
    exact = torch.randn((tokens, (heads + 2 * kv_heads) * dim), generator=generator)
    exact = exact if device.type == "cuda" else exact.to(torch.float8_e4m3fn).float()
    qkv = exact.clone()
    qkv[:, heads * dim : -kv_heads * dim] *= 0.25
    qkv[:, -kv_heads * dim :] *= 8
    qkv[0, heads * dim] = 3e4
    qkv[1, -1] = -3e4
    qkv = qkv.to(device, dtype)
    caches = [torch.zeros((3, kv_heads, page, dim), device=device).to(torch.float8_e4m3fn) for _ in "kv"]
    ones, zeros = torch.ones(8, dim // 2, device=device), torch.zeros(8, dim // 2, device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    slots = (positions + page).int()
    rope_and_cache(qkv, *caches, ones, zeros, positions, slots, heads, key_scale=0.25, value_scale=8.0)
    parts = qkv.float().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    for cache, part, scale in zip(caches, parts[1:], (0.25, 8.0), strict=True):
        wanted = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = cache[1, :, :tokens].transpose(0, 1)
        if not torch.equal(stored.float(), wanted.float()):
            return float("inf")
    return 0.0


def check_norm(device, dtype, width) -> float:
    x = torch.randn((5, width), generator=torch.Generator().manual_seed(3)).to(device, dtype)
    residual = torch.randn((5, width), generator=torch.Generator().manual_seed(4)).to(device, dtype)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    plain = error(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    summed = x.double() + residual.double()
    fused = error(rms_norm(x, weight, 1e-6, residual), reference.rms_norm(summed, weight, 1e-6))
    return max(plain, fused, error(residual, summed))


def check_activation(device, dtype, width, **launch) -> float:
    x = torch.randn((3, 2 * width), generator=torch.Generator().manual_seed(6)).to(device, dtype)
    gate, up = x.double().chunk(2, -1)
    return error(silu_mul(x, **launch), torch.nn.functional.silu(gate) * up)


def check_rope(device, dtype, heads, kv_heads, dim, page, norm, **launch) -> float:
    generator = torch.Generator().manual_seed(8)
    tokens, blocks = 6, 4
    qkv = torch.randn((tokens, (heads + 2 * kv_heads) * dim), generator=generator).to(device, dtype)
    k_cache = torch.full((blocks, kv_heads, page, dim), float("nan"), dtype=dtype, device=device)
    v_cache = k_cache.clone()
    angle = torch.arange(64)[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim / 2))
    cos, sin = angle.cos().to(device), angle.sin().to(device)
    positions = torch.tensor([0, 1, 5, 9, 33, 63], dtype=torch.int32, device=device)
    slots = torch.randperm(blocks * page, generator=generator)[:tokens].int().to(device)
    weights = [torch.randn(dim, generator=generator).to(device, dtype) for _ in range(2)] if norm else [None, None]
    q = rope_and_cache(qkv, k_cache, v_cache, cos, sin, positions, slots, heads, *weights, **launch)
    parts = qkv.double().view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    expected = []
    for part, weight in zip(parts[:2], weights, strict=True):
        part = reference.rms_norm(part, weight, 1e-6) if weight is not None else part
        a, b = part.chunk(2, -1)
        c, s = cos.double()[positions.long()][:, None], sin.double()[positions.long()][:, None]
        expected.append(torch.cat([a * c - b * s, b * c + a * s], -1))
    rows = slots.long()
    written = [cache.permute(0, 2, 1, 3).reshape(-1, kv_heads, dim)[rows] for cache in (k_cache, v_cache)]
    untouched = torch.isfinite(k_cache.float()).sum().item() == tokens * kv_heads * dim
    if not untouched:
        return float("inf")
    return max(error(q, expected[0]), error(written[0], expected[1]), error(written[1], parts[2]))


def check_sampling(device, dtype, vocab) -> float:
    """0 when greedy ids, draws and the finite flags equal the integer-weight reference, computed on the host."""
    rows = 7
    logits = (torch.randn((rows, vocab), generator=torch.Generator().manual_seed(9)) * 3).to(dtype)
    logits[1, 5] = float("nan")
    logits[2, vocab - 1] = float("inf")
    logits[3, [2, vocab - 2]] = 40.0  # a tie
    logits[6, :] = float("-inf")
    temperatures = torch.tensor([0.0, 1.0, 0.7, 0.0, 0.6, 1.3, 1.0])
    uniforms = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.999999, 0.1234, 0.5], dtype=torch.float64)
    ids = torch.full((rows,), -1, dtype=torch.int32, device=device)
    finite = ids.clone()
    sample_rows(
        logits.to(device),
        temperatures.to(device),
        uniforms.to(device),
        SamplingWorkspace(rows, vocab, device),
        ids,
        finite,
    )
    if finite.tolist() != [1, 0, 0, 1, 1, 1, 0] or ids[[1, 2, 6]].tolist() != [0, 0, 0]:
        return float("inf")
    if ids[0].item() != logits[0].argmax().item() or ids[3].item() != 2:
        return float("inf")
    for row in (4, 5):
        wide = logits[row].float()
        weights = (((wide - wide.max()) / temperatures[row]).exp().double() * 2**40).long()
        target = int(uniforms[row] * weights.sum())
        reached = weights.cumsum(0)
        # exp may differ in its last bits between host and device: accept a neighbour at the very edge.
        slack = int(weights.sum() * 1e-6)
        low, high = (int((reached <= target + sign * slack).sum()) for sign in (-1, 1))
        if not low <= ids[row].item() <= high:
            return float("inf")
    return 0.0


def check_unpack(device) -> float:
    """0 when the static arrays hold what was packed, and padding rows hold nothing."""
    rows, padded, width = 3, 8, 5
    generator = np.random.default_rng(0)
    parts = [generator.integers(0, 99, rows).astype(np.int32) for _ in range(4)]
    temperatures = generator.random(rows).astype(np.float32)
    uniforms = generator.random(rows)
    tables = generator.integers(1, 99, (rows, width)).astype(np.int32)
    expected, sampled = parts[0].copy(), np.array([7, 8, 9, 10], dtype=np.int32)
    parts[0][1], expected[1] = -1 - 2, 9
    head = np.array([rows, width, -1, -1], np.int32)
    packed = np.concatenate([head, *parts, temperatures.view(np.int32), uniforms.view(np.int32), tables.ravel()])
    inputs = StepInputs(padded, 7, device)
    inputs.token_ids.fill_(-1)
    inputs.context_lens.fill_(-1)
    inputs.unpack(torch.from_numpy(packed).to(device), torch.from_numpy(sampled).to(device), padded)
    parts[0] = expected
    held = [inputs.token_ids, inputs.positions, inputs.slots, inputs.context_lens]
    same = all((h[:rows].cpu().numpy() == p).all() for h, p in zip(held, parts, strict=True))
    same &= (inputs.temperatures[:rows].cpu().numpy() == temperatures).all()
    same &= (inputs.uniforms[:rows].cpu().numpy() == uniforms).all()
    same &= (inputs.block_tables[:rows, :width].cpu().numpy() == tables).all()
    same &= not inputs.token_ids[rows:].any() and not inputs.context_lens[rows:].any()
    return 0.0 if same else float("inf")


def check_resolve(device) -> float:
    """0 when references to the step before are replaced by what it sampled, and nothing else changes."""
    sampled = torch.arange(100, 164, dtype=torch.int32, device=device)
    tokens = torch.arange(1500, dtype=torch.int32, device=device)
    tokens[3:1400:77] = -1 - torch.arange(19, dtype=torch.int32, device=device) * 3
    expected = torch.where(tokens < 0, sampled[(-1 - tokens).clamp(min=0).long()], tokens)
    resolve_tokens(tokens, sampled)
    return float((tokens - expected).abs().max())


def has_float8(device: torch.device) -> bool:
    """Whether the device converts eight bits; the interpreter does."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def has_descriptors(device: torch.device) -> bool:
    """Whether the device copies tiles by tensor descriptors; the interpreter does."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def tma_cases(device: torch.device, dtype: torch.dtype, small: bool) -> dict[str, Callable[[], float]]:
    """Prefill whose K and V come by tensor descriptors."""

    def check(chunks: list[int], befores: list[int], *sizes: int, **launch: int) -> Callable[[], float]:
        return lambda: check_prefill(device, dtype, chunks, befores, *sizes, tma=True, num_warps=4, **launch)

    checks = {
        # Chunks that fill no item or just one, contexts that end with a page, in a tile and in a part of one.
        "prefill-tma-64": check([70, 1, 33, 64, 31], [0, 0, 63, 64, 97], 4, 2, 64, 64),
        "prefill-tma-128": check([30, 130], [64, 101], 2, 1, 128, 64, block_m=128),
        "prefill-tma-page128": check([40, 20], [100, 130], 2, 2, 64, 128),
        "prefill-tma-page16": check([9, 40], [7, 0], 3, 1, 64, 16, block_m=32, block_n=16),
        "prefill-tma-decode-rows": check([1, 1, 1, 50], [63, 64, 130, 14], 4, 4, 64, 64),
    }
    if not small:
        long = [1000, 257, 129, 1], [3, 0, 700, 64]
        capability = torch.cuda.get_device_capability(device)
        checks |= {
            f"prefill-tma-{'-'.join(map(str, (heads, head_dim, page, *asdict(launch).values())))}": lambda sizes=(heads, 8, head_dim, page), launch=launch: (
                check_prefill(device, dtype, *long, *sizes, **asdict(launch))
            )
            for heads, head_dim, page in ((32, 128, 64), (32, 64, 64), (16, 128, 64), (16, 128, 128))
            for launch in (
                *tma_prefill_launches(head_dim, page, capability, 227 << 10),
                *ws_prefill_launches(head_dim, page, capability, 227 << 10),
            )
        }
    return checks


def cases(device: torch.device, dtype: torch.dtype, small: bool) -> dict[str, Callable[[], float]]:
    """Every check by name; the small ones suit the interpreter."""
    long = 200 if small else 5000
    checks: dict[str, Callable[[], float]] = {
        "norm-576": lambda: check_norm(device, dtype, 576),
        "silu-1536": lambda: check_activation(device, dtype, 1536),
        "silu-1536-block512": lambda: check_activation(device, dtype, 1536, block=512, num_warps=2),
        "rope-9x3x64": lambda: check_rope(device, dtype, 9, 3, 64, 16, False),
        "rope-9x3x64-heads4": lambda: check_rope(device, dtype, 9, 3, 64, 16, False, program_heads=4, num_warps=2),
        "rope-norm-4x2x128": lambda: check_rope(device, dtype, 4, 2, 128, 16, True),
        "rope-2x1x80": lambda: check_rope(device, dtype, 2, 1, 80, 16, False),
        "decode-one": lambda: check_decode(device, dtype, [1], 2, 1, 64, 64, 1),
        "decode-mixed-split4": lambda: check_decode(device, dtype, [1, 64, 65, long], 6, 2, 64, 64, 4),
        "decode-grouped": lambda: check_grouped(device, dtype, [1, 64, 0, 65, long, 7, 0, 30, 90, 0], 6, 2, 64, 64, 1),
        "decode-grouped-split4": lambda: check_grouped(
            device, dtype, [long, 0, 17, 65, 33], 4, 4, 64, 16, 4, block_n=16
        ),
        "decode-80": lambda: check_decode(device, dtype, [long // 2], 4, 4, 80, 64, 2),
        "prefill-fresh": lambda: check_prefill(device, dtype, [70, 1, 33], [0, 0, 0], 2, 1, 64, 64),
        "prefill-chunk": lambda: check_prefill(device, dtype, [30, 20], [64, 101], 2, 2, 64, 64),
        # Tiles of several pages, of one, and of a part of one.
        "decode-page16-tile64": lambda: check_decode(device, dtype, [1, 64, 65, 16, 150], 4, 2, 64, 16, 2, block_n=64),
        "decode-page16-tile16": lambda: check_decode(device, dtype, [33, 70], 4, 2, 64, 16, 4, block_n=16),
        "decode-page128-tile64": lambda: check_decode(device, dtype, [129, 200, 7], 4, 2, 64, 128, 2, block_n=64),
        "prefill-page16-tile64": lambda: check_prefill(device, dtype, [40, 20], [64, 101], 2, 1, 64, 16),
        "prefill-page16-tile32": lambda: check_prefill(
            device, dtype, [40, 70], [30, 0], 2, 2, 64, 16, block_m=32, block_n=32
        ),
        "prefill-page128-tile64": lambda: check_prefill(device, dtype, [40, 20], [100, 130], 2, 1, 64, 128),
        **(tma_cases(device, dtype, small) if has_descriptors(device) else {}),
        # In one order of arithmetic: bits do not depend on the rows beside, the chunk or the number of programs.
        "gemm-fixed-64": lambda: check_fixed_gemm(device, dtype, 70, 100, 192, block_m=64, block_n=32, block_k=64),
        "gemm-fixed-ragged": lambda: check_fixed_gemm(device, dtype, 33, 40, 72, block_m=16, block_n=16, block_k=32),
        "attention-fixed": lambda: check_fixed_attention(
            device, dtype, [40, 1, 33], [0, 63, 70], 4, 2, 64, 64, rows=32, block_n=32
        ),
        "attention-fixed-80": lambda: check_fixed_attention(
            device, dtype, [20, 37], [50, 0], 3, 1, 80, 16, rows=16, block_n=16
        ),
        "attention-fixed-page16": lambda: check_fixed_attention(
            device, dtype, [9, 70], [100, 0], 8, 2, 64, 16, part=64, rows=64, block_n=64
        ),
        # K and V in eight bits.
        **{
            f"{kind}-float8": lambda kind=kind: check_float8(device, dtype, kind)
            for kind in ("decode", "prefill", "fixed")
            if has_float8(device)
        },
        **(
            {
                "decode-grouped-float8": lambda: check_grouped(
                    device, dtype, [70, 0, 9, 64], 6, 2, 64, 64, 2, float8=True
                )
            }
            if has_float8(device)
            else {}
        ),
        **({"rope-float8": lambda: check_rope_float8(device, dtype)} if has_float8(device) else {}),
        "sampling-5000": lambda: check_sampling(device, dtype, 5000),
        "unpack": lambda: check_unpack(device),
        "resolve": lambda: check_resolve(device),
        "prefill-80": lambda: check_prefill(device, dtype, [40], [5], 2, 1, 80, 64),
    }
    if not small:
        checks |= {
            "decode-128-256seqs": lambda: check_decode(
                device, dtype, [(i * 37) % 1500 + 1 for i in range(256)], 32, 8, 128, 64, 2
            ),
            "decode-page128-split16": lambda: check_decode(device, dtype, [9000, 3], 16, 8, 128, 128, 16),
            **{
                f"gemm-fixed-{'x'.join(map(str, asdict(tile).values()))}": lambda tile=tile: check_fixed_gemm(
                    device, dtype, 2050, 1536, 1024, **asdict(tile)
                )
                for tile in FIXED_GEMM_LAUNCHES
            },
            "attention-fixed-128-long": lambda: check_fixed_attention(
                device, dtype, [1000, 257, 129], [3, 0, 5700], 16, 8, 128, 64, part=256
            ),
            "attention-fixed-64-long": lambda: check_fixed_attention(
                device, dtype, [1000, 257, 129], [3, 0, 5700], 32, 8, 64, 64, part=256, num_stages=5
            ),
            "prefill-128-long": lambda: check_prefill(device, dtype, [1000, 257, 129], [3, 0, 700], 16, 8, 128, 64),
        }
    return checks


def main() -> int:
    """Run all checks on the device named on the command line; exit 1 when one is off."""
    device, dtype = torch.device(sys.argv[1]), getattr(torch, sys.argv[2])
    failed = 0
    for name, check in cases(device, dtype, small=device.type == "cpu").items():
        value = check()
        good = value <= TOLERANCE[dtype]
        failed += not good
        print(f"{name:28s} {value:.2e} {'ok' if good else 'TOO LARGE'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
