"""Prints the binaries that the GPU backend asks Triton for, or that are compiled ahead, without a GPU; run by test_precompile.

python -m tests.agent.device.compile_trace device|ahead|last-parts planned|deterministic|float8      a line a binary: hash and name
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

import numpy as np
from tests.agent.device.conformance.subjects import deterministic_plan, gpu_plan
from tests.agent.device.conformance.tiny_model import CONFIG, TinyModel

from dragoman_agent.pal.plan import KV_FLOAT8, DecodeList, GemmDecode, LongPrefill, Plan, PrefillAttention, ShortGroups

CAPABILITY = "9.0"


def plan(which: str) -> Plan:
    """In one order of arithmetic; with K and V in eight bits; or with prefill by tensor descriptors, dependent launch up to 2 sequences, which a work list cuts, groups of more; a matrix for all of them and one, which two sizes of tile serve, for some."""
    if which == "deterministic":
        return deterministic_plan("cuda")
    if which == "float8":
        return gpu_plan("cuda", KV_FLOAT8)
    gemm = (
        GemmDecode(n=128, k=64, max_rows=4, block_n=16, block_k=64, num_stages=3, num_warps=2),
        GemmDecode(n=192, k=64, max_rows=16, block_n=16, block_k=64, num_stages=3, num_warps=2),
    )
    by_descriptors = PrefillAttention("paged", 16, 16, 4, 3, tma=True)
    long = LongPrefill(
        PrefillAttention("paged", 32, 16, 4, 3), 2048, 900
    )  # no step here takes it: it is launched once all the same
    return dataclasses.replace(
        gpu_plan("cuda"), chunk_graph=False, gemm_decode=gemm, dependent_max_batch=2, prefill_attention=by_descriptors,
        long_prefill=long,
        short_groups=(ShortGroups(3, 4, 2, 20, 2e-6, 1e-6),), decode_lists=(DecodeList(2, 2, 6, 1),),
    )  # fmt: skip


def of_the_device(plan: Plan) -> dict[str, str]:
    """Load, decode in graphs, a step with prompts of tokens that the step before sampled, draws with filters and edits."""
    import torch
    from tests.agent.device.conformance.host_runtime import InterpretedDevice
    from tests.agent.device.conformance.steps import Part, step_of

    from dragoman_kernels.triton.aot import compiling_for

    class Device(InterpretedDevice):
        dtype = torch.bfloat16  # nothing is computed: what is compiled would be

    with compiling_for(90) as binaries:
        device = Device()
        device.load(TinyModel(), plan, lambda _: None)
        for batch in (1, 2, 3, 4):
            device.submit(step_of([Part([5], 3, [1 + i]) for i in range(batch)], 16)).result()
        mixed = [Part([5], 3, [1]), Part(list(range(1, 18)), 0, [3, 4])]
        device.submit(step_of(mixed, 16)).result()
        beside = [Part([5], 3, [1]), Part([5], 3, [2]), Part(list(range(1, 20)), 0, [3, 4])]  # in no graph
        device.submit(step_of(beside, 16)).result()
        drawn = {"temperatures": 0.8, "top_ks": 8, "top_ps": 0.95}
        masks = {"masked_rows": np.array([1], np.int32), "masks": np.full((1, 3), -1, np.int32)}
        for edits in (masks, {"banned": {0: np.array([3], np.int32)}}):
            device.submit(step_of(mixed, 16, **drawn, **edits)).result()
        return {compiled.hash: name for _, (name, compiled, _) in binaries.items()}


def ahead(plan: Plan, *, last_parts: bool = False) -> dict[str, str]:
    """What `precompile` leaves in the cache; or what a worker does that has the last kernel alone of each form that is shared."""
    from dragoman_agent.device import precompile

    order = precompile.order_of(CONFIG, plan, CAPABILITY)
    if last_parts:
        order["forms"] = [form for form in order["forms"] if 1 < form["num_parts"] == form["part"] + 1]
    return {binary.hash: binary.metadata.name for binary in precompile.compile_forms(order)}


if __name__ == "__main__":
    roads = {"device": of_the_device, "ahead": ahead, "last-parts": partial(ahead, last_parts=True)}
    made = roads[sys.argv[1]](plan(sys.argv[2]))
    for digest, name in made.items():
        print(digest, name)
