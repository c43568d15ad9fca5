"""The parts of sampling that are not one number a row: penalties, biases, allowed and banned ids, grammar masks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Float32Array, Int32Array, Penalties, SamplingBatch
from dragoman_agent.engine.constraints import banned_ids
from dragoman_agent.engine.grammar import Form, GrammarMasks
from dragoman_agent.engine.request import Sequence, has_penalties


class SparseSampling:
    """Owns, by row of the persistent batch, the sequences that have such parts and the arrays made of them once."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._rows: dict[int, _SparseRow] = {}
        self._is_sparse = np.zeros(num_rows, dtype=np.bool_)
        self._masks = GrammarMasks(vocab_size)

    def __bool__(self) -> bool:
        """Whether any row has some."""
        return bool(self._rows)

    def load(self, sequence: Sequence) -> None:
        """The row of `sequence` is its own from now on. Said again for each part of its prompt, which changes nothing."""
        row = sequence.row
        self._is_sparse[row] = is_sparse = _is_sparse(sequence)
        if not is_sparse:
            self._rows.pop(row, None)
        elif row not in self._rows or self._rows[row].sequence is not sequence:
            self._rows[row] = _SparseRow(sequence)

    def add(self, batch: SamplingBatch, rows: npt.NDArray[np.intp], wanted: list[bool] | None = None) -> None:
        """Add to `batch` what `rows` have. Rows that are not `wanted` have lost their sequence: what they draw is dropped."""
        masked: list[int] = []
        forms: list[Form] = []
        for index in np.flatnonzero(self._is_sparse[rows]).tolist():
            if wanted is not None and not wanted[index]:
                continue
            row = self._rows[int(rows[index])]
            row.add(batch, index)
            if row.sequence.form is not None:
                masked.append(index)
                forms.append(row.sequence.form)
        if not masked:
            return
        batch.masked_rows = np.array(masked, dtype=np.int32)
        batch.masks = self._masks.fill(forms)
        for form, mask, index in zip(forms, batch.masks, masked, strict=True):
            if not self._rows[int(rows[index])].sequence.request.stop.eos_token_ids:
                form.hide_end(mask)


class _SparseRow:
    """What one sequence has; only its output grows."""

    __slots__ = ("_allowed", "_bans", "_bias", "_num_output", "_output_ids", "_prompt_ids", "sequence")

    def __init__(self, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.sequence = sequence
        self._bias: tuple[Int32Array, Float32Array] | None = None
        self._allowed: Int32Array | None = None
        self._prompt_ids: Int32Array | None = None
        self._output_ids = np.zeros(64, dtype=np.int32)  # the first of them, and room
        self._num_output = 0
        self._bans = bool(sampling.bad_word_ids or sequence.request.stop.masked_until_min)
        if sampling.logit_bias:
            ids, added = list(sampling.logit_bias), list(sampling.logit_bias.values())
            self._bias = np.array(ids, dtype=np.int32), np.array(added, dtype=np.float32)
        if sampling.allowed_token_ids:
            self._allowed = np.array(sampling.allowed_token_ids, dtype=np.int32)
        if has_penalties(sampling):
            self._prompt_ids = np.array(sequence.request.prompt_ids, dtype=np.int32)

    def add(self, batch: SamplingBatch, index: int) -> None:
        """Add it as row `index`; its mask is the caller's."""
        sampling = self.sequence.request.sampling
        if self._prompt_ids is not None:
            batch.penalties[index] = Penalties(
                repetition=sampling.repetition_penalty,
                presence=sampling.presence_penalty,
                frequency=sampling.frequency_penalty,
                prompt_ids=self._prompt_ids,
                output_ids=self._output(),
            )
        if self._bias is not None:
            batch.logit_bias[index] = self._bias
        if self._allowed is not None:
            batch.allowed[index] = self._allowed
        if self._bans and (banned := banned_ids(self.sequence)):
            batch.banned[index] = np.array(banned, dtype=np.int32)

    def _output(self) -> Int32Array:
        """The output so far. Later tokens are written behind it, so it stays as it is for who has it."""
        first, known = self._num_output, self.sequence.num_output
        if known > len(self._output_ids):
            grown = np.zeros(2 * known, dtype=np.int32)
            grown[:first] = self._output_ids[:first]
            self._output_ids = grown
        self._output_ids[first:known] = self.sequence.token_ids[self.sequence.num_prompt + first :]
        self._num_output = known
        return self._output_ids[:known]


def _is_sparse(sequence: Sequence) -> bool:
    """Whether a sequence has sampling parts that are not one number."""
    sampling = sequence.request.sampling
    return bool(
        has_penalties(sampling)
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_word_ids
        or sequence.request.stop.masked_until_min
        or sequence.form is not None
    )
