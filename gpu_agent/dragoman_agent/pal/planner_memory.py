"""Where a GPU's memory goes: weights, graphs, workspace, context, KV blocks, margin; and whether KV is worth moving. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import pal_off
from dragoman_agent.pal.changes import Growth, MemoryNeed, Options, Part, bytes_text, cheapest_changes, shortage_text
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.limits import Limits, PlanError, need, optional, profile_inputs
from dragoman_agent.pal.needs import known_models
from dragoman_agent.pal.plan import DecodeAttention, DecodeList, MemoryLine, decode_for, mixed_decode, mixed_graph_sizes
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import Rates
from dragoman_agent.pal.switches import Switches

DEFAULT_UTILIZATION = 0.9  # of free memory: the rest covers fragmentation and what the driver takes later
MIN_NUM_BLOCKS = 3  # the null block, and two that a sequence can grow through
_CONTEXT_BYTES = 256 << 20  # code of the kernels and libraries' workspaces
_CONTEXT_BYTES_A_MULTIPROCESSOR = 6 << 20  # stacks and heaps; with the above 1 GiB on an H200, which was enough there
_SCORED_ROWS = (
    64  # of logits that torch scores or kernels edit at once, see device/torch_steps.py and device/cuda_redraw.py
)
_SCORED_BYTES = (
    60  # a logit of those rows: edited copies and candidates of filters, which are kept; copies, exponentials, order
)
_TOKEN_WORDS = 5  # int32 of metadata a token of a step
_ITEM_WORDS = 8  # int32 of an item of decode attention's work list


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything but KV."""

    weights: int
    graphs: int
    workspace: int
    context: int

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.weights + self.graphs + self.workspace + self.context


def workspace_bytes(
    model: ModelConfig,
    attention: tuple[DecodeAttention, ...],
    batch_tokens: int,
    num_seqs: int,
    context: int,
    page: int,
    mixed_graphs: tuple[int, ...],
    lists: tuple[DecodeList, ...] = (),
    *,
    deterministic: bool,
) -> int:
    """Buffers of a step: activations of a whole chunk, logits and sampling, parts of attention, tables, work list and rotation."""
    activations = batch_tokens * token_bytes(model)
    sampling = num_seqs * model.vocab_size * 2 + min(num_seqs, _SCORED_ROWS) * model.vocab_size * _SCORED_BYTES
    batches = {*(min(one.max_batch, num_seqs) for one in attention), num_seqs}
    parts = max(batch * decode_for(attention, batch).num_splits for batch in batches)
    mixed = {seqs for _, seqs in mixed_graph_sizes(mixed_graphs, num_seqs)}
    parts = max(
        parts, *(seqs * mixed_decode(attention, seqs, deterministic=deterministic).num_splits for seqs in mixed), 0
    )
    items = max((one.num_items for one in lists), default=0)
    parts = max(parts, items)  # an item is a part
    partial = 4 * parts * model.num_heads * (model.head_dim + 1)
    tables = 4 * (2 * num_seqs * (-(-context // page) + 1) + _TOKEN_WORDS * batch_tokens)
    work = 4 * items * (_ITEM_WORDS + model.num_kv_heads)  # and a count of what has arrived, an item and KV head
    return activations + sampling + partial + tables + work + 4 * context * model.head_dim


def token_bytes(model: ModelConfig) -> int:
    """Activations of one token of a step, in two bytes a value."""
    return 2 * (3 * model.intermediate_size + 8 * model.hidden_size + 3 * model.num_heads * model.head_dim)


def sequence_bytes(model: ModelConfig) -> int:
    """Workspace of one sequence: its logits, scratch where few are sampled at once, and two tokens of the step."""
    return model.vocab_size * (2 + _SCORED_BYTES) + 2 * token_bytes(model)


def spare_bytes(profile: Profile, model: ModelConfig, limits: Limits, rates: Rates) -> float:
    """What may be used beside weights and context; 0 where they alone are too much."""
    share = limits.memory_utilization if limits.memory_utilization is not None else DEFAULT_UTILIZATION
    return max(need(profile, "memory.free") * share - 2 * model.num_parameters - context_bytes(rates), 0.0)


def context_bytes(rates: Rates) -> int:
    """What CUDA and its libraries hold beside our own buffers."""
    return _CONTEXT_BYTES + rates.num_multiprocessors * _CONTEXT_BYTES_A_MULTIPROCESSOR


def choose_blocks(
    profile: Profile, model: ModelConfig, limits: Limits, switches: Switches, sizes: Sizes, page: int, context: int, num_seqs: int
) -> tuple[int, tuple[MemoryLine, ...], Decision]:  # fmt: skip
    """KV blocks and the budget line by line. Raises PlanError with the cheapest changes where it does not fit."""
    free = int(need(profile, "memory.free"))
    share = limits.memory_utilization if limits.memory_utilization is not None else DEFAULT_UTILIZATION
    block_bytes = page * model.kv_bytes_per_token
    off = switches.reason("arena")
    room = int(free * share) - sizes.total
    if off and limits.memory_utilization is None:
        room = min(int((free - sizes.weights) * pal_off.KV_SHARE), free - sizes.total)
    chosen = max(room // block_bytes, 0)
    fewest = max(MIN_NUM_BLOCKS, -(-context // page) + 1 if limits.max_context_tokens else 0)
    if chosen < fewest:
        raise _does_not_fit(profile, model, limits, sizes, fewest * block_bytes, context, num_seqs, free, share)
    kv = chosen * block_bytes
    lines = (
        ("weights", sizes.weights), ("kv", kv), ("graphs", sizes.graphs), ("workspace", sizes.workspace),
        ("context", sizes.context), ("margin", free - sizes.total - kv),
    )  # fmt: skip
    asked = "asked for" if limits.memory_utilization is not None else "the rest is for fragmentation and the driver"
    reason = off or f"what {share:.0%} of free memory ({asked}) leaves beside weights, graphs, workspace and context"
    inputs = profile_inputs(profile, "memory.free", "compute.multiprocessors")
    decision = Decision("kv-blocks", f"{chosen}", reason, inputs, predicted=float(kv), unit="bytes")
    return chosen, tuple(MemoryLine(*line) for line in lines), decision


def choose_prefetch(
    profile: Profile, model: ModelConfig, prefill_rate: float, switches: Switches
) -> tuple[bool, list[Decision]]:
    """Whether KV kept on the host is brought back by the link rather than computed again, and ahead of its use.

    A token's KV takes bytes / link rate to move and 1 / prefill rate to compute.
    """
    off = switches.reason("link_policy") or switches.reason("async_copy")
    rate = optional(profile, "link.h2d_pinned")
    if off or rate is None:
        reason = off or "the profile has no link.h2d_pinned: an unmeasured link is not relied on"
        return False, [Decision("offload", "no", reason), Decision("prefetch", "no", reason)]
    copied, computed = model.kv_bytes_per_token / rate, 1 / prefill_rate
    moves = copied < computed
    candidates = (
        Candidate("no", computed, "computing again takes longer" if moves else ""),
        Candidate("yes", copied, "" if moves else "the link takes longer than computing again"),
    )
    inputs = profile_inputs(profile, "link.h2d_pinned", "compute.matmul_bfloat16")
    offload = (
        f"a token's KV ({bytes_text(model.kv_bytes_per_token)}) crosses the link in {1e6 * copied:.2f} us and is computed in "
        f"{1e6 * computed:.2f} us"
    )
    engines = optional(profile, "compute.async_engines")
    prefetch = moves and (engines is None or engines >= 1)
    why = (
        "copies run beside computation, so what is certain to be used is fetched before its step"
        if prefetch
        else offload
    )
    word = "yes" if moves else "no"
    return prefetch, [
        Decision("offload", word, offload, inputs, candidates, min(copied, computed), unit="s"),
        Decision("prefetch", "yes" if prefetch else "no", why, inputs, (), copied, unit="s"),
    ]


def _does_not_fit(
    profile: Profile,
    model: ModelConfig,
    limits: Limits,
    sizes: Sizes,
    kv_bytes: int,
    context: int,
    num_seqs: int,
    free: int,
    share: float,
) -> PlanError:
    kv_grows: tuple[Growth, ...] = ("context",) if limits.max_context_tokens else ()
    parts = (
        Part("weights", sizes.weights, ("weights",)),
        Part("kv", kv_bytes, kv_grows),
        Part("graphs", sizes.graphs),
        Part("workspace", sizes.workspace, ("sequences",)),
        Part("context", sizes.context),
    )
    wanted = MemoryNeed(model.name, parts, context, num_seqs, share, model.kv_bytes_per_token)
    changes = cheapest_changes(wanted, free, Options(models=known_models()))
    return PlanError(shortage_text(wanted, free, profile.device.name, changes), changes)
