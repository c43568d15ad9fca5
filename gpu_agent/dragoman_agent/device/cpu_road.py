"""How a model is computed on a CPU: the choice and its reason. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.planner import Road
from dragoman_kernels.cpu.build import KernelBuildError, build
from dragoman_kernels.cpu.llama import BLOCKS, KEY_CHUNK, MAX_HEAD_DIM

NATIVE_INT8 = "native-int8"
NATIVE_FLOAT32 = "native-float32"
TORCH_FLOAT32 = "torch-float32"
TORCH_INT4 = "torch-int4"
TORCH_ROADS = (TORCH_FLOAT32, TORCH_INT4)
KV_DTYPES = {NATIVE_INT8: "float16", NATIVE_FLOAT32: "float32", TORCH_FLOAT32: "float32", TORCH_INT4: "bfloat16"}
INT4_DTYPES = frozenset({"Q4_0", "Q4_1"})  # of which torch has products
DTYPES = ("auto", "int8", "float32")

# Operations a second (2 a parameter and token, 256-token prefill) over a float32 matrix product's on the same threads.
# Medians of alternated runs on a CPU with AVX-512 VNNI; over 1 because prefill computes the head once a sequence.
_OPS_RATE_FACTORS = {NATIVE_INT8: 3.0, NATIVE_FLOAT32: 1.3, TORCH_FLOAT32: 1.1, TORCH_INT4: 1.0}


def choose_cpu_road(model: ModelSource, dtype: str, cache_dir: Path | None = None) -> Road:
    """The road for `model`; builds the kernels when there are none yet (a few seconds, once a machine).

    `dtype` is "auto", "int8" or "float32". Raises ValueError for another.
    """
    return road_of(model, dtype, None if shape_problem(model.config) else native_problem(cache_dir))


def road_of(model: ModelSource, dtype: str, problem: str | None) -> Road:
    """As `choose_cpu_road`, where `problem` already says why there are no compiled kernels. Builds nothing."""
    stored = {name: model.layout(name) for name in model.tensor_names()}
    dtypes = {tensor.dtype for tensor in stored.values() if tensor.shape[0] > 1}
    name, reason = decide_road(model.config, dtypes, dtype, problem)
    num_values = sum(tensor.shape[0] * tensor.shape[1] for tensor in stored.values())
    resident = 4 * num_values
    if name == TORCH_INT4:
        resident = sum(
            tensor.num_bytes if tensor.dtype in INT4_DTYPES else 2 * tensor.shape[0] * tensor.shape[1]
            for tensor in stored.values()
        )
    elif name != TORCH_FLOAT32:
        resident = sum(
            tensor.num_bytes if tensor.dtype in BLOCKS else 4 * tensor.shape[0] * tensor.shape[1]
            for tensor in stored.values()
        )
    return Road(name, reason, resident, KV_DTYPES[name], _OPS_RATE_FACTORS[name])


def decide_road(config: ModelConfig, dtypes: set[str], requested: str, native_problem: str | None) -> tuple[str, str]:
    """Road and reason. `dtypes` are those of the matrices; `native_problem` says why there are no compiled kernels."""
    if requested not in DTYPES:
        raise ValueError(f"--dtype {requested} is not one the CPU computes in; use {', '.join(DTYPES)}")
    problem = shape_problem(config) or native_problem
    if problem:
        lost = "" if requested != "int8" else "; int8 was asked for and is not possible"
        four = sorted(dtypes & INT4_DTYPES)
        if four and requested != "float32":
            weights = f"weights of {', '.join(four)} in 4 bits, all else in bfloat16"
            return TORCH_INT4, f"torch with {weights}, slower than the compiled kernels: {problem}{lost}"
        return TORCH_FLOAT32, f"torch in float32, much slower than the compiled kernels: {problem}{lost}"
    if requested == "float32":
        return NATIVE_FLOAT32, "float32 was asked for: compiled kernels, weights exact, activations in float32"
    quantised = sorted(dtypes & BLOCKS.keys() - {"F32", "F16"})
    if quantised:
        why = "int8 was asked for" if requested == "int8" else f"weights are {', '.join(quantised)}"
        return NATIVE_INT8, f"{why}: compiled kernels, weights as stored, activations in 8 bits a block of 32"
    stored = ", ".join(sorted(dtypes))
    if requested == "int8":
        return NATIVE_FLOAT32, f"int8 was asked for, but the weights are {stored}: nothing to multiply in 8 bits"
    return NATIVE_FLOAT32, f"weights are {stored}: compiled kernels in float32"


def shape_problem(config: ModelConfig) -> str | None:
    """Why the compiled step cannot compute this model; None when it can."""
    if config.head_dim % KEY_CHUNK or config.head_dim > MAX_HEAD_DIM:
        return f"head size {config.head_dim} is not a multiple of {KEY_CHUNK} up to {MAX_HEAD_DIM}"
    if config.attention_output_bias:
        return "biases on the attention's output projection have no compiled kernel"
    if config.sliding_window is not None and config.sliding_window < config.max_context_tokens:
        return f"a sliding window of {config.sliding_window} tokens has no compiled kernel"
    return None


def native_problem(cache_dir: Path | None = None) -> str | None:
    """Build and cache the kernels; None when they are there, else why not."""
    try:
        build(cache_dir if cache_dir is not None else default_cache_dir(os.environ))
    except KernelBuildError as error:
        return error.message
    return None
