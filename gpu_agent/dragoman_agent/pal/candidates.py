"""Shortlists of what a plan chooses among, best predicted first, and the kernel calls worth timing for them. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.kernel_calls import Config, KernelCall, KernelKind, predicted_seconds
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.plan import MAX_LIBRARY_ALGORITHMS, DecodeAttention, Plan, PrefillAttention, seen_tokens
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import (
    DECODE_SPLITS,
    GEMM_LAUNCHES,
    MAX_PLAIN_WARPS,
    decode_launches,
    fixed_gemm_launches,
    prefill_launches,
    tma_prefill_launches,
    ws_prefill_launches,
)

PAGE_SIZES = (16, 64, 128)  # each divides a unit of prefix sharing or is a multiple of it
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # upper ends of the buckets of decode attention
CONTEXTS = (256, 1024, 4096)  # that a launch is judged by: a chat, a document, a long one
PROMPT_TOKENS = 1024  # of a usual prompt
MANY_PROMPTS = 16  # of a step that fills the device with prompts
GEMM_ROWS = (1, 8)  # rows that a product may be padded to: none, and the short side of a tensor core product
FEW_ROWS = (8, 16, 32, 64)  # up to which a matrix may be multiplied by the kernel of few rows
LIBRARY_GEMM_RANKS = range(MAX_LIBRARY_ALGORITHMS)  # of its answer, all of which are tried
FIXED_GEMM_ROWS = (1, 32, 256, 2048)  # that tiles of a deterministic plan are judged by
_MAX_SHORTLIST = 8
_NUM_BEHIND = 2  # launches by pointers that are tried at every point where there are others
_TWO_BYTES = 2  # a value of K or V
_MAX_WAVES = 8  # programs a multiprocessor, in parts of a context
_NUM_VARIED, _VARIED_BATCH = 2, 32  # launches that are tried with other numbers of parts, and up to which batch
_NEARLY = 1.02
_TIMED_ROWS = (1, 8, 32, 64, 96, 128, 192, 256)  # a library's time jumps where a tile is full
_TIMED_CHUNKS = (1024, 4096)
PREFILL_LONG_TOKENS = 2048  # of a chunk at the end of a long prompt, at which prefill launches are compared as well
_FEWER_LONG_TOKENS = (512, 1024)  # of such a chunk, rising: whether the launch for long contexts serves it is timed too
_BETWEEN_TOKENS = 2048  # of a prompt alone, at which the launches for short and for long contexts are compared
LIBRARY_CAPABILITY = (8, 0)  # from which on cuDNN has attention over pages
LIBRARY_TOKENS = (
    1024,
    2048,
    4096,
    8192,
)  # of a prompt in a step, at which a library's attention is compared with our own
LIBRARY_CONTEXT = 8192  # tokens with which they end: they alone, and behind others of a long prompt


class LibraryBand(NamedTuple):
    """Rows of steps that are taken to be like those at which the library's algorithms are compared."""

    min_rows: int
    max_rows: int  # 0: any number
    usual_rows: int

    def timed_rows(self, max_batch_tokens: int) -> int:
        """At which they are compared where no step has more tokens than that."""
        return min(self.usual_rows, max_batch_tokens)


# Of prompts beside streams, and of long prompts alone, whose products run into a card's power limit.
LIBRARY_BANDS = (LibraryBand(1536, 4095, 2048), LibraryBand(4096, 0, 8192))


@dataclass(frozen=True, slots=True)
class TuningCase:
    """One kernel call to time. `key` is its name in Timings: equal keys are equal work.

    `shape` by kind: decode-attention batch, context, num_heads, num_kv_heads, head_dim, page_size; prefill-attention
    the same with `tokens` for batch (one sequence whose last `tokens` are computed); gemm m, n, k (with a `config` by the
    kernel of few rows, without by the library); gemm-library the same, by one of the library's algorithms or its own choice; rms-norm,
    add-rms-norm and silu-mul tokens, width; rope-cache tokens, num_heads, num_kv_heads, head_dim; sample rows,
    vocab_size.
    """

    key: str
    kind: KernelKind
    shape: Mapping[str, int]
    config: Config
    predicted_seconds: float


def contexts_of(model: ModelConfig) -> tuple[int, ...]:
    """The contexts to judge by that the model can have."""
    return tuple(context for context in CONTEXTS if context <= model.max_context_tokens) or (model.max_context_tokens,)


def decode_shortlist(times: KernelTimes, model: ModelConfig, page_size: int, batch: int) -> list[DecodeAttention]:
    """At most 8 launches of decode attention for `batch` sequences: each launch with its best split, the best first, and
    the best two with other numbers of parts. Empty where no launch fits the device.
    """
    scored = []
    contexts = contexts_of(model)
    group = model.num_heads // model.num_kv_heads
    for launch in decode_launches(group, model.head_dim, page_size, times.rates.shared_per_block):
        options = {
            splits: _score(times, model, page_size, DecodeAttention(batch, splits, **asdict(launch)), batch, contexts)
            for splits in DECODE_SPLITS
            # Past that many programs more parts only add to the merge.
            if splits == 1 or batch * model.num_kv_heads * splits <= _MAX_WAVES * times.rates.num_multiprocessors
        }
        # The fewest among nearly equal ones: each more is work for the merge.
        splits = next(count for count, score in options.items() if score <= _NEARLY * min(options.values()))
        scored.append((options[splits], DecodeAttention(batch, splits, **asdict(launch))))
    scored = [entry for entry in scored if entry[0] < float("inf")]
    if not scored:
        return []
    # Scores within a hundredth are equal: the first in the table is then as good a guess as any.
    least = min(score for score, _ in scored)
    scored.sort(key=lambda entry: math.floor(100 * (entry[0] / least - 1)))
    best = [option for _, option in scored]
    near = [
        replace(option, num_splits=splits)
        for option in best[: _NUM_VARIED if batch <= _VARIED_BATCH else 0]
        for splits in _near_splits(option.num_splits)
    ]
    return [*best[: _MAX_SHORTLIST - len(near)], *near]


def _near_splits(splits: int) -> tuple[int, ...]:
    """Two other numbers of parts: how many are best is what a prediction tells least well."""
    near = (2, 4) if splits == 1 else (splits // 2, splits * 2)
    return tuple(other for other in near if other in DECODE_SPLITS)


def prefill_shortlist(times: KernelTimes, model: ModelConfig, page_size: int) -> list[PrefillAttention]:
    """The launches of prefill attention that fit the device, best predicted first; those by tensor descriptors behind the
    others, for nothing but a timing tells what they gain.
    """
    rates = times.rates
    sizes = (model.head_dim, page_size, rates.capability, rates.shared_per_block)
    has_two_bytes = model.kv_item_bytes == _TWO_BYTES
    by_descriptors = (*tma_prefill_launches(*sizes), *ws_prefill_launches(*sizes)) if has_two_bytes else ()
    options = [PrefillAttention("paged", **asdict(launch)) for launch in (*prefill_launches(*sizes), *by_descriptors)]
    tokens = min(PROMPT_TOKENS, model.max_context_tokens)

    def seconds(option: PrefillAttention) -> float:
        call = step_cost.prefill_attention_call(model, page_size, option, tokens, tokens)
        return predicted_seconds(rates, call)

    best = sorted((option for option in options if seconds(option) < float("inf")), key=seconds)
    return [*[one for one in best if not one.tma][:_MAX_SHORTLIST], *(one for one in best if one.tma)]


class PrefillPoint(NamedTuple):
    """Prompts of a step at which launches of prefill are compared."""

    tokens: int  # of each that are computed
    context: int  # of each
    num_prompts: int = 1

    def __str__(self) -> str:
        if self.num_prompts > 1:
            return f"{self.num_prompts} prompts of {self.tokens:,} tokens"
        return (
            f"a prompt of {self.tokens:,} tokens"
            if self.is_whole
            else f"the last {self.tokens:,} of {self.context:,} tokens"
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is before what is computed."""
        return self.tokens == self.context

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        return self.num_prompts * self.tokens

    @property
    def num_seen(self) -> int:
        """Keys that they see together."""
        return self.num_prompts * seen_tokens(self.tokens, self.context)

    def call(self, model: ModelConfig, page_size: int, option: PrefillAttention) -> KernelCall:
        """Attention of one layer by `option`."""
        if self.num_prompts > 1:
            return step_cost.prefill_batch_call(model, page_size, option, self.tokens, self.num_prompts)
        return step_cost.prefill_attention_call(model, page_size, option, self.tokens, self.context)


def prefill_points(max_context_tokens: int) -> list[PrefillPoint]:
    """What launches of prefill are compared at: a usual prompt, a part of a long one, many usual prompts at once."""
    usual = min(PROMPT_TOKENS, max_context_tokens)
    longest = min(LIBRARY_CONTEXT, max_context_tokens)
    long = PrefillPoint(min(PREFILL_LONG_TOKENS, longest), longest)
    return list(dict.fromkeys((PrefillPoint(usual, usual), long, PrefillPoint(usual, usual, MANY_PROMPTS))))


def fewer_long_points(max_context_tokens: int) -> list[PrefillPoint]:
    """Short parts of a long prompt, rising, at which the launch for long contexts is tried as well."""
    longest = min(LIBRARY_CONTEXT, max_context_tokens)
    return list(dict.fromkeys(PrefillPoint(min(tokens, longest), longest) for tokens in _FEWER_LONG_TOKENS))


def boundary_points(max_context_tokens: int) -> list[PrefillPoint]:
    """Where the launches for short and for long contexts are compared to find out from where on which is quicker; of them
    those of a library's prompts were timed for some launches alone.
    """
    alone = [
        PrefillPoint(tokens, context)
        for tokens, context in library_points(max_context_tokens)
        if tokens >= min(PREFILL_LONG_TOKENS, max_context_tokens)
    ]
    return list(dict.fromkeys((*prefill_points(max_context_tokens), *alone)))


def tuning_cases(profile: Profile, model: ModelConfig, plan: Plan) -> list[TuningCase]:
    """Every call worth timing for `plan`, each key once: the shortlists of its choices, then the rest of a step."""
    times = KernelTimes(rates_of(profile))
    calls = itertools.chain(
        _attention_calls(times, model, plan),
        _page_calls(times, model, plan),
        _other_calls(model, plan),
        _fixed_calls(times, model) if plan.deterministic else _library_gemm_calls(model, plan),
    )
    unique = {call.key: call for call in calls}
    return [
        TuningCase(key, call.kind, dict(call.shape), call.config, predicted_seconds(times.rates, call))
        for key, call in unique.items()
    ]


def _score(
    times: KernelTimes,
    model: ModelConfig,
    page_size: int,
    option: DecodeAttention,
    batch: int,
    contexts: tuple[int, ...],
) -> float:
    """Seconds over the contexts, each in units of the shortest possible, so that a long one does not decide alone."""
    rates = times.rates
    token_bytes = 4 * model.num_kv_heads * model.head_dim
    return sum(
        predicted_seconds(rates, step_cost.decode_attention_call(model, page_size, option, batch, context))
        / (rates.phase_seconds + batch * context * token_bytes / rates.read_bandwidth)
        for context in contexts
    )


def _attention_calls(times: KernelTimes, model: ModelConfig, plan: Plan) -> Iterator[KernelCall]:
    batches = [batch for batch in DECODE_BATCHES if batch <= plan.max_num_seqs]
    for batch, context in itertools.product(batches, contexts_of(model)):
        if batch * context > (plan.num_blocks - 1) * plan.page_size:
            continue
        chosen = [plan.decode_for(batch)] if plan.decode_attention else []
        for option in (*decode_shortlist(times, model, plan.page_size, batch), *chosen):
            yield step_cost.decode_attention_call(model, plan.page_size, option, batch, context)
    options = prefill_shortlist(times, model, plan.page_size)
    by_descriptors = [option for option in options if option.tma and not plan.deterministic]
    options = [option for option in options if not option.tma]
    chunk = min(plan.max_batch_tokens, plan.max_context_tokens)
    usual = min(PROMPT_TOKENS, chunk)
    compared = prefill_points(plan.max_context_tokens)
    points = dict.fromkeys((PrefillPoint(usual, usual), PrefillPoint(chunk, chunk), *compared))
    rivals = () if plan.deterministic else by_descriptors or options  # those by pointers win where there are no others
    for launch, point in (
        *itertools.product(options, (point for point in points if point.num_prompts == 1)),
        *itertools.product(options[:_NUM_BEHIND] if by_descriptors else rivals, compared),
        *itertools.product(by_descriptors, compared),
        *itertools.product(rivals, _apart(plan.max_context_tokens)),
    ):
        yield point.call(model, plan.page_size, launch)
    if times.rates.capability >= LIBRARY_CAPABILITY and options and not plan.deterministic:
        # The chosen one, and of each other kind the first: by pointers, by tensor descriptors, with roles for warps.
        planned = [plan.prefill_attention] if plan.prefill_attention else []
        own = {_kind_of(option): option for option in (*by_descriptors[::-1], options[0], *planned)}.values()
        for tokens, context in library_points(plan.max_context_tokens):
            yield step_cost.library_prefill_call(model, plan.page_size, tokens, context)
            for launch in own:
                yield step_cost.prefill_attention_call(model, plan.page_size, launch, tokens, context)


def _apart(max_context_tokens: int) -> tuple[PrefillPoint, ...]:
    """What tells from where on another launch is quicker, beside the points that all are compared at."""
    between = min(_BETWEEN_TOKENS, max_context_tokens)
    return PrefillPoint(between, between), *fewer_long_points(max_context_tokens)


def _kind_of(option: PrefillAttention) -> tuple[bool, bool]:
    """By tensor descriptors, and with roles for warps."""
    return option.tma, option.num_warps > MAX_PLAIN_WARPS


def library_points(max_context_tokens: int) -> list[tuple[int, int]]:
    """(tokens of a prompt in a step, context) at which a library's attention is compared with our own."""
    lengths = dict.fromkeys(min(length, max_context_tokens) for length in LIBRARY_TOKENS)
    longest = min(LIBRARY_CONTEXT, max_context_tokens)
    return [(tokens, context) for tokens in lengths for context in dict.fromkeys((tokens, longest))]


def _page_calls(times: KernelTimes, model: ModelConfig, plan: Plan) -> Iterator[KernelCall]:
    """Each page at the batches and the context that pages are compared at."""
    for page_size, batch in itertools.product(PAGE_SIZES, page_batches(plan.max_num_seqs)):
        context = contexts_of(model)[min(1, len(contexts_of(model)) - 1)]
        if batch * context > (plan.num_blocks - 1) * plan.page_size:
            continue
        for option in decode_shortlist(times, model, page_size, batch)[:2]:
            yield step_cost.decode_attention_call(model, page_size, option, batch, context)


def few_rows_calls(rows: int, n: int, k: int) -> list[KernelCall]:
    """Every launch of the kernel of few rows for one matrix."""
    return [KernelCall("gemm", {"m": rows, "n": n, "k": k}, launch) for launch in GEMM_LAUNCHES]


def fixed_gemm_calls(rows: int, n: int, k: int, shared_per_block: int) -> list[KernelCall]:
    """Every tile of the product in one order that fits."""
    return [step_cost.fixed_gemm_call(rows, n, k, tile) for tile in fixed_gemm_launches(shared_per_block)]


def page_batches(max_num_seqs: int) -> tuple[int, ...]:
    """The batches at which pages are compared: alone, a few, full."""
    return tuple(dict.fromkeys(min(batch, max_num_seqs) for batch in (1, 16, max_num_seqs)))


def _fixed_calls(times: KernelTimes, model: ModelConfig) -> Iterator[KernelCall]:
    """Every tile of every matrix at the rows that a deterministic plan judges them by."""
    sizes = dict.fromkeys((*step_cost.matrices(model), (model.vocab_size, model.hidden_size)))
    for rows, (n, k) in itertools.product(FIXED_GEMM_ROWS, sizes):
        yield from fixed_gemm_calls(rows, n, k, times.rates.shared_per_block)


def library_bands(max_batch_tokens: int) -> list[LibraryBand]:
    """Those that a step of a plan can lie in."""
    return [band for band in LIBRARY_BANDS if band.min_rows <= max_batch_tokens]


def library_gemm_matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of the layers' matrices without a bias, each once."""
    qkv, out, *others = step_cost.matrices(model)
    with_bias = {qkv} if model.attention_bias else set()
    with_bias |= {out} if model.attention_output_bias else set()
    return list(dict.fromkeys(one for one in (qkv, out, *others) if one not in with_bias))


def _library_gemm_calls(model: ModelConfig, plan: Plan) -> Iterator[KernelCall]:
    """Each of these products as the library would and by each of its algorithms, one after another: the load stays the same.
    None of rows that no step has.
    """
    most = plan.max_batch_tokens
    for band, (n, k) in itertools.product(library_bands(most), library_gemm_matrices(model)):
        for rank in (None, *LIBRARY_GEMM_RANKS):
            yield step_cost.library_gemm_call(band.timed_rows(most), n, k, rank)


def _other_calls(model: ModelConfig, plan: Plan) -> Iterator[KernelCall]:
    rows = dict.fromkeys(min(rows, plan.max_num_seqs) for rows in (*_TIMED_ROWS, plan.max_num_seqs))
    chunks = dict.fromkeys(min(tokens, plan.max_batch_tokens) for tokens in (*_TIMED_CHUNKS, plan.max_batch_tokens))
    for count in (*rows, *chunks):
        for call, _ in (*step_cost.gemm_calls(model, count), *step_cost.row_calls(model, count)):
            yield call
    for count in rows:
        yield step_cost.head_call(model, count)
        yield step_cost.sample_call(model, count)
    for count, (n, k) in itertools.product(
        FEW_ROWS, (*step_cost.matrices(model), (model.vocab_size, model.hidden_size))
    ):
        yield step_cost.gemm_call(count, n, k)
        yield from few_rows_calls(count, n, k)
