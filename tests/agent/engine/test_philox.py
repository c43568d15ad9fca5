"""Known answers of Philox4x32-10, and the counter layout."""

import numpy as np
import pytest

from dragoman_agent.engine import philox
from dragoman_agent.engine.philox import UniformsAhead, philox4x32, uniforms

# Random123's published known-answer vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()]], np.uint32)


def drawn(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Of counters [n, 4] and keys [n, 2] of 32 bits: results [n, 4]."""
    return np.stack(philox4x32(*counter.T.astype(np.uint64), *key.T.astype(np.uint64)), axis=1).astype(np.uint32)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_known_answers(counter: str, key: str, result: str) -> None:
    assert np.array_equal(drawn(words(counter), words(key)), words(result))


def test_rows_are_independent() -> None:
    counters, keys = (np.vstack([words(vector[i]) for vector in KNOWN]) for i in (0, 1))
    assert np.array_equal(drawn(counters, keys), np.vstack([words(vector[2]) for vector in KNOWN]))


def test_uniform_uses_seed_choice_and_cursor() -> None:
    def one(seed: int, choice: int, cursor: int) -> float:
        return float(
            uniforms(np.array([seed], np.uint64), np.array([choice], np.int32), np.array([cursor], np.int32))[0]
        )

    expected = ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    assert one(0, 0, 0) == expected
    others = {one(1, 0, 0), one(1 << 32, 0, 0), one((1 << 64) - 1, 0, 0), one(0, 1, 0), one(0, 0, 1)}
    assert len(others | {expected}) == 6


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count = 100_000
    values = uniforms(np.full(count, 7, np.uint64), np.zeros(count, np.int32), np.arange(count, dtype=np.int32))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    observed = np.bincount((values * 100).astype(int), minlength=100)
    chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
    assert chi_square < 99 + 5 * np.sqrt(2 * 99)


def rows_of(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    seeds = rng.integers(0, 1 << 64, num, dtype=np.uint64)
    return seeds, rng.integers(0, 4, num, dtype=np.int32), rng.integers(0, 1000, num, dtype=np.int32)


@pytest.mark.parametrize("num", [0, 1, 7])
def test_uniforms_drawn_ahead_are_those_drawn_alone(num: int) -> None:
    """Over steps that go on as foreseen and ones that do not: other rows, cursors, choices, seeds, order, counts."""
    rng = np.random.default_rng(num)
    ahead = UniformsAhead()
    rows = rows_of(num)
    for step in range(700):
        assert np.array_equal(ahead.draw(*rows), uniforms(*rows)), step
        seeds, choices, cursors = (part.copy() for part in rows)
        cursors += 1
        change = int(rng.integers(0, 60)) if step % 300 > 240 else -1  # long stretches without one too
        if num and change < 6:
            at = int(rng.integers(num))
            if change == 0:
                seeds[at] ^= np.uint64(1 << 40)
            elif change == 1:
                choices[at] += 1
            elif change == 2:
                cursors[at] -= 1  # the same step again
            elif change == 3:
                order = rng.permutation(num)
                seeds, choices, cursors = seeds[order], choices[order], cursors[order]
        rows = (seeds[at:], choices[at:], cursors[at:]) if num and change == 4 else (seeds, choices, cursors)
        if change == 5:
            rows = rows_of(num, step)
        num = len(rows[0])


def test_uniforms_are_drawn_ahead_only_while_the_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counted(*rows: np.ndarray) -> np.ndarray:
        drawn.append(rows[2].size)
        return uniforms(*rows)

    monkeypatch.setattr(philox, "uniforms", counted)
    ahead = UniformsAhead()
    seeds, choices, cursors = rows_of(3)
    for step in range(1 + 4 + 16 + 64 + 128 + 128):
        ahead.draw(seeds, choices, cursors + np.int32(step))
    assert drawn == [3, 12, 48, 192, 384, 384]
    drawn.clear()
    for step in range(5):
        ahead.draw(seeds + np.uint64(step + 1), choices, cursors)
    assert drawn == [3] * 5
    drawn.clear()
    seeds, choices, cursors = rows_of(1000)
    for step in range(1 + 4 + 8 + 8):
        ahead.draw(seeds, choices, cursors + np.int32(step))
    assert drawn == [1000, 4000, 8000, 8000], "no more than the caches hold"


def test_uniforms_of_several_steps_are_those_of_each() -> None:
    seeds, choices, cursors = rows_of(5)
    steps = np.array([cursors, cursors + np.int32(1), cursors[::-1]])
    expected = [uniforms(seeds, choices, step) for step in steps]
    assert np.array_equal(uniforms(seeds, choices, steps), expected)


def test_what_the_caller_does_to_its_arrays_changes_no_draw() -> None:
    ahead = UniformsAhead()
    seeds, choices, cursors = rows_of(2)
    for _ in range(8):
        expected = uniforms(seeds, choices, cursors)
        assert np.array_equal(ahead.draw(seeds, choices, cursors), expected)
        cursors += 1
