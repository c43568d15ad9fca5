"""Changes of single logits before a row is drawn: bias, penalties, banned and allowed tokens, grammar masks.

Rows that have lists are changed by a program each, which leaves new values and marks; one pass over the rows then puts them
beside the other logits. The order and every rounding are those of engine/host_sampler.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dragoman_kernels.triton.sampling import BLOCK, SamplingWorkspace, block_extremes

# int32 of a row, each the place of a list in the words or a number: row of the logits; tokens with a bias, how many, how far
# behind each lies what is added, and how often a token has one at most; seen tokens, how many of them in the output, and all;
# banned, how many; allowed, how many (-1: any); mask (-1: none); repetition (float32 bits); presence and frequency (float64
# bits, two each).
NUM_FIELDS = 18
_MAX_ROWS = 64  # of one call; bounds the copies to as many times 8 bytes a logit
_CHUNK = 1024  # entries of a list at once
# A mark: how often a token is in the output, below these bits.
_COUNT = tl.constexpr(0x0FFFFFFF)
_ALLOWED = tl.constexpr(1 << 28)
_SEEN = tl.constexpr(1 << 29)  # its penalties are applied
_CHANGED = tl.constexpr(1 << 30)  # its value is in the edited logits


class EditWorkspace:
    """Edited logits, and marks, which are 0 between two calls, for at most `max_num_rows` rows at once."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """For batches of `num_rows`."""
        self.max_num_rows = rows = min(num_rows, _MAX_ROWS)
        self.logits = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
        self.marks = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)


@triton.jit
def _field(words_ptr, base, field: tl.constexpr, at, num_edited):
    return tl.load(words_ptr + base + field * num_edited + at)


@triton.jit
def _double(words_ptr, base, field: tl.constexpr, at, num_edited):
    low = _field(words_ptr, base, field, at, num_edited).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = _field(words_ptr, base, field + 1, at, num_edited).to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


@triton.jit
def _value(logits_ptr, edited_ptr, marks, ids, inside):
    """What the tokens have by now."""
    is_changed = inside & ((marks & _CHANGED) != 0)
    raw = tl.load(logits_ptr + ids, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_changed, tl.load(edited_ptr + ids, mask=is_changed, other=0.0), raw)


@triton.jit
def _add_bias(words_ptr, start, count, stride, logits_ptr, edited_ptr, marks_ptr, turn, CHUNK: tl.constexpr):
    """`stride` behind a token lies what is added to it (float32 bits), and behind that how many entries of it come before."""
    for first in range(0, count, CHUNK):
        places = first + tl.arange(0, CHUNK)
        inside = places < count
        inside = inside & (tl.load(words_ptr + start + 2 * stride + places, mask=inside, other=-1) == turn)
        ids = tl.load(words_ptr + start + places, mask=inside, other=0)
        added = tl.load(words_ptr + start + stride + places, mask=inside, other=0).to(tl.float32, bitcast=True)
        marks = tl.load(marks_ptr + ids, mask=inside, other=0)
        values = _value(logits_ptr, edited_ptr, marks, ids, inside)
        tl.store(edited_ptr + ids, values + added, mask=inside)
        tl.store(marks_ptr + ids, marks | _CHANGED, mask=inside)


@triton.jit
def _penalise(
    words_ptr, start, num_output, count, logits_ptr, edited_ptr, marks_ptr, repetition, presence, frequency,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Of the tokens that were seen, those of the output first; each as often as it was."""
    for first in range(0, num_output, CHUNK):
        places = first + tl.arange(0, CHUNK)
        inside = places < num_output
        ids = tl.load(words_ptr + start + places, mask=inside, other=0)
        tl.atomic_add(marks_ptr + ids, 1, mask=inside)
    tl.debug_barrier()
    for first in range(0, count, CHUNK):
        places = first + tl.arange(0, CHUNK)
        inside = places < count
        ids = tl.load(words_ptr + start + places, mask=inside, other=0)
        marks = tl.atomic_or(marks_ptr + ids, _SEEN, mask=inside)
        inside = inside & ((marks & _SEEN) == 0)  # whoever comes first applies them
        values = _value(logits_ptr, edited_ptr, marks, ids, inside)
        times = (marks & _COUNT).to(tl.float64)
        offsets = (times * frequency + tl.where(times > 0, presence, 0.0)).to(tl.float32)
        scaled = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        tl.store(edited_ptr + ids, scaled - offsets, mask=inside)
        tl.atomic_or(marks_ptr + ids, _CHANGED, mask=inside)


@triton.jit(do_not_specialize=["base", "num_edited", "vocab"], do_not_specialize_on_alignment=["words_ptr"])
def _edit_lists_kernel(
    logits_ptr, edited_ptr, marks_ptr, words_ptr, base, num_edited, vocab, stride, CHUNK: tl.constexpr
):
    at = tl.program_id(0)
    logits_ptr += _field(words_ptr, base, 0, at, num_edited).to(tl.int64) * stride
    edited_ptr += at.to(tl.int64) * vocab
    marks_ptr += at.to(tl.int64) * vocab
    start = _field(words_ptr, base, 1, at, num_edited)
    count = _field(words_ptr, base, 2, at, num_edited)
    behind = _field(words_ptr, base, 3, at, num_edited)
    for turn in range(_field(words_ptr, base, 4, at, num_edited)):
        _add_bias(words_ptr, start, count, behind, logits_ptr, edited_ptr, marks_ptr, turn, CHUNK)
        tl.debug_barrier()
    count = _field(words_ptr, base, 7, at, num_edited)
    if count > 0:
        _penalise(
            words_ptr, _field(words_ptr, base, 5, at, num_edited), _field(words_ptr, base, 6, at, num_edited), count,
            logits_ptr, edited_ptr, marks_ptr, _field(words_ptr, base, 13, at, num_edited).to(tl.float32, bitcast=True),
            _double(words_ptr, base, 14, at, num_edited), _double(words_ptr, base, 16, at, num_edited), CHUNK,
        )  # fmt: skip
        tl.debug_barrier()
    start = _field(words_ptr, base, 8, at, num_edited)
    count = _field(words_ptr, base, 9, at, num_edited)
    for first in range(0, count, CHUNK):
        places = first + tl.arange(0, CHUNK)
        ids = tl.load(words_ptr + start + places, mask=places < count, other=0)
        tl.store(edited_ptr + ids, float("-inf"), mask=places < count)
        tl.store(marks_ptr + ids, _CHANGED, mask=places < count)
    tl.debug_barrier()
    start = _field(words_ptr, base, 10, at, num_edited)
    count = _field(words_ptr, base, 11, at, num_edited)
    for first in range(0, count, CHUNK):
        places = first + tl.arange(0, CHUNK)
        ids = tl.load(words_ptr + start + places, mask=places < count, other=0)
        tl.atomic_or(marks_ptr + ids, _ALLOWED, mask=places < count)


@triton.jit(
    do_not_specialize=["base", "num_edited", "vocab", "num_blocks"], do_not_specialize_on_alignment=["words_ptr"]
)
def _edit_rows_kernel(
    logits_ptr, edited_ptr, marks_ptr, words_ptr, max_ptr, arg_ptr, min_ptr, base, num_edited, vocab, stride, num_blocks,
    HAS_LISTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows: what the lists left, and what the masks leave of that; the extremes are those of the edited row."""
    at = tl.program_id(0)
    block = tl.program_id(1)
    row = _field(words_ptr, base, 0, at, num_edited).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    values = tl.load(logits_ptr + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    edited_ptr += at.to(tl.int64) * vocab
    if HAS_LISTS:
        marks_ptr += at.to(tl.int64) * vocab
        marks = tl.load(marks_ptr + columns, mask=inside, other=0)
        is_changed = (marks & _CHANGED) != 0
        values = tl.where(is_changed, tl.load(edited_ptr + columns, mask=is_changed, other=0.0), values)
        has_allowed = _field(words_ptr, base, 11, at, num_edited) >= 0
        values = tl.where(has_allowed & ((marks & _ALLOWED) == 0), float("-inf"), values)
        tl.store(marks_ptr + columns, 0, mask=marks != 0)
    mask = _field(words_ptr, base, 12, at, num_edited)
    if mask >= 0:
        words = tl.load(words_ptr + mask + (columns >> 5), mask=inside, other=0)
        values = tl.where(((words >> (columns & 31)) & 1) == 0, float("-inf"), values)
    tl.store(edited_ptr + columns, values, mask=inside)
    best, place, least = block_extremes(values, columns)
    place_of = row * num_blocks + block
    # A row that was not finite before stays so, whatever became of the token.
    is_bad = tl.load(max_ptr + place_of) == float("inf")
    tl.store(max_ptr + place_of, tl.where(is_bad, float("inf"), best))
    tl.store(arg_ptr + place_of, place)
    tl.store(min_ptr + place_of, least)


def edit_rows(
    logits: torch.Tensor,
    words: torch.Tensor,
    base: int,
    count: int,
    workspace: SamplingWorkspace,
    edits: EditWorkspace,
    *,
    has_lists: bool,
) -> None:
    """Write `count` edited rows to the first of `edits.logits`, and their extremes to `workspace`.

    `sample_rows` was called with the same `logits` [num_rows, vocab_size] and `workspace` before, and no `edit_rows` since.
    `words` int32 has [NUM_FIELDS, count] at `base`; places of lists are counted from its begin. `has_lists`: not masks alone.
    """
    vocab = logits.shape[1]
    num_blocks = triton.cdiv(vocab, BLOCK)
    w, e = workspace, edits
    if has_lists:
        # A product and a sum are rounded each, as on the host.
        _edit_lists_kernel[(count,)](
            logits, e.logits, e.marks, words, base, count, vocab, logits.stride(0), CHUNK=_CHUNK, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    _edit_rows_kernel[(count, num_blocks)](
        logits, e.logits, e.marks, words, w.maxima, w.places, w.minima, base, count, vocab, logits.stride(0), num_blocks,
        HAS_LISTS=has_lists, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
