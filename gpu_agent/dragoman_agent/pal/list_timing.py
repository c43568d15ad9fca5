"""Decode attention whose contexts are cut by a work list, timed beside the launch that cuts each alike: cases and their times. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import DECODE_BATCHES, contexts_of
from dragoman_agent.pal.plan import DecodeAttention, decode_for
from dragoman_agent.pal.timings import Timings

KIND = "decode-list"
EVEN, LONG, SPREAD = 0, 1, 2  # how the contexts of a batch differ, see `list_lens`
LAYOUTS = (EVEN, LONG, SPREAD)
MIN_LIST_BATCH = 8  # fewer sequences are cut into more parts each, see the decision `burst`
MIN_TILES = 4  # of an item: a shorter one spends its time on its start and on its part of the merge
NO_LIST = 0  # in place of a number of items: the planned launch as it is
_WORDS = {EVEN: "even", LONG: "long", SPREAD: "spread"}
_LONG_TOKENS = 16384
_SPREAD = 4  # the shortest and the longest of spread contexts differ from the usual one by this factor
_MAX_NUM_BATCHES = 6  # with 12 cases each: of a model, at most 72
# Items a sequence that there is room for. On an H200 programs that find no item delay the others once there are more than the
# device holds at a time; few sequences must be cut into more parts each to fill it.
_FEW_SEQS, _ROOM_OF_FEW, _ROOM = 16, (1.5, 2.0, 4.0), (1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class ListCase:
    """Attention of one layer to time; see `candidates.TuningCase`. `shape["items"]` 0: by the planned launch, without a list.

    With a list its making counts as well, once in `shape["layers"]` calls as in a step.
    """

    key: str
    kind: str
    shape: Mapping[str, int]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ListTimes:
    """Seconds of attention of one layer, `batch` sequences."""

    batch: int
    by_layout: Mapping[
        int, Mapping[int, float]
    ]  # by layout and number of items; each has `NO_LIST`, and the same numbers
    layer_seconds: float  # of a whole step whose contexts are alike, by its layers: what a loss is measured by

    @property
    def items(self) -> list[int]:
        """Numbers of items that were timed, without `NO_LIST`, rising."""
        return sorted(self.by_layout[EVEN].keys() - {NO_LIST})


def list_lens(shape: Mapping[str, int]) -> list[int]:
    """Tokens of each context of the batch. EVEN: all `context`. LONG: one inside the batch `longest`, the others `context`.
    SPREAD: geometric from a quarter of `context` to four times as many, `longest` at most, in an order that is mixed and fixed.
    """
    batch, context, longest = shape["batch"], shape["context"], shape["longest"]
    if shape["layout"] == EVEN:
        return [context] * batch
    if shape["layout"] == LONG:
        return [longest if index == batch // 2 else context for index in range(batch)]
    low, high = max(context // _SPREAD, 1), min(_SPREAD * context, longest)
    rising = [round(low * (high / low) ** (nth / max(batch - 1, 1))) for nth in range(batch)]
    stride = _stride(batch)
    return [rising[index * stride % batch] for index in range(batch)]


def list_batches(max_num_seqs: int) -> list[tuple[int, int]]:
    """(first batch, batch that is timed and last) of each range that is timed, ascending: buckets of decode attention."""
    if max_num_seqs < MIN_LIST_BATCH:
        return []
    ranges = [
        (before + 1, min(batch, max_num_seqs))
        for before, batch in itertools.pairwise(DECODE_BATCHES)
        if batch >= MIN_LIST_BATCH and before < max_num_seqs
    ]
    last = len(ranges) - 1
    if last < _MAX_NUM_BATCHES:
        return ranges
    return [ranges[round(nth * last / (_MAX_NUM_BATCHES - 1))] for nth in range(_MAX_NUM_BATCHES)]


def list_items(batch: int) -> tuple[int, ...]:
    """The numbers of items that are timed, rising, each more than the batch."""
    return tuple(math.ceil(room * batch) for room in (_ROOM_OF_FEW if batch <= _FEW_SEQS else _ROOM))


def list_tokens(model: ModelConfig) -> tuple[int, int] | None:
    """(usual context, longest) that is timed; None where the model has no context longer than the usual one."""
    contexts = contexts_of(model)
    usual, longest = contexts[min(1, len(contexts) - 1)], min(_LONG_TOKENS, model.max_context_tokens)
    return (usual, longest) if longest > usual else None


def list_cases(
    model: ModelConfig,
    page_size: int,
    attention: Sequence[DecodeAttention],
    max_num_seqs: int,
) -> Iterator[ListCase]:
    """Each planned launch with and without a list; equal work has equal keys, whichever plan it is of."""
    tokens = list_tokens(model)
    if tokens is None:
        return
    for _, batch in list_batches(max_num_seqs):
        launch = decode_for(attention, batch)
        counts = (NO_LIST, *list_items(batch))
        for layout, items in itertools.product(LAYOUTS, counts):
            yield _case(model, page_size, launch, batch, tokens, layout, items)


def list_times(
    timings: Timings | None,
    model: ModelConfig,
    page_size: int,
    attention: Sequence[DecodeAttention],
    max_num_seqs: int,
    step_seconds: Callable[[int, int], float],
) -> list[ListTimes]:
    """By batch, where every layout was timed without a list and with at least one number of items, the same of all.

    `step_seconds` of a decode step of so many sequences and tokens of each.
    """
    tokens = list_tokens(model)
    if timings is None or tokens is None:
        return []
    usual, _ = tokens
    found: dict[int, dict[int, dict[int, float]]] = {}
    for case in list_cases(model, page_size, attention, max_num_seqs):
        seconds = timings.get(case.key)
        by_layout = found.setdefault(case.shape["batch"], {layout: {} for layout in LAYOUTS})
        if seconds is not None:
            by_layout[case.shape["layout"]][case.shape["items"]] = seconds
    times = []
    for batch, by_layout in found.items():
        known = set.intersection(*(set(seconds) for seconds in by_layout.values()))
        if NO_LIST in known and len(known) > 1:
            kept = {layout: {items: each[items] for items in sorted(known)} for layout, each in by_layout.items()}
            times.append(ListTimes(batch, kept, step_seconds(batch, usual) / model.num_layers))
    return times


def _case(
    model: ModelConfig,
    page_size: int,
    launch: DecodeAttention,
    batch: int,
    tokens: tuple[int, int],
    layout: int,
    items: int,
) -> ListCase:
    context, longest = tokens
    shape = {
        "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "page_size": page_size, "batch": batch, "context": context, "longest": longest, "layout": layout,
        "items": items, "min_tiles": MIN_TILES, "layers": model.num_layers,
    }  # fmt: skip
    config = {name: value for name, value in asdict(launch).items() if name != "max_batch"}
    key = (
        f"{KIND}/h{model.num_heads}-k{model.num_kv_heads}-d{model.head_dim}-p{page_size}/b{batch}/c{context}-l{longest}-"
        f"{_WORDS[layout]}/s{launch.num_splits}-n{launch.block_n}-w{launch.num_warps}-g{launch.num_stages}/"
        f"i{items}-t{MIN_TILES}-y{model.num_layers}"
    )
    return ListCase(key, KIND, shape, config)


def _stride(batch: int) -> int:
    """A step through the batch that comes by every sequence, about the golden section of it: neighbours differ."""
    first = max(round(0.618 * batch), 1)
    return next(step for step in itertools.count(first) if math.gcd(step, batch) == 1)
