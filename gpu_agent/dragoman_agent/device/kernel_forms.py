"""Every form in which a plan's steps launch our Triton kernels: what is compiled before the first step. Pure, needs no PyTorch.

A form is what makes a binary: types, alignment and constants. Counts that change from step to step make none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.plan import KV_FLOAT8, Plan, mixed_graph_sizes
from dragoman_agent.pal.step_cost import matrices

MIN_TILE_ROWS = 8  # of the product of few rows, whose tiles are powers of two
# How long each takes to compile with its launcher, so that the longest come first: seconds on one core of a server with an H200,
# but for the two of a fixed order and the few-row product, which are guesses.
_SECONDS = {
    "fixed-attention": 3.0,
    "prefill": 2.3,
    "decode": 0.9,
    "listed": 1.1,
    "filters": 4.2,
    "sample": 1.2,
    "edits": 1.2,
    "gemm": 0.8,
    "fixed-gemm": 1.0,
    "rope": 0.4,
}
_OTHER_SECONDS = 0.3
_PARTS = {"filters": 5, "sample": 3, "edits": 3}  # kinds of several kernels, which need not wait for each other
_OF_PROMPTS = ("rope", "prefill", "fixed-attention")  # kinds that K and V pass through in a step of prompts


@dataclass(frozen=True, slots=True)
class Form:
    """One launch. `sizes` and `dependent` are the launcher's arguments by kind; see precompile.py."""

    kind: str
    sizes: tuple[int, ...] = ()
    dependent: bool = False  # as a kernel that may start before the one before it has ended
    flag: bool = False  # norm: with a residual; gemm: with a bias; decode: with groups of sequences
    wide: bool = False  # over K and V in sixteen bits, in a plan that keeps them in eight
    part: int = 0  # of `num_parts`: the kernels that are launched as number `part`, `part + num_parts` and so on
    num_parts: int = 1

    @property
    def seconds(self) -> float:
        """To compile it, roughly."""
        return _SECONDS.get(self.kind, _OTHER_SECONDS) / self.num_parts


def forms_of(model: ModelConfig, plan: Plan) -> list[Form]:
    """Each once, the longest to compile first."""
    sizes = [size for size in plan.graph_batch_sizes if size <= plan.max_num_seqs]
    found = [*_common(model, dependent=False), Form("unpack"), Form("resolve"), Form("driver")]
    found += (Form("filters", (model.vocab_size,)), Form("edits", (model.vocab_size,)))
    if any(size <= plan.dependent_max_batch for size in sizes):
        found += _common(model, dependent=True)
    if plan.deterministic:
        found += _in_fixed_order(model, plan)
    else:
        found += _attention(plan, sizes)
        found += _products(model, plan, sizes)
    if plan.kv_dtype == KV_FLOAT8:  # scales are found on a prompt whose K and V are as they come
        found += [replace(form, wide=True) for form in found if form.kind in _OF_PROMPTS and not form.dependent]
    return sorted(dict.fromkeys(one for form in found for one in _parts(form)), key=lambda form: -form.seconds)


def _parts(form: Form) -> list[Form]:
    num_parts = _PARTS.get(form.kind, 1)
    return [replace(form, part=part, num_parts=num_parts) for part in range(num_parts)]


def shares(forms: Sequence[Form], count: int) -> list[list[Form]]:
    """Of so many workers, which then take about as long: each form, the longest first, goes to who has least to do."""
    found: list[list[Form]] = [[] for _ in range(count)]
    for form in forms:
        min(found, key=lambda own: sum(one.seconds for one in own)).append(form)
    return found


def _common(model: ModelConfig, *, dependent: bool) -> Iterator[Form]:
    for flag in (False, True):
        yield Form("norm", (model.hidden_size,), dependent, flag)
    yield Form("silu", (model.intermediate_size,), dependent)
    yield Form("rope", (model.num_heads, model.num_kv_heads, model.head_dim), dependent)
    yield Form("sample", (model.vocab_size,), dependent)


def _attention(plan: Plan, sizes: list[int]) -> Iterator[Form]:
    """Beside prompts every bucket runs as in no graph, so never as a dependent launch."""
    captured = {
        (size <= plan.dependent_max_batch, plan.groups_for(size) is not None, plan.decode_for(size))
        for size in sizes
        if plan.list_for(size) is None
    }
    # Without groups and not early: what is captured so, and every bucket beside prompts.
    plain = {(False, False, one) for one in plan.decode_attention}
    for early, grouped, one in sorted(captured | plain, key=lambda form: (*form[:2], form[2].max_batch)):
        yield Form("decode", (one.num_splits, one.block_n, one.num_stages, one.num_warps), early, grouped)
    yield from _by_lists(plan, sizes)
    for own in plan.prefill_forms.all if plan.prefill_forms is not None else ():
        yield Form("prefill", (own.block_m, own.block_n, own.num_stages, own.num_warps, int(own.tma)))


def _by_lists(plan: Plan, sizes: list[int]) -> Iterator[Form]:
    """The list and attention by it: in graphs of decode, and not early beside prompts, in graphs or none."""
    beside = {
        launch
        for one in plan.decode_lists
        for launch in (plan.decode_for(num) for num in range(one.min_batch, one.max_batch + 1))
    }
    mixed = {seqs for _, seqs in mixed_graph_sizes(plan.captured_tokens, plan.max_num_seqs)}
    beside |= {plan.mixed_decode(seqs) for seqs in mixed if plan.list_for(seqs) is not None}
    forms = {(False, launch) for launch in beside}
    forms |= {(size <= plan.dependent_max_batch, plan.decode_for(size)) for size in sizes if plan.list_for(size)}
    for early, one in sorted(forms, key=lambda form: (form[0], form[1].max_batch)):
        yield Form("list", (plan.max_num_listed, one.block_n), early)
        yield Form("listed", (one.block_n, one.num_stages, one.num_warps), early)


def _products(model: ModelConfig, plan: Plan, sizes: list[int]) -> Iterator[Form]:
    """Each entry at every tile that its numbers of rows take; in a step with prompts there may be any number of rows."""
    dependent = {max(size, plan.min_gemm_rows) for size in sizes if size <= plan.dependent_max_batch}
    last: dict[tuple[int, int], int] = {}
    for one in plan.gemm_decode:
        fewest = last.get((one.n, one.k), 0) + 1
        last[one.n, one.k] = one.max_rows
        rows = range(fewest, one.max_rows + 1)
        launch = (one.block_n, one.block_k, one.num_stages, one.num_warps)
        for bias in _biases(model, one.n, one.k):
            for early, counts in ((False, set(rows)), (True, dependent & set(rows))):
                for tile in {_tile(count) for count in counts}:
                    yield Form("gemm", (one.n, one.k, tile, *launch), early, bias)


def _in_fixed_order(model: ModelConfig, plan: Plan) -> Iterator[Form]:
    """One tile a matrix and one of attention, whatever the step."""
    own = plan.prefill_attention
    if own is not None:
        launch = (own.block_m, own.block_n, own.num_stages, own.num_warps)
        yield Form("fixed-attention", (*launch, plan.attention_part_tokens))
    for one in plan.gemm_fixed:
        tile = (one.block_m, one.block_n, one.block_k, one.num_stages, one.num_warps)
        for bias in _biases(model, one.n, one.k):
            yield Form("fixed-gemm", (one.n, one.k, *tile), flag=bias)


def _tile(rows: int) -> int:
    return max(MIN_TILE_ROWS, 1 << (rows - 1).bit_length())


def _biases(model: ModelConfig, n: int, k: int) -> set[bool]:
    """Whether products of this size have a bias: matrices of one size may differ in it."""
    qkv, out, up, down = matrices(model)
    of = [(qkv, model.attention_bias), (out, model.attention_output_bias), (up, False), (down, False)]
    of.append(((model.vocab_size, model.hidden_size), False))
    return {bias for size, bias in of if size == (n, k)}
