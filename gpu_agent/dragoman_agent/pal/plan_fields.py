"""A plan as a flat list of named values: what protocol, command line and golden files show of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.pal.plan import Plan

Shown = float | int | str | bool | tuple[float, ...]
# Devices that have no kernels of their own to choose from; their plans leave those fields at the defaults.
_PLAIN_KINDS = ("cpu", "null")


@dataclass(frozen=True, slots=True)
class PlanField:
    """One value; `labels` name the entries of a list, `subject` the decision that chose it."""

    name: str
    value: Shown
    subject: str
    unit: str = ""
    labels: tuple[str, ...] = ()


def plan_fields(plan: Plan) -> list[PlanField]:
    """Every field of the plan that its kind of device has, in the order of reading."""
    fields = [
        PlanField("device_kind", plan.device_kind, "device"),
        PlanField("device_index", plan.device_index, "device"),
        PlanField("road", plan.road, "road"),
        PlanField("kv_dtype", plan.kv_dtype, "kv-dtype" if plan.device_kind == "cuda" else "road"),
        PlanField("page_size", plan.page_size, "page-size", "tokens"),
        PlanField("num_blocks", plan.num_blocks, "kv-blocks"),
        PlanField("max_context_tokens", plan.max_context_tokens, "max-context", "tokens"),
        PlanField("max_batch_tokens", plan.max_batch_tokens, "step-tokens", "tokens"),
        PlanField("max_num_seqs", plan.max_num_seqs, "max-seqs"),
        PlanField("max_num_waiting", plan.max_num_waiting, "max-waiting"),
    ]
    fields += [
        PlanField("kv_host_bytes", plan.kv_host_bytes, "host-tier", "bytes"),
        PlanField("kv_disk_bytes", plan.kv_disk_bytes, "disk-tier", "bytes"),
        PlanField("kv_link_bytes_per_second", plan.kv_link_bytes_per_second, "host-tier", "bytes/s"),
    ]
    if plan.device_kind == "cpu":
        fields.append(PlanField("num_threads", plan.num_threads, "threads"))
    if plan.device_kind not in _PLAIN_KINDS:
        fields.extend(_kernel_fields(plan))
    if plan.deterministic:
        fields.append(PlanField("deterministic", plan.deterministic, "deterministic"))
    if plan.switches_off:
        fields.append(PlanField("switches_off", ", ".join(plan.switches_off), "switches"))
    return fields


def _kernel_fields(plan: Plan) -> list[PlanField]:
    labels = tuple(str(bucket.max_batch) for bucket in plan.decode_attention)
    decode = "decode-attention"
    fields = [
        PlanField("company_tokens", plan.max_company_tokens, "company-tokens", "tokens"),
        PlanField("graph_batch_sizes", plan.graph_batch_sizes, "graphs"),
        PlanField("mixed_graph_tokens", plan.mixed_graph_tokens, "mixed-graphs", "tokens"),
        PlanField("chunk_graph", plan.chunk_graph, "mixed-graphs"),
        *(
            PlanField(
                f"decode_{name}", tuple(getattr(bucket, name) for bucket in plan.decode_attention), decode, "", labels
            )
            for name in ("num_splits", "block_n", "num_warps", "num_stages")
        ),
    ]
    return [
        *fields,
        *_batch_fields(plan),
        *_prefill_fields(plan),
        PlanField("min_gemm_rows", plan.min_gemm_rows, "gemm-rows"),
        PlanField(
            "gemm_decode",
            tuple(one.max_rows for one in plan.gemm_decode),
            "gemm-decode",
            "rows",
            tuple(
                f"{one.n}x{one.k}-n{one.block_n}-k{one.block_k}-g{one.num_stages}-w{one.num_warps}"
                for one in plan.gemm_decode
            ),
        ),
        PlanField(
            "library_gemm",
            tuple(one.rank + 1 for one in plan.library_gemm),
            "gemm-library",
            "place in the library's list",
            tuple(f"{one.n}x{one.k} from {one.min_rows} rows" for one in plan.library_gemm),
        ),
        *_fixed_fields(plan),
        PlanField("dependent_max_batch", plan.dependent_max_batch, "dependent-launch"),
        PlanField("burst", plan.burst, "burst"),
        PlanField("reduction", plan.reduction, "reduction"),
        PlanField("shared_memory_bytes", plan.shared_memory_bytes, "shared-memory", "bytes"),
        PlanField("prefetch", plan.prefetch, "prefetch"),
    ]


def _batch_fields(plan: Plan) -> list[PlanField]:
    """Of decode batches whose attention differs from its launch."""
    groups, lists = plan.short_groups, plan.decode_lists
    return [
        PlanField(
            "short_groups",
            tuple(one.rows for one in groups),
            "attention-grouping",
            "sequences a program",
            tuple(f"{one.min_batch}-{one.max_batch}" for one in groups),
        ),
        PlanField(
            "decode_lists",
            tuple(one.num_items for one in lists),
            "decode-work-list",
            "items",
            tuple(f"{one.min_batch}-{one.max_batch}" for one in lists),
        ),
    ]


def _prefill_fields(plan: Plan) -> list[PlanField]:
    """Of each way in which prompts may be attended."""
    fields: list[PlanField] = []
    if plan.prefill_attention is not None:
        fields.extend(
            PlanField(f"prefill_{name}", getattr(plan.prefill_attention, name), "prefill-attention")
            for name in ("variant", "block_m", "block_n", "num_warps", "num_stages")
        )
        if plan.prefill_attention.tma:
            fields.append(PlanField("prefill_tma", True, "prefill-attention"))
    if plan.long_prefill is not None:
        own = plan.long_prefill
        fields.extend(
            PlanField(f"long_prefill_{name}", getattr(own.attention, name), "long-prefill")
            for name in ("block_m", "block_n", "num_warps", "num_stages", "tma")
        )
        fields.extend(
            PlanField(f"long_prefill_{name}", getattr(own, name), "long-prefill", "tokens")
            for name in ("min_tokens", "min_context_tokens", "many_tokens")
        )
    if plan.library_prefill is not None:
        fields.extend(
            PlanField(f"library_prefill_{name}", value, "library-prefill", unit)
            for name, value, unit in (
                ("library", plan.library_prefill.library, ""),
                ("min_tokens", plan.library_prefill.min_tokens, "tokens"),
                ("max_num_seqs", plan.library_prefill.max_num_seqs, ""),
            )
        )
    return fields


def _fixed_fields(plan: Plan) -> list[PlanField]:
    """What only a deterministic plan has."""
    if not plan.gemm_fixed:
        return []
    tiles = tuple(
        f"m{one.block_m}-n{one.block_n}-k{one.block_k}-g{one.num_stages}-w{one.num_warps}" for one in plan.gemm_fixed
    )
    return [
        PlanField(
            "gemm_fixed",
            tuple(one.max_rows for one in plan.gemm_fixed),
            "gemm-decode",
            "rows",
            tuple(f"{one.n}x{one.k}-{tile}" for one, tile in zip(plan.gemm_fixed, tiles, strict=True)),
        ),
        PlanField("attention_part_tokens", plan.attention_part_tokens, "prefill-attention", "tokens"),
    ]
