"""What the cases are run on: a backend, a model and a plan that it loads, and what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.agent.device.conformance.tiny_model import TinyModel

from dragoman.step_model import StepModel
from dragoman_agent.device.base import Device
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.pal.plan import (
    KV_FLOAT8,
    DecodeAttention,
    DecodeList,
    GemmDecode,
    GemmFixed,
    Plan,
    PrefillAttention,
)

PAGE = 16


@dataclass(frozen=True)
class Subject:
    """One backend under test."""

    name: str
    open: Callable[[], Device]
    model: Callable[..., Any]  # keywords as TinyModel's
    plan: Plan
    computes: bool = True  # from the weights; the null device does not
    is_exact: bool = True  # a row has the same bits alone and in company, prefilled whole or in parts
    tolerance: float = 0.0  # of a log-probability against float64, and between computations that were cut otherwise


def plan_of(kind: str, road: str, kv_dtype: str = "float32", **changes: Any) -> Plan:
    """A plan as small as the cases: 4 sequences, 24 tokens a step, contexts up to 48."""
    fields: dict[str, Any] = {
        "device_kind": kind,
        "model_name": "tiny",
        "page_size": PAGE,
        "num_blocks": 24,
        "max_context_tokens": 48,
        "max_batch_tokens": 24,
        "max_num_seqs": 4,
        "max_num_waiting": 8,
        "num_threads": 2,
        "road": road,
        "kv_dtype": kv_dtype,
        "memory": (),
        "step_model": StepModel((1,), (0,), (0.01,), 200.0, 0.01),
    }
    return Plan(**fields | changes)


def gpu_plan(kind: str, kv_dtype: str = "bfloat16") -> Plan:
    """Graphs of 2 and 4 sequences, the second with a row of padding in the cases of 3; contexts split in two and not split;
    one matrix multiplied by the kernel of few rows; steps with prompts of up to 20 tokens in graphs, longer ones not unless they fill the chunk."""
    return plan_of(
        kind,
        "triton-bfloat16",
        kv_dtype,
        graph_batch_sizes=(2, 4),
        mixed_graph_tokens=(8, 20),
        chunk_graph=True,
        decode_attention=(DecodeAttention(2, 2, 16, 4, 3), DecodeAttention(4, 1, 16, 4, 3)),
        prefill_attention=PrefillAttention("paged", 16, 16, 4, 3),
        gemm_decode=(GemmDecode(n=128, k=64, max_rows=4, block_n=16, block_k=64, num_stages=3, num_warps=2),),
    )


def deterministic_plan(kind: str, kv_dtype: str = "bfloat16") -> Plan:
    """The same in one order of arithmetic: contexts in parts of 16, which two programs share for up to 2 sequences."""
    tiles = tuple(GemmFixed(n, k, 0, 16, 16, 32, 3, 4) for n, k in ((128, 64), (64, 64), (192, 64), (64, 96), (96, 64)))
    return replace(
        gpu_plan(kind, kv_dtype),
        prefill_attention=PrefillAttention("fixed", 16, 16, 4, 3),
        gemm_decode=(),
        deterministic=True,
        gemm_fixed=tiles,
        attention_part_tokens=16,
    )


def listed_plan(kind: str, kv_dtype: str = "bfloat16") -> Plan:
    """Contexts cut by work lists into tiles of a page, where there is room, beside prompts too."""
    return replace(gpu_plan(kind, kv_dtype), decode_lists=(DecodeList(1, 2, 5, 1), DecodeList(3, 4, 11, 1)))


def null_subject() -> Subject:
    """The null device: nothing in it is computed, so everything is exact."""
    from dragoman_agent.device.null import NullDevice

    def model(**_: Any) -> NullModel:
        return NullModel()

    return Subject("null", NullDevice, model, plan_of("null", "null", "none"), computes=False)


def cpu_subject(road: str) -> Subject:
    """One road of the CPU."""
    from dragoman_agent.device.cpu import CpuDevice
    from dragoman_agent.device.cpu_road import KV_DTYPES, TORCH_ROADS

    return Subject(
        f"cpu {road}",
        CpuDevice,
        TinyModel,
        plan_of("cpu", road, KV_DTYPES[road]),
        is_exact=road not in TORCH_ROADS,
        tolerance={"float16": 2e-3, "bfloat16": 0.1}.get(KV_DTYPES[road], 1e-4),
    )


def cpu_subjects() -> list[Subject]:
    """Every road. Raises where the compiled ones cannot be built."""
    from dragoman_agent.device.cpu_road import KV_DTYPES

    return [cpu_subject(road) for road in KV_DTYPES]


def cuda_subject() -> Subject:
    """The CUDA backend on a real card."""
    from dragoman_agent.device.cuda import CudaDevice

    return Subject("cuda", CudaDevice, TinyModel, gpu_plan("cuda"), is_exact=False, tolerance=0.1)


def deterministic_subject() -> Subject:
    """The CUDA backend on a real card, in one order of arithmetic."""
    from dragoman_agent.device.cuda import CudaDevice

    return Subject("cuda deterministic", CudaDevice, TinyModel, deterministic_plan("cuda"), tolerance=0.1)


def float8_subject() -> Subject:
    """The same with K and V in eight bits: as exact, and as far from float64 as those are."""
    from dragoman_agent.device.cuda import CudaDevice

    plan = deterministic_plan("cuda", KV_FLOAT8)
    return Subject("cuda deterministic float8", CudaDevice, TinyModel, plan, tolerance=0.5)


def listed_subject() -> Subject:
    """The CUDA backend on a real card, its decode steps cut by work lists."""
    from dragoman_agent.device.cuda import CudaDevice

    return Subject("cuda listed", CudaDevice, TinyModel, listed_plan("cuda"), is_exact=False, tolerance=0.1)


def hip_on_cuda_subject() -> Subject:
    """All of the HIP backend's code but the card: torch's namespace is the same, weights go through torch alone."""
    from dragoman_agent.device.hip import HipDevice
    from dragoman_agent.device.torch_runtime import open_runtime

    def open_device() -> HipDevice:
        return HipDevice(0, open_runtime("cuda", 0))

    return Subject("hip on a CUDA card", open_device, TinyModel, gpu_plan("hip"), is_exact=False, tolerance=0.1)


def interpreted_subject() -> Subject:
    """The GPU backend's code on host tensors. TRITON_INTERPRET=1 must be set."""
    from tests.agent.device.conformance.host_runtime import InterpretedDevice

    plan = gpu_plan("cuda", "float32")
    return Subject("interpreted", InterpretedDevice, TinyModel, plan, is_exact=False, tolerance=1e-4)


def interpreted_listed_subject() -> Subject:
    """The same, its decode steps cut by work lists."""
    from tests.agent.device.conformance.host_runtime import InterpretedDevice

    plan = listed_plan("cuda", "float32")
    return Subject("interpreted listed", InterpretedDevice, TinyModel, plan, is_exact=False, tolerance=1e-4)


def interpreted_deterministic_subject() -> Subject:
    """The same in one order of arithmetic: what is cut otherwise has the same bits."""
    from tests.agent.device.conformance.host_runtime import InterpretedDevice

    plan = deterministic_plan("cuda", "float32")
    return Subject("interpreted deterministic", InterpretedDevice, TinyModel, plan, tolerance=1e-4)


def interpreted_float8_subject() -> Subject:
    """The same with K and V in eight bits, which the interpreter rounds wrongly: equal bits are all that it can tell."""
    from tests.agent.device.conformance.host_runtime import InterpretedDevice

    plan = deterministic_plan("cuda", KV_FLOAT8)
    return Subject("interpreted float8", InterpretedDevice, TinyModel, plan, tolerance=float("inf"))
