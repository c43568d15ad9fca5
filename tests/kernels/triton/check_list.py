"""Checks decode attention by a work list against float64, and the list itself. Run by pytest under the interpreter, and on a GPU:

python tests/kernels/triton/check_list.py cuda bfloat16
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # with PYTHONSAFEPATH a script's folder is not on it
if __name__ == "__main__" and sys.argv[1] == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before a kernel module is imported

import torch
from check_ops import TOLERANCE, error, paged

from dragoman_kernels.triton import reference
from dragoman_kernels.triton.attention_decode import DecodeWorkspace
from dragoman_kernels.triton.attention_list import Cut, DecodeItems, listed_decode_attention

ON_CPU = bool(os.environ.get("TRITON_INTERPRET"))


def check_rows(rows: list[list[int]], lens: list[int], cut: Cut) -> str:
    """What is wrong with a list: each context whole and in order, by items of about one length; empty where nothing is."""
    tiles = [-(-length // cut.block_n) for length in lens]
    used = [row for row in rows if row[0] >= 0]
    if any(row[0] >= 0 for row in rows[len(used) :]):
        return "items that are not used lie between others"
    longest = cut.min_tiles
    while sum(max(-(-num // longest), 1) for num in tiles) > cut.num_items:
        longest += 1
    place = 0
    for seq, num_tiles in enumerate(tiles):
        own = [row for row in used if row[0] == seq]
        if used[place : place + len(own)] != own or not own:
            return f"sequence {seq} has no items, or not one after another"
        if any(row[3] != place or row[4] != len(own) for row in own):
            return f"sequence {seq}: its first item or their number is wrong"
        if any(row[5] != lens[seq] for row in own):
            return f"sequence {seq}: its length is wrong"
        if [row[1] for row in own] != [0, *(row[2] for row in own[:-1])] or own[-1][2] != num_tiles:
            return f"sequence {seq} is not whole: {own}"
        sizes = [row[2] - row[1] for row in own]
        if max(sizes) > longest or max(sizes) - min(sizes) > 1 or len(own) != max(-(-num_tiles // longest), 1):
            return f"sequence {seq} is cut into {sizes} where items have {longest} at most"
        place += len(own)
    return "" if place == len(used) else f"{len(used)} items, {place} of sequences"


def check(device, dtype, lens, cut, heads, kv_heads, dim, page, *, float8=False, repeats=1, **launch) -> float:
    """Against float64; infinite where the list is wrong, where a repetition has other bits, where padding is not 0, or where
    the counters are not left at 0.
    """
    k, v, tables = paged(device, torch.float32 if float8 else dtype, lens, kv_heads, page, dim, seed=17)
    k, v = (one.to(torch.float8_e4m3fn) for one in (k, v)) if float8 else (k, v)
    q = torch.randn((len(lens), heads, dim), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    items = DecodeItems(cut.num_items + 3, len(lens), kv_heads, device)
    workspace = DecodeWorkspace(cut.num_items, heads, dim, 1, device)
    items.rows.fill_(-7)
    items.make(lengths, cut)
    problem = check_rows(items.rows[: cut.num_items].tolist(), lens, cut)
    if problem or (items.rows[cut.num_items :] != -7).any():
        print(problem or "the list is longer than it may be")
        return float("inf")
    first: torch.Tensor | None = None
    for _ in range(repeats):
        for kept in (workspace.partial, workspace.lse):
            kept.fill_(float("nan"))
        out = torch.full_like(q, float("nan"))
        listed_decode_attention(q, k, v, tables, workspace, items, cut, out=out, **launch)
        first = out if first is None else first
        if not torch.equal(first, out) or items.arrived.any():
            return float("inf")
    assert first is not None
    held = lengths > 0
    if first[~held].any():
        return float("inf")
    starts, kept_lens = list(range(int(held.sum()) + 1)), [length for length in lens if length]
    expected = reference.paged_attention(q[held], k.float(), v.float(), tables[held], starts, kept_lens)
    return error(first[held], expected) / (100 if float8 else 1)


def list_alone(device: torch.device) -> float:
    """Lists of many steps, without attention."""
    generator = torch.Generator().manual_seed(5)
    items = DecodeItems(1100, 512, 1, device)
    for num_seqs in (1, 2, 7, 16, 33, 64, 200, 256, 512):
        for spread in (0, 10, 3000, 20000):
            lens = (torch.rand(num_seqs, generator=generator) ** 4 * spread).int() + (spread > 0)
            cut = Cut(2 * num_seqs + (num_seqs % 3) * 5, 1 + num_seqs % 4, 64)
            items.make(lens.int().to(device), cut)
            problem = check_rows(items.rows[: cut.num_items].tolist(), lens.tolist(), cut)
            if problem:
                print(num_seqs, spread, problem)
                return float("inf")
    return 0.0


def main(where: str, type_name: str) -> int:
    """Exit code 1 where something is off."""
    device, dtype = torch.device(where), getattr(torch, type_name)
    repeats = 1 if ON_CPU else 200
    uneven = [1, 700, 33, 0, 129, 64, 65, 0]
    cases = {
        "lists": lambda: list_alone(device),
        "list uneven": lambda: check(device, dtype, uneven, Cut(24, 2, 16), 8, 2, 64, 16, repeats=repeats),
        "list of one item each": lambda: check(
            device, dtype, [5, 9, 60], Cut(6, 64, 32), 6, 2, 80, 64, repeats=repeats
        ),
        "list of pages in a tile": lambda: check(
            device, dtype, [300, 17, 90], Cut(20, 1, 64), 4, 4, 128, 16, repeats=repeats
        ),
        "list of eight bits": lambda: check(
            device, dtype, [300, 17, 90], Cut(20, 1, 32), 8, 2, 64, 64, float8=True, key_scale=1.0, repeats=repeats
        ),
    }
    if not ON_CPU:
        long = [1024] * 31 + [16384]
        cases |= {
            "list long": lambda: check(device, dtype, long, Cut(132, 4, 64), 16, 8, 128, 64, repeats=repeats),
            "list early": lambda: check(
                device, dtype, long, Cut(132, 4, 64), 32, 8, 128, 64, repeats=repeats, dependent=True
            ),
            "list many": lambda: check(
                device,
                dtype,
                [1 + 37 * n % 4000 for n in range(256)],
                Cut(1024, 1, 64),
                16,
                8,
                128,
                64,
                repeats=repeats,
            ),
        }
    failed = 0
    for name, run in cases.items():
        found = run()
        good = found <= TOLERANCE[dtype]
        failed += not good
        print(f"{name}: {found:.2g} {'ok' if good else 'FAILED'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
