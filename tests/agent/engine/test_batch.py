"""Arrays of a step, seen from the side of the device: against the state of the sequences they were made of."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import numpy as np

from dragoman_agent.device.base import SamplingBatch, StepBatch, StepHandle, StepResult
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine.messages import StartEmbed


class Watched(NullDevice):
    """Checks each batch against the running sequences and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[StepBatch] = []
        self.samplings: list[SamplingBatch] = []  # as they were at last: parts may come late
        self.engine: Any = None
        self.rows: dict[Any, int] = {}  # of the step before

    def submit(self, batch: StepBatch) -> StepHandle:
        self.batches.append(batch)
        if self.engine is not None:
            self._compare(batch)
        return super().submit(batch)

    def _answer(self, batch: StepBatch, sampling: SamplingBatch, page_size: int) -> StepResult:
        self.samplings.append(sampling)
        return super()._answer(batch, sampling, page_size)

    def _compare(self, batch: StepBatch) -> None:
        page_size = self._plan.page_size
        rows: dict[Any, int] = {}
        by_tables = {tuple(s.block_table): s for s in self.engine.core.scheduler.running}
        for i, length in enumerate(batch.context_lens.tolist()):
            used = batch.block_tables[i][batch.block_tables[i] > 0].tolist()
            own = [s for table, s in by_tables.items() if list(table[: len(used)]) == used]
            assert own, "the table of a row is the table of a running sequence"
            sequence = own[0]
            new = batch.token_ids[batch.query_starts[i] : batch.query_starts[i + 1]].tolist()
            if new[0] < 0:
                assert new == [-1 - self.rows[sequence]] and length == len(sequence.token_ids) + 1
            else:
                assert new == sequence.token_ids[length - len(new) : length]
            positions = batch.positions[batch.query_starts[i] : batch.query_starts[i + 1]].tolist()
            assert positions == list(range(length - len(new), length))
            slots = batch.slot_mapping[batch.query_starts[i] : batch.query_starts[i + 1]].tolist()
            assert slots == [sequence.block_table[p // page_size] * page_size + p % page_size for p in positions]
            assert batch.prompt_lens[i] == sequence.num_prompt
            sampled = i in batch.sample_seqs
            assert (sampled or i in batch.pool_seqs) == (length == len(sequence.token_ids) + (new[0] < 0))
            assert not sampled or not sequence.request.is_embedding
            if sampled:
                rows[sequence] = batch.sample_seqs.tolist().index(i)
        self.rows = rows


def test_arrays_say_what_the_sequences_are(lab: Any, start: Any) -> None:
    device = Watched()
    engine = lab(device=device, page_size=16, num_blocks=30, max_batch_tokens=50, max_num_seqs=5)
    device.engine = engine
    commands = [start(f"r{i}", [i + 1] * (20 + 11 * i), 40 + i, num_choices=1 + i % 2) for i in range(8)]
    engine.run(*commands, StartEmbed("e", [77] * 60), StartEmbed("one", [78]))
    assert engine.steps[-1].load.preemptions > 0
    assert any(len(b.query_starts) - 1 > len(b.sample_seqs) for b in device.batches)
    assert all(b.block_tables.dtype == b.positions.dtype == b.slot_mapping.dtype == np.int32 for b in device.batches)


class Keeper(NullDevice):
    """Keeps each batch, in which nobody can write any more, and what it was when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[StepBatch, StepBatch]] = []

    def submit(self, batch: StepBatch) -> StepHandle:
        self.batches.append((batch, copy.deepcopy(batch)))
        for array in arrays_of(batch):
            array.flags.writeable = False
        return super().submit(batch)


def arrays_of(value: Any) -> list[np.ndarray]:
    """Every array of a batch, in a fixed order."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        return [array for key in sorted(value) for array in arrays_of(value[key])]
    if isinstance(value, tuple):
        return [array for part in value for array in arrays_of(part)]
    if dataclasses.is_dataclass(value):
        return [array for field in dataclasses.fields(value) for array in arrays_of(getattr(value, field.name))]
    return []


def test_a_batch_stays_as_it_was(lab: Any, start: Any) -> None:
    """A device reads a batch while the engine builds the next one, which may share what is the same in both."""
    device = Keeper()
    engine = lab(device=device, page_size=16, num_blocks=30, max_batch_tokens=50, max_num_seqs=5)
    rich = {"temperature": 0.7, "repetition_penalty": 1.1, "logit_bias": {65: 1.0}, "allowed_token_ids": [65, 66, 67]}
    commands = [start(f"r{i}", [i + 1] * (20 + 11 * i), 30, **(rich if i % 2 else {})) for i in range(6)]
    engine.run(*commands, StartEmbed("e", [77] * 60))
    assert len(device.batches) > 30
    for batch, before in device.batches:
        for now, then in zip(arrays_of(batch), arrays_of(before), strict=True):
            np.testing.assert_array_equal(now, then)
    alone = [
        (one, other)
        for (one, _), (other, _) in itertools.pairwise(device.batches)
        if one.sample_seqs is other.sample_seqs
    ]
    assert len(alone) > 10, "steps of decode alone are made of the step before"
    assert all(len(other.token_ids) == len(one.context_lens) == len(one.sample_seqs) for one, other in alone)


def test_sampling_rows_follow_their_requests(lab: Any, start: Any) -> None:
    device = Watched()
    engine = lab(device=device)
    fields = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": (1 << 64) - 3, "num_logprobs": 2}
    plain = start("plain", "ab", 6)
    rich = start(
        "rich",
        "abc",
        4,
        num_choices=2,
        logit_bias={65: 1.5},
        allowed_token_ids=[65, 66, 67],
        masked_until_min=[66],
        min_output_tokens=2,
        repetition_penalty=1.2,
        **fields,
    )
    engine.run(plain, rich)
    batch = device.batches[2]
    sampling = device.samplings[2]
    order = sorted(range(3), key=lambda i: (batch.prompt_lens[batch.sample_seqs[i]], sampling.choices[i]))
    row, first, second = order
    assert sampling.temperatures[row] == 0 and sampling.num_logprobs[row] == -1 and row not in sampling.allowed
    for i, choice in ((first, 0), (second, 1)):
        assert sampling.seeds[i] == (1 << 64) - 3 and sampling.choices[i] == choice
        assert np.isclose(
            [sampling.temperatures[i], sampling.top_ps[i], sampling.min_ps[i]], [0.7, 0.9, 0.1], atol=1e-6
        ).all()
        assert sampling.top_ks[i] == 5 and sampling.num_logprobs[i] == 2
        assert sampling.allowed[i].tolist() == [65, 66, 67]
        assert sampling.logit_bias[i][0].tolist() == [65] and sampling.logit_bias[i][1].tolist() == [1.5]
        assert (i in sampling.banned) == (sampling.cursors[i] < 2)
        penalties = sampling.penalties[i]
        assert penalties.prompt_ids.tolist() == list(b"abc")
        assert len(penalties.output_ids) == sampling.cursors[i]
    device.batches.clear()
    engine.run(*(start(f"later {i}", "ab", 3) for i in range(4)))
    for batch in device.batches:
        later = batch.sampling
        assert not (later.penalties or later.allowed or later.logit_bias or later.banned), "rows carry nothing over"
