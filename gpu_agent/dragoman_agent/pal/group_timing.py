"""Decode attention whose short sequences share programs, timed beside the kernel without groups: cases and their times. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import DECODE_BATCHES
from dragoman_agent.pal.plan import DecodeAttention, decode_for
from dragoman_agent.pal.timings import Timings

KIND = "decode-grouped"
GROUP_ROWS = (1, 2, 4, 8)  # sequences a program
SHORT_TOKENS = 128  # of every sequence timed
MIN_GROUP_BATCH = 64  # fewer sequences do not fill a card even with a program for each
_UNGROUPED = 0  # in place of rows: the kernel that knows of no groups
_MAX_NUM_BATCHES = 3  # with 5 cases each: of a model, at most 15


@dataclass(frozen=True, slots=True)
class GroupCase:
    """Attention of one layer to time; see `candidates.TuningCase`. `shape["rows"]` 0: by the kernel without groups."""

    key: str
    kind: str
    shape: Mapping[str, int]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Seconds of attention of one layer, `batch` sequences of `context_tokens` each."""

    batch: int
    context_tokens: int
    ungrouped: float
    by_rows: Mapping[int, float]  # by sequences a program, the kernel that groups; has 1


def group_batches(max_num_seqs: int) -> list[int]:
    """The batches at which grouping is timed, ascending."""
    batches = [batch for batch in DECODE_BATCHES if MIN_GROUP_BATCH <= batch <= max_num_seqs]
    last = len(batches) - 1
    if last < _MAX_NUM_BATCHES:
        return batches
    return [batches[round(nth * last / (_MAX_NUM_BATCHES - 1))] for nth in range(_MAX_NUM_BATCHES)]


def group_cases(
    model: ModelConfig, page_size: int, attention: Sequence[DecodeAttention], max_num_seqs: int
) -> Iterator[GroupCase]:
    """Each planned launch with and without groups; equal work has equal keys, whichever plan it is of."""
    for batch, rows in itertools.product(group_batches(max_num_seqs), (_UNGROUPED, *GROUP_ROWS)):
        yield _case(model, page_size, decode_for(attention, batch), batch, rows)


def group_times(
    timings: Timings | None, model: ModelConfig, page_size: int, attention: Sequence[DecodeAttention], max_num_seqs: int
) -> list[GroupTimes]:
    """By batch, where the kernel without groups and the one with groups of one were both timed."""
    if timings is None:
        return []
    found = []
    for batch in group_batches(max_num_seqs):
        launch = decode_for(attention, batch)
        cases = {rows: _case(model, page_size, launch, batch, rows) for rows in (_UNGROUPED, *GROUP_ROWS)}
        known = {rows: timings.get(case.key) for rows, case in cases.items()}
        seconds = {rows: value for rows, value in known.items() if value is not None}
        if {_UNGROUPED, 1} <= seconds.keys():
            ungrouped = seconds.pop(_UNGROUPED)
            found.append(GroupTimes(batch, cases[1].shape["context"], ungrouped, seconds))
    return found


def _case(model: ModelConfig, page_size: int, launch: DecodeAttention, batch: int, rows: int) -> GroupCase:
    context = min(SHORT_TOKENS, model.max_context_tokens)
    shape = {
        "num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "page_size": page_size, "batch": batch, "context": context, "rows": rows,
    }  # fmt: skip
    config = {name: value for name, value in asdict(launch).items() if name != "max_batch"}
    key = (
        f"{KIND}/h{model.num_heads}-k{model.num_kv_heads}-d{model.head_dim}-p{page_size}/b{batch}/c{context}/"
        f"s{launch.num_splits}-n{launch.block_n}-w{launch.num_warps}-g{launch.num_stages}/r{rows}"
    )
    return GroupCase(key, KIND, shape, config)
