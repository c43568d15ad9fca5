"""The plan of a CUDA device, each choice with its decision. Needs no device."""

from __future__ import annotations

from dragoman.step_model import StepModel
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import Limits, PlanError, choose_context, profile_input
from dragoman_agent.pal.plan import DecodeAttention, MemoryLine, Plan, PrefillAttention
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings

_BATCHES = (1, 8, 32, 64, 128, 256, 512)
_GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_CONTEXT_BYTES = 1 << 30  # CUDA context, cuBLAS workspaces, kernels
_GRAPH_BYTES = 12 << 20  # of one captured graph beside the shared pool
_KERNELS_A_LAYER = 8


def plan_cuda(
    profile: Profile,
    model: ModelConfig,
    limits: Limits,
    switches: Switches | None = None,
    timings: Timings | None = None,
) -> tuple[Plan, list[Decision]]:
    """The plan in bfloat16. Raises PlanError where the model does not fit."""
    weight_bytes = 2 * model.num_parameters
    kv_token_bytes = model.kv_bytes_per_token
    page_size, page = _page_size()
    context, context_decision = choose_context(model, limits)
    batch_tokens, tokens = _batch_tokens(profile, model)
    num_seqs = limits.max_num_seqs or 256
    graphs = tuple(size for size in _GRAPHS if size <= num_seqs)
    workspace = _workspace(model, batch_tokens, num_seqs)
    num_blocks, memory, blocks = _blocks(
        profile, model, limits, weight_bytes, page_size * kv_token_bytes, workspace + len(graphs) * _GRAPH_BYTES
    )
    context = min(context, (num_blocks - 1) * page_size)
    step_model = predict_cuda(profile, model, weight_bytes, kv_token_bytes)
    decisions = [
        Decision("road", "triton-bfloat16", "our Triton kernels and cuBLAS, weights and KV in bfloat16"),
        page,
        context_decision,
        tokens,
        Decision("max-seqs", str(num_seqs), "asked for" if limits.max_num_seqs else "past 256 a step's latency grows faster than its tokens"),
        Decision("graphs", ", ".join(map(str, graphs)), "a decode batch is padded to the next size: at most a third more rows", predicted=len(graphs) * _GRAPH_BYTES, unit="bytes"),
        blocks,
        Decision(
            "step-model",
            f"{1e3 * step_model.decode_step_seconds(1, 256):.2f} ms a token alone",
            "max(bytes / read bandwidth, operations / matrix rate) + kernels x graph node",
            inputs=tuple(profile_input(profile, n) for n in ("memory.read_bandwidth", "compute.matmul_bfloat16", "scheduling.graph_node")),
            predicted=step_model.decode_step_seconds(1, 200),
            unit="s",
        ),
    ]  # fmt: skip
    plan = Plan(
        device_kind="cuda",
        model_name=model.name,
        page_size=page_size,
        num_blocks=num_blocks,
        max_context_tokens=context,
        max_batch_tokens=batch_tokens,
        max_num_seqs=num_seqs,
        max_num_waiting=limits.max_num_waiting,
        num_threads=1,
        road="triton-bfloat16",
        kv_dtype="bfloat16",
        memory=memory,
        step_model=step_model,
        graph_batch_sizes=graphs,
        device_index=profile.device.index,
        decode_attention=tuple(_decode(size, model.num_kv_heads) for size in graphs),
        prefill_attention=PrefillAttention("paged", 64, 64, 4, 3),
        min_gemm_rows=8,
    )
    return plan, decisions


def _decode(batch: int, num_kv_heads: int) -> DecodeAttention:
    splits = 1
    while splits < 16 and batch * num_kv_heads * splits * 2 <= 144:
        splits *= 2
    return DecodeAttention(batch, splits, 64, 4 if splits > 1 else 2, 5 if batch <= 64 else 3)


def predict_cuda(profile: Profile, model: ModelConfig, weight_bytes: int, kv_token_bytes: int) -> StepModel:
    """t = max(bytes / bandwidth, operations / rate) + kernels x node, over a grid of batch and context."""
    bandwidth = profile.number("memory.read_bandwidth")
    rate = profile.number("compute.matmul_bfloat16")
    # A dependent kernel waits for the one before to drain and for its own first loads: several times an empty node.
    phase = 4.0 * profile.number("scheduling.graph_node")
    phases = _KERNELS_A_LAYER * model.num_layers + 5
    contexts = tuple(
        dict.fromkeys(min(c, model.max_context_tokens) for c in (128, 1024, 4096, 16384, model.max_context_tokens))
    )
    flops_a_token = 2.0 * model.num_parameters

    def decode(batch: int, context: int) -> float:
        moved = weight_bytes + batch * context * kv_token_bytes
        return max(moved / bandwidth, batch * flops_a_token / rate) + phases * phase

    return StepModel(
        batch_sizes=_BATCHES,
        context_tokens=contexts,
        decode_seconds_grid=tuple(decode(batch, context) for batch in _BATCHES for context in contexts),
        prefill_tokens_per_second=0.55 * rate / flops_a_token,
        prefill_base_seconds=2 * decode(1, contexts[0]),
    )


def _page_size() -> tuple[int, Decision]:
    candidates = (
        Candidate("16", rejected_because="tiles of 64 keys would gather four pages each"),
        Candidate("64"),
        Candidate("128", rejected_because="measured within 1 % in decode, and wastes twice the tail"),
    )
    return 64, Decision("page-size", "64", "one tile of the attention kernels", candidates=candidates, unit="tokens")


def _batch_tokens(profile: Profile, model: ModelConfig) -> tuple[int, Decision]:
    """The prefill that takes about 80 ms at half the matrix rate: smaller models need more tokens to fill the card."""
    rate = 0.5 * profile.number("compute.matmul_bfloat16") / (2.0 * model.num_parameters)
    tokens = 512
    while tokens * 2 <= min(rate * 0.08, 8192):
        tokens *= 2
    return tokens, Decision(
        "step-tokens", str(tokens), "the largest power of two whose prefill takes under 80 ms, at most 8192",
        inputs=(profile_input(profile, "compute.matmul_bfloat16"),), predicted=tokens / rate, unit="s",
    )  # fmt: skip


def _workspace(model: ModelConfig, batch_tokens: int, num_seqs: int) -> int:
    activations = (
        batch_tokens * (3 * model.intermediate_size + 8 * model.hidden_size + 3 * model.num_heads * model.head_dim) * 2
    )
    sampling = num_seqs * model.vocab_size * 2 + min(num_seqs, 64) * model.vocab_size * 40
    attention = num_seqs * model.num_heads * 16 * (model.head_dim + 1) * 4
    return activations + sampling + attention


def _blocks(
    profile: Profile, model: ModelConfig, limits: Limits, weight_bytes: int, block_bytes: int, workspace: int
) -> tuple[int, tuple[MemoryLine, ...], Decision]:
    free = profile.number("memory.free")
    share = limits.memory_utilization if limits.memory_utilization is not None else 0.9
    budget = int(free * share)
    fixed = weight_bytes + workspace + _CONTEXT_BYTES
    chosen = (budget - fixed) // block_bytes
    if chosen < 3:
        raise PlanError(
            f"{model.name} does not fit: weights {weight_bytes >> 20} MiB + workspace {workspace >> 20} MiB + context "
            f"{_CONTEXT_BYTES >> 20} MiB leave {max(budget - fixed, 0) >> 20} MiB of the {budget >> 20} MiB budget "
            f"({share:.0%} of free memory) for KV. What to do: stop other processes on the GPU, raise "
            "--memory-utilization, or take a smaller model"
        )
    memory = (
        MemoryLine("weights", weight_bytes),
        MemoryLine("kv", chosen * block_bytes),
        MemoryLine("workspace", workspace),
        MemoryLine("context", _CONTEXT_BYTES),
        MemoryLine("margin", int(free) - fixed - chosen * block_bytes),
    )
    decision = Decision(
        "kv-blocks", str(chosen), f"what {share:.0%} of free memory leaves beside weights and workspace",
        inputs=(profile_input(profile, "memory.free"),), predicted=chosen * block_bytes, unit="bytes",
    )  # fmt: skip
    return chosen, memory, decision
