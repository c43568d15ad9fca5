"""Arrays of penalties, biases and bans: what they say in each step, and that they are made once."""

from __future__ import annotations

from typing import Any

import numpy as np

from dragoman_agent.device.base import SamplingBatch
from dragoman_agent.engine.request import Sequence, new_request
from dragoman_agent.engine.sparse_sampling import SparseSampling

ROWS = np.array([2, 0], np.intp)


def sequence_of(start: Any, row: int, output: list[int], **fields: Any) -> Sequence:
    """A sequence that runs in `row` and has written `output`."""
    request = new_request(start("r", [5, 6, 7], 400, **fields), 0.0, bytes(32), 16, 1000)
    sequence = request.sequences[0]
    sequence.row = row
    sequence.token_ids += output
    return sequence


def added(sparse: SparseSampling, wanted: list[bool] | None = None) -> SamplingBatch:
    """What the rows 2 and 0 have, in this order."""
    zeros = np.zeros(2, np.int32)
    batch = SamplingBatch(*(np.zeros(2, np.float32),) * 4, zeros.astype(np.uint64), zeros, zeros, zeros)  # type: ignore[arg-type]
    sparse.add(batch, ROWS, wanted)
    return batch


def test_output_grows_and_what_was_given_stays(start: Any) -> None:
    sparse = SparseSampling(4, 256)
    sequence = sequence_of(start, 0, [9], repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25)
    sparse.load(sequence)
    given = []
    for length in range(1, 300):  # past the room that the array has at first, and several times past it
        part = added(sparse).penalties[1]
        given.append((part.output_ids, [9, *range(1, length)]))
        sequence.token_ids.append(length)
    assert (part.repetition, part.presence, part.frequency) == (1.2, 0.5, 0.25)
    assert part.prompt_ids.tolist() == [5, 6, 7] and part.prompt_ids.dtype == part.output_ids.dtype == np.int32
    assert all(ids.tolist() == wanted for ids, wanted in given)
    owners = {id(ids.base) for ids, _ in given}
    assert len(owners) < 5, "an array for each step would be made of all that was written before"


def test_what_stays_is_made_once(start: Any) -> None:
    sparse = SparseSampling(4, 256)
    sparse.load(sequence_of(start, 2, [], logit_bias={3: 1.5, 8: -2.0}, allowed_token_ids=[3, 8, 9]))
    one, other = added(sparse), added(sparse)
    assert one.allowed[0] is other.allowed[0] and one.logit_bias[0] is other.logit_bias[0]
    ids, values = one.logit_bias[0]
    assert ids.tolist() == [3, 8] and values.tolist() == [1.5, -2.0] and one.allowed[0].tolist() == [3, 8, 9]
    assert not one.penalties and not one.banned and not len(one.masked_rows)


def test_a_prompt_in_parts_makes_them_once_too(start: Any) -> None:
    sparse = SparseSampling(4, 256)
    sequence = sequence_of(start, 0, [9], frequency_penalty=0.5)
    sparse.load(sequence)
    before = added(sparse).penalties[1]
    sequence.token_ids.append(8)
    sparse.load(sequence)
    part = added(sparse).penalties[1]
    assert part.prompt_ids is before.prompt_ids and part.output_ids.tolist() == [9, 8]
    sparse.load(sequence_of(start, 0, [3], frequency_penalty=0.5))
    assert added(sparse).penalties[1].output_ids.tolist() == [3], "the row is another's"


def test_bans_follow_the_text(start: Any) -> None:
    sparse = SparseSampling(4, 256)
    sequence = sequence_of(start, 0, [], masked_until_min=[11], min_output_tokens=2, bad_word_ids=[[4], [20, 21]])
    sparse.load(sequence)
    found = []
    for token_id in (20, 1, 20):
        found.append(added(sparse).banned[1].tolist())
        sequence.token_ids.append(token_id)
    found.append(added(sparse).banned[1].tolist())
    assert found == [[11, 4], [11, 4, 21], [4], [4, 21]]


def test_a_row_has_what_its_sequence_has(start: Any) -> None:
    sparse = SparseSampling(4, 256)
    assert not sparse
    sparse.load(sequence_of(start, 0, [9], presence_penalty=0.5))
    assert sparse and list(added(sparse).penalties) == [1]
    assert not added(sparse, [True, False]).penalties, "its sequence is gone, and what it draws is dropped"
    sparse.load(sequence_of(start, 0, [1, 2], presence_penalty=1.0))
    part = added(sparse).penalties[1]
    assert part.output_ids.tolist() == [1, 2] and part.presence == 1.0
    sparse.load(sequence_of(start, 0, []))
    assert not sparse and not added(sparse).penalties
