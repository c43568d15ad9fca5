"""The plan of a CUDA device, put together from its choices. Pure, needs no device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import PROMPT_TOKENS
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.group_timing import GroupCase, group_cases
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.layer_timing import LayerCase, LayerChoices, layer_cases, layer_seconds
from dragoman_agent.pal.limits import Limits, PlanError, choose_context, need, optional, profile_inputs
from dragoman_agent.pal.list_timing import ListCase, list_cases
from dragoman_agent.pal.plan import (
    KV_FLOAT8,
    DecodeList,
    GemmDecode,
    GemmFixed,
    LibraryGemm,
    LibraryPrefill,
    Plan,
    PrefillForms,
    Reduction,
    ShortGroups,
)
from dragoman_agent.pal.planner_algorithms import choose_library_gemm
from dragoman_agent.pal.planner_attention import (
    DecodeChoice,
    Maker,
    choose_decode,
    choose_page,
    choose_reduction,
    fit_to_graphs,
    shared_bytes,
)
from dragoman_agent.pal.planner_batch import (
    StepShape,
    choose_gemm_decode,
    choose_gemm_rows,
    choose_graphs,
    choose_num_seqs,
    graph_bytes,
)
from dragoman_agent.pal.planner_chunk import Chunk, choose_chunk
from dragoman_agent.pal.planner_dependent import Dependent, choose_dependent_launch, has_dependent_launch
from dragoman_agent.pal.planner_fixed import choose_fixed_attention, choose_fixed_gemm, fixed_parts_bytes
from dragoman_agent.pal.planner_grouping import choose_grouping
from dragoman_agent.pal.planner_kv import choose_kv_dtype, kv_model
from dragoman_agent.pal.planner_library import choose_library_prefill
from dragoman_agent.pal.planner_lists import choose_lists
from dragoman_agent.pal.planner_long import one_launch
from dragoman_agent.pal.planner_memory import (
    Sizes,
    choose_blocks,
    choose_prefetch,
    context_bytes,
    workspace_bytes,
)
from dragoman_agent.pal.planner_mixed import MixedGraphs, choose_mixed_graphs, mixed_graph_bytes
from dragoman_agent.pal.planner_prefill import choose_prefill
from dragoman_agent.pal.planner_products import LayerQuestion, Products, choose_products
from dragoman_agent.pal.planner_steps import predict_cuda, step_decision
from dragoman_agent.pal.planner_tiers import copy_bytes, plan_tiers
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_kernels.triton.launches import FIXED_PART_TOKENS

_ROAD = "triton-bfloat16"
_FLOAT8 = "K and V are kept in eight bits, which our own kernels read"
_FLOAT8_FORMS = "K and V are kept in eight bits, in which launches were not compared by length"
_FLOAT8_GROUPS = "K and V are kept in eight bits, for which no groups were timed"
_FLOAT8_LISTS = "K and V are kept in eight bits, for which no work list was timed"
_FIXED = "deterministic: every kernel runs in one form, whatever the step"


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Everything chosen so far."""

    page_size: int
    context: int
    num_seqs: int
    gemm_rows: int
    gemm: tuple[GemmDecode, ...]
    dependent: Dependent
    decode: DecodeChoice
    groups: tuple[ShortGroups, ...]
    lists: tuple[DecodeList, ...]
    reduction: Reduction
    prefill: PrefillForms
    library: LibraryPrefill | None
    chunk: Chunk
    graphs: tuple[int, ...]
    mixed_graphs: MixedGraphs
    question: LayerQuestion
    gemm_library: tuple[LibraryGemm, ...] = ()
    gemm_fixed: tuple[GemmFixed, ...] = ()  # of a deterministic plan


def plan_cuda(
    profile: Profile,
    model: ModelConfig,
    limits: Limits,
    switches: Switches | None = None,
    timings: Timings | None = None,
) -> tuple[Plan, list[Decision]]:
    """The plan in bfloat16. Raises PlanError where there is none, naming what is missing."""
    switches = switches or Switches()
    times = KernelTimes(rates_of(profile), timings)
    kv_dtype, kv_decision = choose_kv_dtype(profile, model, limits)
    model = kv_model(model, kv_dtype)
    chosen, shape, decisions = _choose(profile, model, limits, switches, times, timings)
    shared, shared_decision = _shared_memory(profile, model, chosen)
    step_model = predict_cuda(
        shape, chosen.prefill, chosen.graphs, chosen.chunk.alone, chosen.library, chosen.mixed_graphs
    )
    prefetch, moving = choose_prefetch(profile, model, step_model.prefill_tokens_per_second, switches)
    offload = moving[0].chosen == "yes"
    sizes = _sizes(model, times, chosen, copy_bytes(limits, offload=offload))
    num_blocks, memory, blocks = choose_blocks(
        profile, model, limits, switches, sizes, chosen.page_size, chosen.context, chosen.num_seqs
    )
    block_bytes = chosen.page_size * model.kv_bytes_per_token
    tiers = plan_tiers(limits, block_bytes, num_blocks * block_bytes, moving[0].reason, offload=offload)
    plan = Plan(
        device_kind="cuda",
        model_name=model.name,
        page_size=chosen.page_size,
        num_blocks=num_blocks,
        max_context_tokens=min(chosen.context, (num_blocks - 1) * chosen.page_size),
        max_batch_tokens=chosen.chunk.alone,
        max_num_seqs=chosen.num_seqs,
        max_num_waiting=limits.max_num_waiting,
        num_threads=1,
        road=_ROAD,
        kv_dtype=kv_dtype,
        memory=(*memory, *tiers.lines),
        step_model=step_model,
        graph_batch_sizes=chosen.graphs,
        mixed_graph_tokens=chosen.mixed_graphs.tokens,
        chunk_graph=bool(chosen.mixed_graphs.full),
        company_tokens=chosen.chunk.company if chosen.chunk.company < chosen.chunk.alone else 0,
        device_index=profile.device.index,
        decode_attention=chosen.decode.attention,
        short_groups=chosen.groups,
        decode_lists=chosen.lists,
        prefill_attention=chosen.prefill.usual,
        long_prefill=chosen.prefill.long,
        library_prefill=chosen.library,
        min_gemm_rows=chosen.gemm_rows,
        gemm_decode=chosen.gemm,
        library_gemm=chosen.gemm_library,
        dependent_max_batch=chosen.dependent.max_batch,
        burst=chosen.decode.burst,
        reduction=chosen.reduction,
        shared_memory_bytes=shared,
        deterministic=limits.deterministic,
        gemm_fixed=chosen.gemm_fixed,
        attention_part_tokens=FIXED_PART_TOKENS if limits.deterministic else 0,
        prefetch=prefetch,
        kv_host_bytes=tiers.host_bytes,
        kv_disk_bytes=tiers.disk_bytes,
        kv_link_bytes_per_second=(not switches.reason("link_policy") and optional(profile, "link.h2d_pinned")) or 0.0,
    )
    step = step_decision(profile, times, step_model)
    return plan, [kv_decision, *decisions, shared_decision, blocks, *moving, *tiers.decisions, step]


def wanted_layers(
    profile: Profile, model: ModelConfig, limits: Limits, switches: Switches, timings: Timings
) -> list[LayerCase]:
    """Chains of layers that would settle what single kernels' times do not, each once: those of the products first asked
    about, then those of dependent launch with the products that `timings` choose. Raises PlanError as `plan_cuda` does.
    """
    chosen, _, _ = _choose(profile, model, limits, switches, KernelTimes(rates_of(profile), timings), timings)
    choices = LayerChoices(chosen.page_size, chosen.decode.attention, chosen.gemm_rows, chosen.gemm)
    cases = [*chosen.question.cases(), *layer_cases(model, choices, chosen.num_seqs)]
    return list({case.key: case for case in cases}.values())


def wanted_groups(
    profile: Profile, model: ModelConfig, limits: Limits, switches: Switches, timings: Timings
) -> list[GroupCase]:
    """Planned launches of decode attention with and without groups of short sequences; none where the plan must have none.
    Raises PlanError as `plan_cuda` does.
    """
    if not _may_differ(profile, model, limits):
        return []
    chosen, _, _ = _choose(profile, model, limits, switches, KernelTimes(rates_of(profile), timings), timings)
    return list(group_cases(model, chosen.page_size, chosen.decode.attention, chosen.num_seqs))


def wanted_lists(
    profile: Profile, model: ModelConfig, limits: Limits, switches: Switches, timings: Timings
) -> list[ListCase]:
    """Planned launches of decode attention with and without a work list; none where the plan must have none. Raises PlanError
    as `plan_cuda` does.
    """
    if not _may_differ(profile, model, limits):
        return []
    times = KernelTimes(rates_of(profile), timings)
    chosen, _, _ = _choose(profile, model, limits, switches, times, timings)
    return list(list_cases(model, chosen.page_size, chosen.decode.attention, chosen.num_seqs))


def _may_differ(profile: Profile, model: ModelConfig, limits: Limits) -> bool:
    """Whether the plan may have other forms of decode attention than its launches."""
    return not limits.deterministic and choose_kv_dtype(profile, model, limits)[0] != KV_FLOAT8


def _choose(
    profile: Profile,
    model: ModelConfig,
    limits: Limits,
    switches: Switches,
    times: KernelTimes,
    timings: Timings | None,
) -> tuple[_Chosen, StepShape, list[Decision]]:
    """Every choice but memory, in the order in which each needs the ones before."""
    off, tuning_off = switches.reason("pal") if not switches.pal else None, switches.reason("launch_tuning")
    context, context_decision = choose_context(model, limits)
    num_seqs, seqs_decision = choose_num_seqs(times, model, limits, profile, off)
    kv_bytes = max(need(profile, "memory.free") - 2 * model.num_parameters, 1.0)
    demand = num_seqs * min(PROMPT_TOKENS, model.max_context_tokens) * model.kv_bytes_per_token / kv_bytes
    maker = Maker(profile, model, times, num_seqs, demand)
    page_size, page_decision = choose_page(maker, off)
    decode, decode_decisions = choose_decode(maker, page_size, tuning_off)
    rows, rows_decision = choose_gemm_rows(times, model, profile, tuning_off)
    gemm, gemm_decision = choose_gemm_decode(times, model, profile, tuning_off)
    alone = Products(rows, gemm)
    early = has_dependent_launch(profile)
    question = LayerQuestion(model, page_size, decode.attention, alone, num_seqs, early)
    if not tuning_off:
        products, told = choose_products(question, timings, (rows_decision, gemm_decision))
        (rows, gemm), (rows_decision, gemm_decision) = (products.min_rows, products.gemm), told
    gemm_fixed: tuple[GemmFixed, ...] = ()
    fixed = _FIXED if limits.deterministic else None
    float8 = _FLOAT8 if model.kv_item_bytes == 1 else None
    one_form = _FLOAT8_FORMS if float8 else None
    prefill, prefill_decisions = choose_prefill(maker, page_size, context, tuning_off, one_form)
    if limits.deterministic:
        rows, rows_decision, gemm = 1, Decision("gemm-rows", "1", _FIXED, unit="rows"), ()
        gemm_fixed, gemm_decision = choose_fixed_gemm(times, profile, model, tuning_off)
        buckets, attention, prefill_decision = choose_fixed_attention(profile, model, page_size, num_seqs, context)
        prefill, prefill_decisions = PrefillForms(attention), [prefill_decision, one_launch(_FIXED)]
        decode = DecodeChoice(buckets, burst=False)
        decode_decisions = [Decision("decode-attention", "", prefill_decision.reason), Decision("burst", "no", _FIXED)]
    shape = StepShape(model, times, page_size, decode.attention, rows, gemm_fixed or gemm)
    library, library_decision = choose_library_prefill(
        maker, page_size, context, prefill, tuning_off or fixed or float8
    )
    chunk, chunk_decisions = choose_chunk(shape, prefill, num_seqs, limits, profile, off, library)
    algorithms, algorithms_decision = choose_library_gemm(times, model, profile, chunk.alone, tuning_off or fixed)
    graphs, graphs_decision = choose_graphs(shape, num_seqs, kv_bytes, profile, tuning_off)
    decode, decode_decisions = fit_to_graphs(decode, graphs, decode_decisions)
    groups, groups_decision = choose_grouping(
        profile, model, page_size, decode.attention, num_seqs, timings,
        tuning_off or fixed or (_FLOAT8_GROUPS if float8 else None),
    )  # fmt: skip
    lists, lists_decision = choose_lists(
        profile, model, page_size, decode.attention, num_seqs, groups, timings, shape.seconds,
        tuning_off or fixed or (_FLOAT8_LISTS if float8 else None),
    )  # fmt: skip
    reduction, reduction_decision = choose_reduction(maker, page_size, decode.attention[0], tuning_off)
    timed = layer_seconds(timings, model, LayerChoices(page_size, decode.attention, rows, gemm), num_seqs)
    dependent, dependent_decision = choose_dependent_launch(profile, model, timed, tuning_off or fixed)
    shape = replace(shape, attention=decode.attention, dependent_gains=dependent.gains)
    mixed, mixed_decision = choose_mixed_graphs(shape, prefill, library, chunk, num_seqs, kv_bytes, profile, tuning_off)
    matmul = "matrix products in one order" if limits.deterministic else "the library's matrix products"
    decisions = [
        Decision("road", _ROAD, f"our Triton kernels and {matmul}, weights in bfloat16"),
        page_decision, context_decision, seqs_decision, *decode_decisions, groups_decision, lists_decision, *prefill_decisions, library_decision, rows_decision,
        gemm_decision, algorithms_decision, dependent_decision, *chunk_decisions, graphs_decision, mixed_decision, reduction_decision,
    ]  # fmt: skip
    return (
        _Chosen(
            page_size,
            context,
            num_seqs,
            rows,
            gemm,
            dependent,
            decode,
            groups,
            lists,
            reduction,
            prefill,
            library,
            chunk,
            graphs,
            mixed,
            question,
            algorithms,
            gemm_fixed,
        ),
        shape,
        decisions,
    )


def _sizes(model: ModelConfig, times: KernelTimes, chosen: _Chosen, copies: int) -> Sizes:
    workspace = workspace_bytes(
        model,
        chosen.decode.attention,
        chosen.chunk.alone,
        chosen.num_seqs,
        chosen.context,
        chosen.page_size,
        chosen.mixed_graphs.captured,
        chosen.lists,
        deterministic=bool(chosen.gemm_fixed),
    )
    if chosen.gemm_fixed:
        workspace += fixed_parts_bytes(model, chosen.decode.attention, chosen.num_seqs, chosen.context)
    return Sizes(
        weights=2 * model.num_parameters,
        graphs=graph_bytes(model, chosen.graphs)
        + mixed_graph_bytes(model, chosen.mixed_graphs.captured, chosen.num_seqs, chosen.library, chosen.prefill.long),
        workspace=workspace + copies,
        context=context_bytes(times.rates),
    )


def _shared_memory(profile: Profile, model: ModelConfig, chosen: _Chosen) -> tuple[int, Decision]:
    """Shared memory of the largest block. Raises PlanError where a fixed configuration needs more than the device has."""
    rates = rates_of(profile)
    used = shared_bytes(model, chosen.decode, chosen.prefill, chosen.page_size, rates.capability)
    if used > rates.shared_per_block:
        raise PlanError(
            f"the fixed launches need {used} bytes of shared memory a block, {profile.name} has "
            f"{rates.shared_per_block} (memory.shared_per_block); leave out --pal off and --pal-launch-tuning off"
        )
    reason = f"the largest block of attention; {rates.shared_per_block} may be used"
    inputs = profile_inputs(profile, "memory.shared_per_block", "memory.shared_per_multiprocessor")
    return used, Decision("shared-memory", f"{used}", reason, inputs, predicted=float(used), unit="bytes")
