"""The kernels that draw rows with filters and edits, under Triton's interpreter, beside the host's sampler; run by test_cuda_redraw.py.

python -m tests.agent.device.redraw_interpreted      JSON: what differs, by check; an empty list where nothing does
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.agent.engine.sampling_cases import make_batch, packed

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.device.cuda_redraw import Redraw
from dragoman_agent.engine.host_sampler import HostSampler
from dragoman_agent.engine.philox import uniforms
from dragoman_agent.pal import planner_memory
from dragoman_kernels.triton import edits, filters
from dragoman_kernels.triton.filters import Drawn
from dragoman_kernels.triton.sampling import SamplingWorkspace, sample_rows

CPU = torch.device("cpu")
FEW = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Rig:
    """Kernels that know nothing of the step before but what is kept between steps."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.workspace = SamplingWorkspace(num_rows, vocab_size, CPU)
        self.redraw = Redraw(num_rows, vocab_size, CPU)

    def draw(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[bool]]:
        """Ids and whether each row is finite, of `logits` in any type."""
        drawn = Drawn(
            torch.from_numpy(batch.temperatures),
            torch.from_numpy(uniforms(batch.seeds, batch.choices, batch.cursors)),
            *torch.full((2, len(logits)), -1, dtype=torch.int32),
        )
        before = logits.clone()
        sample_rows(logits, drawn.temperatures, drawn.uniforms, self.workspace, drawn.token_ids, drawn.finite)
        self.redraw.draw(logits, batch, self.workspace, drawn)
        assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7)), "logits were changed"
        assert not self.redraw._edits.marks.any(), "marks are left"
        return drawn.token_ids.tolist(), (drawn.finite == 1).tolist()


def by_host(logits: torch.Tensor, batch: SamplingBatch) -> tuple[list[int], list[bool]]:
    """As the host's sampler draws."""
    found = HostSampler(logits.shape[1]).sample(logits.float().numpy(), batch)
    return found.token_ids.tolist(), found.finite.tolist()


def edits_of(rng: np.random.Generator, num: int, vocab: int) -> dict[str, Any]:
    """Any kinds of edits in any rows; lists repeat tokens, and may be empty or leave nothing."""

    def ids(most: int) -> np.ndarray:
        return rng.integers(0, vocab, int(rng.integers(0, most)), dtype=np.int32)

    def rows() -> list[int]:
        return [int(row) for row in range(num) if rng.random() < 0.4]

    masked = np.array(rows(), np.int32)
    made: dict[str, Any] = {
        "penalties": {row: Penalties(rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2), ids(90), ids(90)) for row in rows()},
        "logit_bias": {row: (some := ids(30), rng.normal(0, 3, len(some)).astype(np.float32)) for row in rows()},
        "banned": {row: ids(40) for row in rows()},
        "allowed": {row: ids(2 * vocab) for row in rows()},
        "masked_rows": masked, "masks": packed(rng.random((len(masked), vocab)) < rng.choice([0.01, 0.8])),
    }  # fmt: skip
    return {name: value for name, value in made.items() if rng.random() < 0.5 or name.startswith("mask")}


def problem(logits: torch.Tensor, batch: SamplingBatch, rig: Rig, label: object) -> list[str]:
    """What differs from the host."""
    (ids, finite), (wanted, wanted_finite) = rig.draw(logits, batch), by_host(logits, batch)
    return [
        f"{label} row {row}: {ids[row]} {finite[row]}, not {wanted[row]} {wanted_finite[row]}"
        for row in range(len(ids))
        if (ids[row], finite[row]) != (wanted[row], wanted_finite[row])
    ]


def any_batch() -> list[str]:
    """Filters of all kinds, with edits and odd logits or without, from peaked, flat and tied logits."""
    found: list[str] = []
    rigs: dict[tuple[int, int], Rig] = {}

    @seed(1)
    @FEW
    @given(
        st.integers(0, 2**32), st.sampled_from([1, 3, 6]), st.sampled_from([33, 300, 5000]),
        st.sampled_from([0.0, 0.001, 0.5, 3.0, 12.0]), st.booleans(), st.sampled_from([torch.float16, torch.float32]),
    )  # fmt: skip
    def look(number: int, num: int, vocab: int, scale: float, is_edited: bool, dtype: torch.dtype) -> None:
        rng = np.random.default_rng(number)
        logits = (torch.from_numpy(rng.normal(0, 1, (num, vocab))) * scale).to(dtype)
        if rng.random() < 0.3:
            logits = (logits * 2).round() / 2  # ties
        for odd in (float("nan"), float("inf"), float("-inf")):
            if rng.random() < 0.15:
                logits[rng.integers(num), rng.integers(vocab)] = odd
        batch = make_batch(
            num, temperature=rng.choice([0.0, 1e-6, 0.3, 1.0, 1.7, 40.0], num), top_k=rng.choice([0, 1, 7, 40, 4000, 10**6], num),
            top_p=rng.choice([1.0, 0.999, 0.9, 0.3, 0.0], num), min_p=rng.choice([0.0, 0.0, 0.02, 1.0], num),
            seed=rng.integers(0, 2**63, num), cursor=rng.integers(0, 9, num), **edits_of(rng, num, vocab) if is_edited else {},
        )  # fmt: skip
        rig = rigs.setdefault((num, vocab), Rig(num, vocab))
        found.extend(problem(logits, batch, rig, (number, num, vocab, scale, is_edited, dtype)))

    look()
    return found


def many_candidates() -> list[str]:
    """More of them than are looked at at once, whose range shrinks in their place."""
    rng = np.random.default_rng(5)
    num, vocab = 5, 9000
    logits = torch.from_numpy(rng.normal(0, 0.7, (num, vocab))).float()
    batch = make_batch(
        num,
        top_p=[0.9, 0.5, 1.0, 0.8, 0.99],
        top_k=[0, 0, 3000, 5000, 0],
        seed=np.arange(num),
        temperature=[1, 0.5, 2, 1, 9],
    )
    return problem(logits, batch, Rig(num, vocab), "many")


def both_zeros() -> list[str]:
    """One value in two signs ties with itself, also what is too small to be told from it."""
    num, vocab = 12, 200
    logits = torch.zeros(num, vocab)
    logits[:, 3::2] = -0.0
    logits[6:, 4::4] = -1e-42
    batch = make_batch(num, top_k=[1, 3, 0] * 4, top_p=[1.0, 0.5, 0.1] * 4, temperature=4000.0, cursor=np.arange(num))
    return problem(logits, batch, Rig(num, vocab), "zeros")


def alone_and_among_others() -> list[str]:
    """A row draws the same token whatever is beside it, also where a step's rows are drawn a few at a time."""
    rng = np.random.default_rng(6)
    num, vocab = 11, 400
    logits = torch.from_numpy(rng.normal(0, 2, (num, vocab))).half()
    columns = {"temperature": 0.9, "seed": 3}
    sparse = {"banned": {row: rng.integers(0, vocab, 30).astype(np.int32) for row in range(0, num, 2)}}
    together = make_batch(num, cursor=np.arange(num), top_p=[0.8, 1.0] * 5 + [0.9], **columns, **sparse)
    rig = Rig(num, vocab)
    rig.redraw._filters.max_num_rows, rig.redraw._edits.max_num_rows = 4, 3
    ids, _ = rig.draw(logits, together)
    found = [] if ids == by_host(logits, together)[0] else ["together"]
    small = Rig(1, vocab)
    for row in range(num):
        own = {"banned": {0: sparse["banned"][row]}} if row in sparse["banned"] else {}
        one = make_batch(1, cursor=row, top_p=together.top_ps[row], **columns, **own)
        if small.draw(logits[row : row + 1], one)[0] != [ids[row]]:
            found.append(f"row {row} alone")
    return found


def steps_that_go_on() -> list[str]:
    """What was sent for the step before is used again where the same arrays come again, and only then."""
    rng = np.random.default_rng(7)
    num, vocab, found = 3, 300, []
    rig = Rig(num, vocab)
    batch = make_batch(num, top_k=[5, 0, 9], top_p=[1.0, 0.7, 0.9])
    changes: list[dict[str, Any]] = [
        {}, {}, {"top_ks": np.array([1, 2, 3], np.int32)}, {"banned": {1: np.arange(200, dtype=np.int32)}}, {"banned": {}},
    ]  # fmt: skip
    for step, change in enumerate(changes):
        sent = rig.redraw._known
        for name, value in {"cursors": batch.cursors + 1, **change}.items():
            setattr(batch, name, value)
        logits = torch.from_numpy(rng.normal(0, 2, (num, vocab))).float()
        found += problem(logits, batch, rig, f"step {step}")
        if (rig.redraw._known is sent) != (step in (1, 3)):
            found.append(f"step {step}: sent again or not")
    return found


def refusals() -> list[str]:
    """Tokens outside the vocabulary and narrow masks."""
    ids = np.array([3, 10], np.int32)
    one = np.ones(2, np.float32)
    cases: list[dict[str, Any]] = [
        {"banned": {0: ids}}, {"allowed": {0: ids}}, {"logit_bias": {0: (ids, one)}}, {"penalties": {0: Penalties(1.1, 0, 0, ids, ids)}},
        {"banned": {0: -ids}}, {"masked_rows": np.zeros(1, np.int32), "masks": np.zeros((1, 0), np.int32)},
    ]  # fmt: skip
    said = []
    for case in cases:
        try:
            Rig(1, 10).draw(torch.zeros(1, 10), make_batch(1, **case))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def memory() -> list[str]:
    """What is taken once lies within the plan's workspace, beside what scoring 64 rows by torch takes (24 bytes a logit, counted)."""
    vocab, found = 151_936, []
    for num in (1, 8, 64, 200, 256, 1024):
        redraw = Redraw(num, vocab, torch.device("meta"))
        kept = sum(
            tensor.nbytes
            for owner in (redraw._filters, redraw._edits)
            for tensor in vars(owner).values()
            if isinstance(tensor, torch.Tensor)
        )
        rows = min(num, planner_memory._SCORED_ROWS)
        if kept + 35 * rows * vocab > planner_memory._SCORED_BYTES * rows * vocab:
            found.append(f"{num} rows: {kept} bytes")
    return found


def main() -> None:
    """Every check."""
    filters._TILE, edits._CHUNK = 256, 32
    checks = (any_batch, many_candidates, both_zeros, alone_and_among_others, steps_that_go_on, refusals, memory)
    print(json.dumps({check.__name__: check() for check in checks}))


if __name__ == "__main__":
    main()
