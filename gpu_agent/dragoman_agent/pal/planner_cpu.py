"""The plan of a CPU, each choice by one small pure function with its decision. Needs no device."""

from __future__ import annotations

from dragoman.step_model import StepModel
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.changes import MemoryNeed, Options, Part, cheapest_changes, shortage_text
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import Limits, PlanError, Road, choose_context, need, need_count, profile_inputs
from dragoman_agent.pal.needs import cpu_formats, known_models
from dragoman_agent.pal.plan import MemoryLine, Plan
from dragoman_agent.pal.planner_tiers import plan_tiers
from dragoman_agent.pal.profile import Profile

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CHUNK_SECONDS = 0.5  # a prefill chunk of about two dozen decode steps
_KV_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_INT8_ROAD, _INT8_RATE = "native-int8", "compute.matmul_int8"
_BY_THREADS = "compute.matmul_int8_by_threads"
_FIXED_BYTES = 350 << 20  # interpreter, torch and libraries of the engine process, measured on x86-64 Linux


def plan_cpu(profile: Profile, model: ModelConfig, road: Road, limits: Limits) -> tuple[Plan, list[Decision]]:
    """The plan of the CPU backend. Raises PlanError where the model does not fit."""
    decisions = [
        Decision("road", road.name, road.reason, inputs=profile_inputs(profile, "compute.instruction_set")),
    ]
    shared = "a CPU's threads share the sequences of a step as they come"
    decisions += [Decision(subject, "none", shared) for subject in ("attention-grouping", "decode-work-list")]
    threads, decision = _num_threads(profile, limits)
    decisions.append(decision)
    page_size, decision = _page_size()
    decisions.append(decision)
    context, decision = choose_context(model, limits)
    decisions.append(decision)
    kv_token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _KV_ITEM_BYTES[road.kv_dtype]
    batch_tokens, decision = _batch_tokens(profile, model, road, limits)
    decisions.append(decision)
    num_seqs, decision = _num_seqs(limits)
    decisions.append(decision)
    workspace = (
        batch_tokens * (2 * model.intermediate_size + 6 * model.hidden_size) * 4 + num_seqs * model.vocab_size * 4
    )
    num_blocks, memory, decision = _blocks(
        profile, model, road, limits, page_size, context, kv_token_bytes, workspace, num_seqs
    )
    decisions.append(decision)
    context = min(context, (num_blocks - 1) * page_size)
    step_model = predict_cpu(profile, model, road, kv_token_bytes)
    decisions.append(
        Decision(
            "step-model",
            f"{1e3 * step_model.decode_step_seconds(1, 256):.1f} ms a token alone",
            "max(bytes / bandwidth, operations / rate) + phases x hand-over",
            inputs=profile_inputs(
                profile, "memory.read_bandwidth", rate_name(profile, road), "scheduling.thread_handover"
            ),
            predicted=step_model.decode_step_seconds(1, 64),
            unit="s",
        )
    )
    block_bytes = page_size * kv_token_bytes
    if limits.kv_host_bytes:
        raise PlanError(
            f"--kv-host-bytes {limits.kv_host_bytes} has no use on a CPU, whose KV lies in host memory as it is; leave it out, "
            "and give --memory-utilization more for a larger cache"
        )
    reason = "the device's own memory is host memory: a tier there would hold the same twice"
    tiers = plan_tiers(limits, block_bytes, num_blocks * block_bytes, reason, offload=False)
    decisions.extend(tiers.decisions)
    plan = Plan(
        device_kind=profile.device.kind,
        model_name=model.name,
        page_size=page_size,
        num_blocks=num_blocks,
        max_context_tokens=context,
        max_batch_tokens=batch_tokens,
        max_num_seqs=num_seqs,
        max_num_waiting=limits.max_num_waiting,
        num_threads=threads,
        road=road.name,
        kv_dtype=road.kv_dtype,
        memory=(*memory, *tiers.lines),
        step_model=step_model,
        kv_host_bytes=tiers.host_bytes,
        kv_disk_bytes=tiers.disk_bytes,
    )
    return plan, decisions


def predict_cpu(profile: Profile, model: ModelConfig, road: Road, kv_token_bytes: int) -> StepModel:
    """t = max(bytes / bandwidth, operations / rate) + phases x hand-over, over a grid of batch and context."""
    bandwidth = need(profile, "memory.read_bandwidth")
    rate = matrix_rate(profile, road)
    handover = need(profile, "scheduling.thread_handover")
    phases = 6 * model.num_layers + 2
    contexts = tuple(
        dict.fromkeys(min(c, model.max_context_tokens) for c in (64, 1024, 4096, model.max_context_tokens))
    )
    flops_a_token = 2.0 * model.num_parameters
    # A prompt's head is computed for its last token alone; factors over the float32 rate have that in them.
    head = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    prompt_flops = flops_a_token if rate_name(profile, road) != _INT8_RATE else flops_a_token - 2.0 * head

    def decode(batch: int, context: int) -> float:
        moved = road.weight_bytes + batch * context * kv_token_bytes
        attention = 4.0 * batch * context * model.num_layers * model.num_heads * model.head_dim
        return max(moved / bandwidth, (batch * flops_a_token + attention) / rate) + phases * handover

    return StepModel(
        batch_sizes=_BATCHES,
        context_tokens=contexts,
        decode_seconds_grid=tuple(decode(batch, context) for batch in _BATCHES for context in contexts),
        prefill_tokens_per_second=rate / prompt_flops,
        prefill_base_seconds=decode(1, contexts[0]),
    )


def rate_name(profile: Profile, road: Road) -> str:
    """The profile value that the road's matrix rate comes from: its own where it was measured, else float32's."""
    return _INT8_RATE if road.name == _INT8_ROAD and _INT8_RATE in profile.values else "compute.matmul_float32"


def matrix_rate(profile: Profile, road: Road) -> float:
    """Operations a second of the road: as measured for it, else the float32 rate times the road's factor."""
    name = rate_name(profile, road)
    return need(profile, name) * (1.0 if name == _INT8_RATE else road.ops_rate_factor)


def _num_threads(profile: Profile, limits: Limits) -> tuple[int, Decision]:
    """One a usable core; fewer where the int8 product was measured by number of threads and fewer were quicker."""
    cores = need_count(profile, "compute.cores")
    inputs = profile_inputs(profile, "compute.cores", _BY_THREADS)
    if limits.num_threads:
        return limits.num_threads, Decision("threads", f"{limits.num_threads}", "asked for", inputs=inputs)
    measured = profile.values.get(_BY_THREADS)
    if measured is None or not isinstance(measured.value, tuple) or not measured.labels:
        return cores, Decision("threads", f"{cores}", "one thread a usable core", inputs=inputs)
    rates = {
        int(label): rate for label, rate in zip(measured.labels, measured.value, strict=True) if int(label) <= cores
    }
    chosen = max(rates, key=lambda count: rates[count]) if rates else cores
    candidates = tuple(
        Candidate(f"{count}", rate, "" if count == chosen else f"{rate / rates[chosen] - 1:+.1%}")
        for count, rate in rates.items()
    )
    return chosen, Decision(
        "threads", f"{chosen}", "the quickest int8 product as measured by number of threads", inputs, candidates,
        rates.get(chosen), unit="flop/s",
    )  # fmt: skip


def _page_size() -> tuple[int, Decision]:
    candidates = (
        Candidate("16", rejected_because="four times the table entries, and prefixes are shared in units of 64 tokens"),
        Candidate("64"),
        Candidate(
            "128", rejected_because="on a CPU rows are read through the cache: a larger page only wastes its tail"
        ),
    )
    return 64, Decision("page-size", "64", "equals the unit of prefix sharing", candidates=candidates, unit="tokens")


def _batch_tokens(profile: Profile, model: ModelConfig, road: Road, limits: Limits) -> tuple[int, Decision]:
    """A prefill chunk should cost about as much as two dozen decode steps at most, so that nobody's stream stalls long."""
    target_seconds = limits.latency_target_seconds or _CHUNK_SECONDS
    rate = matrix_rate(profile, road) / (2.0 * model.num_parameters)
    tokens = 64
    while tokens * 2 <= min(rate * target_seconds, 512):
        tokens *= 2
    return tokens, Decision(
        "step-tokens",
        str(tokens),
        f"the largest power of two whose prefill takes under {target_seconds} s, at most 512",
        inputs=profile_inputs(profile, rate_name(profile, road)),
        predicted=tokens / rate,
        unit="s",
    )


def _num_seqs(limits: Limits) -> tuple[int, Decision]:
    chosen = limits.max_num_seqs or 64
    reason = (
        "asked for" if limits.max_num_seqs else "past 64 a CPU step grows with the batch and every stream slows down"
    )
    return chosen, Decision("max-seqs", str(chosen), reason)


def _blocks(
    profile: Profile,
    model: ModelConfig,
    road: Road,
    limits: Limits,
    page_size: int,
    context: int,
    kv_token_bytes: int,
    workspace: int,
    num_seqs: int,
) -> tuple[int, tuple[MemoryLine, ...], Decision]:
    free = need(profile, "memory.free")
    share = limits.memory_utilization if limits.memory_utilization is not None else 0.5
    budget = free * share
    fixed = road.weight_bytes + workspace + _FIXED_BYTES
    block_bytes = page_size * kv_token_bytes
    # Enough for every sequence at a usual length, or for one at full length; more only costs resident memory.
    wanted = max(-(-context // page_size), num_seqs * -(-1024 // page_size)) + 1
    most = int((budget - fixed) // block_bytes)
    if limits.memory_utilization is None:
        wanted = min(wanted, max(int((512 << 20) // block_bytes), -(-context // page_size) + 1))
    chosen = min(wanted, most)
    fewest = max(3, -(-context // page_size) + 1 if limits.max_context_tokens else 0)
    if chosen < fewest:
        parts = (
            Part("weights", road.weight_bytes, ("weights",)),
            Part("kv", fewest * block_bytes, ("context",) if limits.max_context_tokens else ()),
            Part("workspace", workspace, ("sequences",)),
            Part("libraries", _FIXED_BYTES),
        )
        missing = MemoryNeed(model.name, parts, context, num_seqs, share, kv_token_bytes)
        changes = cheapest_changes(missing, int(free), Options(cpu_formats(model), known_models()))
        raise PlanError(shortage_text(missing, int(free), profile.device.name, changes), changes)
    memory = (
        MemoryLine("weights", road.weight_bytes),
        MemoryLine("kv", chosen * block_bytes),
        MemoryLine("workspace", workspace),
        MemoryLine("libraries", _FIXED_BYTES),
        MemoryLine("margin", max(int(budget) - fixed - chosen * block_bytes, 0)),
    )
    reason = (
        "memory-bound" if chosen == most < wanted else "one full context, or 1,024 tokens a sequence, within 512 MiB"
    )
    decision = Decision(
        "kv-blocks",
        str(chosen),
        reason,
        inputs=profile_inputs(profile, "memory.free"),
        predicted=chosen * block_bytes,
        unit="bytes",
    )
    return chosen, memory, decision
