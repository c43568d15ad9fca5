"""A kernel that is quick and wrong is not timed; under the interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import torch
from dragoman_agent.device import cuda_tuning

cuda_tuning._randn = lambda device, *size: torch.randn(size, device=device)  # the interpreter has no bfloat16 arithmetic
shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "page_size": 64, "tokens": 70, "context": 100}
config = {"block_m": 64, "block_n": 64, "num_stages": 3, "num_warps": 4, "tma": True}
case = {"shape": shape, "config": config}
calls = cuda_tuning._prefill(case, torch.device("cpu"), 1)
print(len(calls), tuple(calls[0]().shape))
right = cuda_tuning.paged_prefill_attention
for wrong in (lambda out: out * 1.1, lambda out: out.index_fill(0, torch.tensor([3]), float("nan"))):
    cuda_tuning.paged_prefill_attention = lambda *a, wrong=wrong, **k: wrong(right(*a, **k)) if k.get("tma") else right(*a, **k)
    try:
        cuda_tuning._prefill(case, torch.device("cpu"), 1)
    except ValueError as error:
        print(error)
print(len(cuda_tuning._prefill(case, torch.device("cpu"), 0)))
noted = []
cuda_tuning.paged_prefill_attention = lambda *a, **k: noted.append(a[4:6]) or right(*a, **k)
many = {name: size for name, size in shape.items() if name != "context"} | {"tokens": 40, "prompts": 3}
calls = cuda_tuning._BUILDERS["prefill-batch"]({"shape": many, "config": config}, torch.device("cpu"), 1)
print(tuple(calls[0]().shape), *(part.tolist() for part in noted[-1]))
cuda_tuning.paged_prefill_attention = right
heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "page_size": 16}
config = {"num_splits": 2, "block_n": 16, "num_stages": 3, "num_warps": 4}
decode = lambda rows, cold: cuda_tuning._BUILDERS["decode-grouped"](
    {"shape": {**heads, "batch": 3, "context": 20, "rows": rows}, "config": config}, torch.device("cpu"), cold
)
right, words = cuda_tuning.paged_decode_attention, []
def noted(*a, wrong=False, **k):
    words.append(k.get("group_rows"))
    return right(*a, **k) * (1.1 if wrong and k.get("group_rows") is not None else 1.0)
cuda_tuning.paged_decode_attention = noted
for rows in (0, 2):
    made = decode(rows, 1)
    words.clear()
    print(tuple(made[0]().shape), None if words[0] is None else words[0].tolist())
cuda_tuning.paged_decode_attention = lambda *a, **k: noted(*a, wrong=True, **k)
print(len(decode(2, 0)) > 0)
try:
    decode(2, 1)
except ValueError as error:
    print(error)
"""


def test_what_attends_otherwise_than_the_kernel_it_would_replace_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    timed, scaled, no_number, compiled, many, *grouping = done.stdout.splitlines()
    assert timed == "2 (70, 2, 64)" and compiled == "2", "compiling alone compares nothing"
    assert scaled == "its results are otherwise than those of the kernel that it is compared with, by 0.1 of them"
    assert no_number == "its results are otherwise than those of the kernel that it is compared with, by nan of them"
    assert many == "(120, 2, 64) [0, 40, 80, 120] [40, 40, 40]", "whole prompts in one step"
    assert grouping[:3] == ["(3, 2, 16) None", "(3, 2, 16) [2]", "True"], "without groups, and with a word"
    assert grouping[3] == "a sequence has other bits where 2 share a program"


LISTS = """
import torch
from dragoman_agent.device import cuda_tuning
from dragoman_kernels.triton.attention_list import DecodeItems

cuda_tuning._randn = lambda device, *size: torch.randn(size, device=device)  # the interpreter has no bfloat16 arithmetic
shape = {
    "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "page_size": 16, "batch": 3, "context": 20, "longest": 70, "layout": 1,
    "items": 6, "min_tiles": 1, "layers": 3,
}
config = {"num_splits": 2, "block_n": 16, "num_stages": 3, "num_warps": 4}
right, make, tables, made = cuda_tuning.listed_decode_attention, DecodeItems.make, [], []
def noted(*a, wrong=1.0, **k):
    tables.append(a[3])
    return right(*a, **k) * wrong
cuda_tuning.listed_decode_attention = noted
DecodeItems.make = lambda self, *a, **k: made.append(1) or make(self, *a, **k)
def builder(cold, **changes):
    return cuda_tuning._BUILDERS["decode-list"](
        {"shape": {**shape, **changes}, "config": config}, torch.device("cpu"), cold
    )
calls = builder(1)
print((tables[0] > 0).sum(1).tolist(), sorted(tables[0][tables[0] > 0].tolist()))
made.clear()
print([(tuple(call().shape), len(made)) for call in calls])
made.clear()
tables.clear()
print([tuple(call().shape) for call in builder(1, items=0)], made, tables)
cuda_tuning.listed_decode_attention = lambda *a, **k: noted(*a, wrong=1.1, **k)
print(len(builder(0)))
try:
    builder(1)
except ValueError as error:
    print(error)
"""


def test_a_list_is_timed_with_its_making_once_in_as_many_layers_as_a_step_has() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTS], capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages, listed, plain, compiled, refused = done.stdout.splitlines()
    assert pages == f"[2, 5, 2] {[1, 2, 3, 4, 5, 6, 7, 8, 9]}", "each sequence has pages of its own"
    assert listed == f"{[((3, 2, 16), 1)] * 3}"
    assert plain == f"{[(3, 2, 16)] * 3} [] []", "without a list none is made"
    assert compiled == "1", "compiling alone compares nothing"
    assert refused == "its results are otherwise than those of the kernel that it is compared with, by 0.1 of them"
