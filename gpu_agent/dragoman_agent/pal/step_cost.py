"""Which kernels a step of a model runs and how long they take together: t = sum over kernels. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.kernel_calls import KernelCall, LibraryAlgorithm
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import (
    DecodeAttention,
    GemmDecode,
    GemmFixed,
    LibraryPrefill,
    PrefillAttention,
    PrefillForms,
)
from dragoman_agent.pal.rates import Rates
from dragoman_kernels.triton.launches import FixedGemmLaunch, GemmLaunch

# Around the model a step runs: metadata in, spread over the static arrays, embedding rows, results out.
_AROUND = 4
# Of the time of attention over sixteen bits: half the bytes and their conversion. Published kernels reach from 0.5 to 0.9.
_FLOAT8_SHARE = 0.6
# Attention in one order over the usual one on an H200: 1.1 to 1.5 for 256 sequences to one, 1.4 to 1.6 for a prompt.
_FIXED_DECODE, _FIXED_PREFILL = 1.25, 1.45

GemmChoice = GemmDecode | GemmFixed
# Kernel by kernel, without a graph (H200, whole steps of 1,024 to 8,192 tokens of two models): what the device loses between
# two kernels, in phases; what the host takes a kernel, torch's calls and ours together, and a call of the library, in launches.
_STREAM_GAP = 0.75
_HOST_LAUNCHES = 3.0
_LIBRARY_LAUNCHES = 1


def matrices(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of the layers' matrices: q, k and v; attention's output; gate and up; down."""
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    return (
        (heads + 2 * model.num_kv_heads * model.head_dim, hidden),
        (hidden, heads),
        (2 * model.intermediate_size, hidden),
        (hidden, model.intermediate_size),
    )


def gemm_call(rows: int, n: int, k: int, choices: Sequence[GemmChoice] = ()) -> KernelCall:
    """A product of `rows` rows as the plan's `choices` run it: in fixed order, by the kernel of few rows, or by the library."""
    for one in choices:
        if (one.n, one.k) != (n, k):
            continue
        if isinstance(one, GemmFixed):
            if rows <= one.max_rows or not one.max_rows:
                tile = FixedGemmLaunch(one.block_m, one.block_n, one.block_k, one.num_stages, one.num_warps)
                return fixed_gemm_call(rows, n, k, tile)
        elif rows <= one.max_rows:
            launch = GemmLaunch(one.block_n, one.block_k, one.num_stages, one.num_warps)
            return KernelCall("gemm", {"m": rows, "n": n, "k": k}, launch)
    return KernelCall("gemm", {"m": rows, "n": n, "k": k})


def fixed_gemm_call(rows: int, n: int, k: int, tile: FixedGemmLaunch) -> KernelCall:
    """The product in one order by one tile."""
    return KernelCall("gemm-fixed", {"m": rows, "n": n, "k": k}, tile)


def library_gemm_call(rows: int, n: int, k: int, rank: int | None) -> KernelCall:
    """The product by one of the library's algorithms, or as it chooses itself (None), under the load of others like it."""
    return KernelCall("gemm-library", {"m": rows, "n": n, "k": k}, None if rank is None else LibraryAlgorithm(rank))


def gemm_calls(model: ModelConfig, rows: int, choices: Sequence[GemmChoice] = ()) -> Iterator[tuple[KernelCall, int]]:
    """The layers' products and how often a step runs each. The head's is apart: it has its own rows."""
    for n, k in matrices(model):
        yield gemm_call(rows, n, k, choices), model.num_layers


def head_call(model: ModelConfig, rows: int, choices: Sequence[GemmChoice] = ()) -> KernelCall:
    """The product with the output matrix."""
    return gemm_call(rows, model.vocab_size, model.hidden_size, choices)


def row_calls(model: ModelConfig, rows: int) -> Iterator[tuple[KernelCall, int]]:
    """Norms, rotation and activation of `rows` tokens."""
    layers = model.num_layers
    yield KernelCall("rms-norm", {"tokens": rows, "width": model.hidden_size}), 1
    yield KernelCall("add-rms-norm", {"tokens": rows, "width": model.hidden_size}), 2 * layers
    yield KernelCall("silu-mul", {"tokens": rows, "width": model.intermediate_size}), layers
    heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    yield KernelCall("rope-cache", {**heads, "tokens": rows}), layers


def sample_call(model: ModelConfig, rows: int) -> KernelCall:
    """Drawing a token for each of `rows` rows."""
    return KernelCall("sample", {"rows": rows, "vocab_size": model.vocab_size})


def decode_attention_call(
    model: ModelConfig, page_size: int, config: DecodeAttention, batch: int, context: int
) -> KernelCall:
    """Decode attention of one layer."""
    return KernelCall("decode-attention", {**_heads(model, page_size), "batch": batch, "context": context}, config)


def prefill_attention_call(
    model: ModelConfig, page_size: int, config: PrefillAttention, tokens: int, context: int
) -> KernelCall:
    """Prefill attention of one layer: the last `tokens` of one sequence of `context`."""
    return KernelCall("prefill-attention", {**_heads(model, page_size), "tokens": tokens, "context": context}, config)


def prefill_batch_call(
    model: ModelConfig, page_size: int, config: PrefillAttention, tokens: int, num_prompts: int
) -> KernelCall:
    """Prefill attention of one layer over `num_prompts` whole prompts of `tokens`."""
    return KernelCall("prefill-batch", {**_heads(model, page_size), "prompts": num_prompts, "tokens": tokens}, config)


def library_prefill_call(model: ModelConfig, page_size: int, tokens: int, context: int) -> KernelCall:
    """The same by a library."""
    return KernelCall("prefill-library", {**_heads(model, page_size), "tokens": tokens, "context": context})


def decode_step_seconds(
    times: KernelTimes,
    model: ModelConfig,
    page_size: int,
    config: DecodeAttention,
    batch: int,
    context: int,
    rows: int,
    choices: Sequence[GemmChoice] = (),
) -> float:
    """A decode step on the device: `batch` sequences of `context` tokens, products and samples padded to `rows`."""
    each = times.seconds(decode_attention_call(model, page_size, config, batch, context))
    if any(isinstance(one, GemmFixed) for one in choices):
        each *= _FIXED_DECODE
    if model.kv_item_bytes == 1:
        each = times.rates.phase_seconds + _FLOAT8_SHARE * max(each - times.rates.phase_seconds, 0.0)
    return model.num_layers * each + padded_seconds(times, model, rows, choices)


def padded_seconds(times: KernelTimes, model: ModelConfig, rows: int, choices: Sequence[GemmChoice] = ()) -> float:
    """What of a decode step depends on the padded rows alone: everything but attention."""

    def summed() -> float:
        calls = (*gemm_calls(model, rows, choices), *row_calls(model, rows))
        layers = sum(count * times.seconds(call) for call, count in calls)
        last = times.seconds(head_call(model, rows, choices)) + times.seconds(sample_call(model, rows))
        return layers + last + _AROUND * times.rates.phase_seconds

    # A plan asks for the same rows beside many contexts and sizes.
    return times.once((model, rows, tuple(choices)), summed)


def prefill_step_seconds(
    times: KernelTimes,
    model: ModelConfig,
    page_size: int,
    forms: PrefillForms,
    tokens: int,
    prompt: int,
    library: LibraryPrefill | None = None,
    choices: Sequence[GemmChoice] = (),
    *,
    in_graph: bool = False,
) -> float:
    """A step of `tokens` prompt tokens, whole prompts of `prompt` tokens; longer ones than the step count as one of it.

    `in_graph`: as a captured one of so many rows, in which kernels follow each other without a gap.
    """
    each = min(prompt, tokens)
    sequences = max(tokens / each, 1.0)
    config = forms.of(each, each, sequences)
    call = prefill_attention_call(model, page_size, config, each, each)
    if library is not None and library.min_tokens <= tokens <= each * library.max_num_seqs:
        call = library_prefill_call(model, page_size, each, each)
    rates = times.rates
    # Sequences share one launch: its phase counts once.
    attention = rates.phase_seconds + sequences * max(times.seconds(call) - rates.phase_seconds, 0.0)
    if config.variant == "fixed":
        attention *= _FIXED_PREFILL
    calls = (*gemm_calls(model, tokens, choices), *row_calls(model, tokens))
    layers = sum(count * times.seconds(call) for call, count in calls)
    rows = max(int(sequences), 1)
    last = times.seconds(head_call(model, rows, choices)) + times.seconds(sample_call(model, rows))
    gaps = 0.0 if in_graph else _STREAM_GAP * num_kernels(model) * rates.phase_seconds
    return layers + model.num_layers * attention + last + _AROUND * rates.phase_seconds + gaps


def handover_seconds(rates: Rates, model: ModelConfig, library_calls: int = 0) -> float:
    """What the host takes to hand over a step kernel by kernel, `library_calls` of them a library's."""
    launches = num_kernels(model) + _LIBRARY_LAUNCHES * library_calls
    return _HOST_LAUNCHES * launches * rates.python_launch_seconds


def num_kernels(model: ModelConfig, is_split: bool = False) -> int:
    """Kernels of one step, as the host launches them outside a graph."""
    return model.num_layers * (9 + is_split) + 1 + 1 + 3 + _AROUND


def _heads(model: ModelConfig, page_size: int) -> dict[str, int]:
    return {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "page_size": page_size,
    }
