"""The plan: everything the engine and the device take from the measured profile. Frozen; a change makes a new one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from dragoman.step_model import StepModel

_NOT_IN_DIGEST = (
    "memory", "step_model", "num_blocks", "max_num_waiting", "device_index",
    "kv_host_bytes", "kv_disk_bytes", "kv_link_bytes_per_second", "short_groups",
)  # fmt: skip

KV_FLOAT8 = "float8_e4m3fn"  # of `kv_dtype`: K and V in eight bits, each layer's times a scale

# Steps with prompts have graphs for few sequences, whose contexts are split as for half of them, and for as many as there may
# be: programs of decode attention that find nothing to do take time too.
MIXED_FEW_SEQS = 64
CHUNK_GRAPH_FILL = 0.9  # of the chunk, from which on a step runs in the chunk's graph: padding costs the device time
MIXED_TIMED_TOKENS = 64  # of such a step, for which a prediction is made and which a device times when it loads

_FULL_TILES = 0.85  # of the queries that all tiles of a long or large step have room for

PrefillVariant = Literal["paged", "fixed"]
Reduction = Literal["l2", "shared"]


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the memory budget."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """How decode attention runs for batches up to `max_batch`."""

    max_batch: int  # sequences
    num_splits: int  # parts of each context, a power of two
    block_n: int  # keys in a tile, at most the page
    num_warps: int
    num_stages: int  # tiles under way


@dataclass(frozen=True, slots=True)
class ShortGroups:
    """Decode batches from `min_batch` to `max_batch`, whose short sequences may share a program, which changes no bit.

    Times are of attention of one layer, `min_batch` sequences of `context_tokens` each.
    """

    min_batch: int
    max_batch: int
    rows: int  # sequences a program, at most
    context_tokens: int
    ungrouped_seconds: float
    grouped_seconds: float


@dataclass(frozen=True, slots=True)
class DecodeList:
    """Decode batches from `min_batch` to `max_batch` whose contexts are cut into work items of about equal length, by a list
    that the device makes once a step; `DecodeAttention.num_splits` does not count there.
    """

    min_batch: int
    max_batch: int
    num_items: int  # that there is room for, more than `max_batch`
    min_tiles: int  # of the launch's `block_n` keys, in an item of a context that is cut


@dataclass(frozen=True, slots=True)
class GemmDecode:
    """A matrix of the model that batches up to `max_rows` multiply with the kernel of few rows, not with the library."""

    n: int  # outputs
    k: int  # inputs
    max_rows: int
    block_n: int  # outputs of a block
    block_k: int  # inputs of a tile
    num_stages: int
    num_warps: int


MAX_LIBRARY_ALGORITHMS = 8  # of a product that the library is asked for: their order may depend on how many


@dataclass(frozen=True, slots=True)
class LibraryGemm:
    """A matrix that steps of so many rows multiply by another algorithm of the library than the one it would take itself."""

    n: int  # outputs
    k: int  # inputs
    min_rows: int  # of a step
    max_rows: int  # 0: any number
    timed_rows: int  # at which the library was asked for its algorithms
    rank: int  # of the algorithm in its answer, from 0


@dataclass(frozen=True, slots=True)
class GemmFixed:
    """How a matrix of the model is multiplied by tiles that sum each output in one order: those of one matrix give equal bits."""

    n: int  # outputs
    k: int  # inputs
    max_rows: int  # 0: any number
    block_m: int  # rows of a tile
    block_n: int  # outputs of a tile
    block_k: int  # inputs of a tile
    num_stages: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """How prefill attention runs."""

    variant: PrefillVariant
    block_m: int  # queries of a work item; of the fixed variant, queries times the heads that share a KV head
    block_n: int  # keys in a tile, at most the page
    num_warps: int
    num_stages: int
    tma: bool = False  # K and V come by tensor descriptors: the copy engine of Hopper and later fetches whole tiles


@dataclass(frozen=True, slots=True)
class LongPrefill:
    """The launch of steps whose prompts look far back or are many; the others take the usual one.

    A launch takes so much a tile of queries and so much a key that they see, in another measure each: which of two is quicker is
    told by the keys that a prompt token sees in the mean. (The longest context would let one short chunk decide for all the
    rest.) Beside that, large tiles are too few for the device in a step of few tokens.
    """

    attention: PrefillAttention
    min_tokens: int  # prompt tokens of a step
    min_context_tokens: int  # that a prompt token sees in the mean, itself included
    many_tokens: int = 0  # prompt tokens of a step, from which on it does not matter what they see; 0: it always does

    @property
    def fewest_tokens(self) -> int:
        """Prompt tokens of the shortest step that it may attend."""
        return min(self.min_tokens, self.many_tokens or self.min_tokens)

    def takes(self, num_tokens: float, num_seen: float, num_items: float) -> bool:
        """Whether a step of so many prompt tokens, which see `num_seen` keys together, is one of them; in `num_items` tiles of
        this launch, which must be nearly full: rows without a query take as long.
        """
        looks_back = num_tokens >= self.min_tokens and num_seen >= self.min_context_tokens * num_tokens
        is_large = 0 < self.many_tokens <= num_tokens
        return (looks_back or is_large) and num_tokens >= _FULL_TILES * self.attention.block_m * num_items


@dataclass(frozen=True, slots=True)
class PrefillForms:
    """Our own launches of prefill attention."""

    usual: PrefillAttention
    long: LongPrefill | None = None

    @property
    def all(self) -> tuple[PrefillAttention, ...]:
        """Each of them."""
        return (self.usual,) if self.long is None else (self.usual, self.long.attention)

    def of(self, tokens: int, context: int, num_prompts: float = 1) -> PrefillAttention:
        """That of a step which computes the last `tokens` of each of `num_prompts` sequences of `context`."""
        long = self.long
        if long is None:
            return self.usual
        num_items = num_prompts * -(-tokens // long.attention.block_m)
        is_long = long.takes(num_prompts * tokens, num_prompts * seen_tokens(tokens, context), num_items)
        return long.attention if is_long else self.usual


@dataclass(frozen=True, slots=True)
class LibraryPrefill:
    """Steps that compute prompts by a library's attention; the others by our own."""

    library: Literal["cudnn"]
    min_tokens: int  # prompt tokens of a step from which on it is the library's
    max_num_seqs: int  # prompts of a step that the library is set up for


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run and how. Counts are tokens, sequences or blocks; sizes say their unit.

    A device without kernels of its own to choose from (CPU, null) leaves the fields from `graph_batch_sizes` on at
    their defaults.
    """

    device_kind: str
    model_name: str
    page_size: int  # tokens in a KV block
    num_blocks: int  # KV blocks in the arena, the null block 0 included
    max_context_tokens: int  # longest prompt + output of one sequence
    max_batch_tokens: int  # tokens a step may compute (prefill and decode together): the chunk
    max_num_seqs: int  # sequences that run at once
    max_num_waiting: int  # requests that wait at the agent; beyond it they are refused
    num_threads: int
    road: str  # how the model is computed, such as "native-int8", "native-float32", "torch-float32", "null"
    kv_dtype: str
    memory: tuple[MemoryLine, ...]
    step_model: StepModel
    graph_batch_sizes: tuple[int, ...] = ()  # decode batches with a captured graph; empty where a device has none
    # Steps with prompts that have a captured graph, by the tokens they are padded to; rising.
    mixed_graph_tokens: tuple[int, ...] = ()
    chunk_graph: bool = False  # steps with prompts that nearly fill one of `full_tokens` have a graph as well
    company_tokens: int = 0  # tokens a step may compute while sequences decode, fewer than any may; 0: as many
    device_index: int = 0  # among devices of its kind
    decode_attention: tuple[DecodeAttention, ...] = ()  # ascending max_batch; the last serves every larger batch
    short_groups: tuple[ShortGroups, ...] = ()  # ascending, apart from each other
    decode_lists: tuple[DecodeList, ...] = ()  # ascending, apart from each other and from `short_groups`
    prefill_attention: PrefillAttention | None = None
    long_prefill: LongPrefill | None = None  # None: `prefill_attention` serves all lengths
    library_prefill: LibraryPrefill | None = None
    min_gemm_rows: int = 1  # rows that matrix products are padded to
    gemm_decode: tuple[GemmDecode, ...] = ()  # by matrix and ascending max_rows; the library where none holds the rows
    library_gemm: tuple[LibraryGemm, ...] = ()  # by matrix; the library's own choice for all others
    dependent_max_batch: int = 0  # in decode of batches up to this, kernels may start before the one before has ended
    burst: bool = False  # decode attention of few long sequences as many small blocks in a row
    reduction: Reduction = "l2"  # where parts of a reduction meet
    shared_memory_bytes: int = 0  # of one block, what kernels are built for
    prefetch: bool = False  # KV that another tier holds is copied in ahead of its use
    deterministic: bool = False  # a token's bits depend on the tokens before it alone
    # By matrix and ascending max_rows, where products must not depend on the rows.
    gemm_fixed: tuple[GemmFixed, ...] = ()
    # Parts of a context that are summed apart and folded in order; 0: not in fixed order.
    attention_part_tokens: int = 0
    kv_host_bytes: int = 0  # KV tier in host memory; 0 is none
    kv_disk_bytes: int = 0  # KV tier on disk; 0 is none
    kv_link_bytes_per_second: float = 0.0  # host to device, as planned with; 0 is not known
    switches_off: tuple[str, ...] = ()  # parts of the hardware layer that were switched off, see switches.py

    @property
    def dependent_launch(self) -> bool:
        """Whether kernels of any step may start early (programmatic dependent launch)."""
        return self.dependent_max_batch > 0

    def decode_for(self, num_seqs: int) -> DecodeAttention:
        """The decode attention of a batch of `num_seqs`. Raises ValueError where the plan has none."""
        return decode_for(self.decode_attention, num_seqs)

    @property
    def prefill_forms(self) -> PrefillForms | None:
        """Our own launches of prefill attention; None on a device without."""
        return None if self.prefill_attention is None else PrefillForms(self.prefill_attention, self.long_prefill)

    def groups_for(self, num_seqs: int) -> ShortGroups | None:
        """How sequences of a decode batch of `num_seqs` may share programs; None: each has its own."""
        return groups_for(self.short_groups, num_seqs)

    def list_for(self, num_seqs: int) -> DecodeList | None:
        """How the contexts of a decode batch of `num_seqs` are cut; None: each into as many parts as its launch says."""
        return next((one for one in self.decode_lists if one.min_batch <= num_seqs <= one.max_batch), None)

    @property
    def max_num_listed(self) -> int:
        """Sequences of the largest batch that has a list, for which the kernel that makes lists is compiled; 0 without any."""
        return max((one.max_batch for one in self.decode_lists), default=0)

    @property
    def captured_tokens(self) -> tuple[int, ...]:
        """Tokens of each graph of steps with prompts, rising."""
        return captured_tokens(self.mixed_graph_tokens, self.full_tokens if self.chunk_graph else ())

    @property
    def max_company_tokens(self) -> int:
        """Tokens a step may compute while sequences decode."""
        return self.company_tokens or self.max_batch_tokens

    @property
    def full_tokens(self) -> tuple[int, ...]:
        """Tokens of steps that are full, beside sequences that decode and without, rising."""
        return full_tokens(self.max_batch_tokens, self.max_company_tokens)

    def mixed_decode(self, num_seqs: int) -> DecodeAttention:
        """The decode attention in a graph of steps with prompts and `num_seqs` sequences at most."""
        return mixed_decode(self.decode_attention, num_seqs, deterministic=self.deterministic)

    def mixed_timed(self) -> int | None:
        """Tokens of the graph with prompts that is timed, None without any."""
        return mixed_timed(self.mixed_graph_tokens)

    def digest(self) -> bytes:
        """SHA-256 over the choices that decide which tokens come out; equal digests mean equal choices."""
        chosen = {name: value for name, value in asdict(self).items() if name not in _NOT_IN_DIGEST}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).digest()


def seen_tokens(tokens: int, context: int) -> int:
    """Keys that the last `tokens` of a sequence of `context` see together, each itself and all before it."""
    return tokens * (2 * context - tokens + 1) // 2


def full_tokens(alone: int, company: int) -> tuple[int, ...]:
    """See Plan.full_tokens."""
    return tuple(sorted({alone, company}))


def captured_tokens(tokens: Sequence[int], full: Sequence[int]) -> tuple[int, ...]:
    """`tokens` and those of `full` steps that have a graph, each once, rising."""
    return tuple(sorted({*tokens, *full}))


def mixed_timed(tokens: Sequence[int]) -> int | None:
    """Which of `tokens`, rising, is predicted and timed: the first that holds such a step, else the largest."""
    return next((size for size in tokens if size >= MIXED_TIMED_TOKENS), tokens[-1] if tokens else None)


def mixed_graph_sizes(tokens: Sequence[int], max_num_seqs: int) -> list[tuple[int, int]]:
    """(tokens, sequences) of each graph of steps with prompts, rising."""
    sizes = {(num, min(num, most, max_num_seqs)) for num in tokens for most in (MIXED_FEW_SEQS, max_num_seqs)}
    return sorted(sizes)


def mixed_decode(buckets: Sequence[DecodeAttention], num_seqs: int, *, deterministic: bool) -> DecodeAttention:
    """See Plan.mixed_decode."""
    is_few = num_seqs <= MIXED_FEW_SEQS and not deterministic
    return decode_for(buckets, max(num_seqs // 2, 1) if is_few else num_seqs)


def decode_for(buckets: Sequence[DecodeAttention], num_seqs: int) -> DecodeAttention:
    """The first bucket that holds `num_seqs`, else the last. Raises ValueError without any."""
    if not buckets:
        raise ValueError("the plan has no decode attention; it was made for another kind of device")
    return next((bucket for bucket in buckets if bucket.max_batch >= num_seqs), buckets[-1])


def groups_for(groups: Sequence[ShortGroups], num_seqs: int) -> ShortGroups | None:
    """See Plan.groups_for."""
    return next((one for one in groups if one.min_batch <= num_seqs <= one.max_batch), None)
