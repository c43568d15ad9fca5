"""Draws again, on a GPU, the rows of a step that temperature alone does not draw: filters and edits by a few kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman_agent.device.base import SamplingBatch
from dragoman_agent.engine.packed_copy import send_words
from dragoman_agent.engine.sampling_words import Words, edited_rows, rows_to_draw, words_of
from dragoman_kernels.triton.edits import EditWorkspace, edit_rows
from dragoman_kernels.triton.filters import Drawn, FilterWorkspace, draw_rows
from dragoman_kernels.triton.sampling import SamplingWorkspace


class Redraw:
    """Owns what its kernels work in, taken once for steps of at most `num_rows` rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._filters = FilterWorkspace(num_rows, vocab_size, device)
        self._edits = EditWorkspace(num_rows, vocab_size, device)
        self._device, self._vocab_size = device, vocab_size
        # What was sent last for rows without edits, and what of: most steps have the filters of the step before.
        self._columns: tuple[bytes, ...] = ()
        self._known: list[tuple[Words, Tensor]] = []

    def draw(self, logits: Tensor, sampling: SamplingBatch, workspace: SamplingWorkspace, drawn: Drawn) -> bool:
        """Of `logits` [num_rows, vocab_size], which `sample_rows` has just drawn from with the same `workspace` and into the same
        `drawn`. A row's token depends on its own logits and sampling alone. Returns whether any was drawn. Raises ValueError on a token outside the vocabulary.
        """
        parts = self._sent(sampling)
        for words, sent in parts:
            if words.num_edited:
                edit_rows(logits, sent, words.base, words.num_edited, workspace, self._edits, has_lists=words.has_lists)
            draw_rows(
                logits, self._edits.logits, sent, words.num_rows, workspace, self._filters, drawn,
                has_filters=words.has_filters, has_random=words.has_random,
            )  # fmt: skip
        return bool(parts)

    def _sent(self, sampling: SamplingBatch) -> list[tuple[Words, Tensor]]:
        """Words of all rows to draw, a few rows at a time, on the device."""
        parts = (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps)
        columns = tuple(part.tobytes() for part in parts)
        edited = edited_rows(sampling)
        if edited:
            self._columns = ()
            return self._send(sampling, edited, self._edits.max_num_rows)
        if columns != self._columns:
            self._known = self._send(sampling, edited, self._filters.max_num_rows)
            self._columns = columns
        return self._known

    def _send(self, sampling: SamplingBatch, edited: set[int], at_once: int) -> list[tuple[Words, Tensor]]:
        rows = rows_to_draw(sampling, edited)
        parts = [
            words_of(sampling, rows[start : start + at_once], edited, self._vocab_size)
            for start in range(0, len(rows), at_once)
        ]
        return [(part, send_words(part.parts, self._device)) for part in parts]
