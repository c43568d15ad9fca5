"""Philox4x32-10 counter-based random numbers on the host (Salmon et al., SC 2011, doi 10.1145/2063384.2063405)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Int32Array

UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_NONE = np.zeros(1, np.uint64)
_MAX_STEPS_AHEAD = 128
_MAX_DRAWN_AHEAD = 8192  # more at once leave the caches of a core
_GROWTH = 4  # of the steps drawn at once: a batch whose rows change each step must not pay for steps that never come


def philox4x32(
    c0: UInt64Array, c1: UInt64Array, c2: UInt64Array, c3: UInt64Array, k0: UInt64Array, k1: UInt64Array
) -> tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array]:
    """Ten rounds over the words of a counter (c0 to c3) and of a key, 32 bits each, of shapes that broadcast: what is the same
    for many counters is computed once. Returns the four words of the result.
    """
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ (c1 ^ k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ (c3 ^ k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: UInt64Array, choices: Int32Array, cursors: Int32Array) -> npt.NDArray[np.float64]:
    """One uniform of 53 bits in [0, 1) for each row, [n]; of several steps' `cursors` [steps, n] as many of each, [steps, n].

    Key = the seed's low and high words, counter = (cursor, choice, 0, 0); the uniform is
    ((word 0 << 32 | word 1) >> 11) / 2**53, so it depends on nothing but its own request.
    """
    cursor, choice = (array.astype(np.uint32).astype(np.uint64) for array in (cursors, choices))
    high, low, _, _ = philox4x32(cursor, choice, _NONE, _NONE, seeds & _LOW, seeds >> _SHIFT)
    bits: UInt64Array = ((high << _SHIFT) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class UniformsAhead:
    """`uniforms` of one step after another: while the same rows go on by a cursor each, several steps' are drawn at once.

    A draw is some 150 small numpy operations however few rows it has. Not to be used by two threads at once.
    """

    def __init__(self) -> None:
        self._rows: tuple[bytes, bytes] | None = None  # seeds and choices that `_drawn` is of
        self._cursors: Int32Array = np.zeros(0, np.int32)  # of the step that is foreseen
        self._drawn: npt.NDArray[np.float64] = np.zeros((0, 0))  # [steps, n]
        self._taken = 0  # steps of `_drawn`

    def draw(self, seeds: UInt64Array, choices: Int32Array, cursors: Int32Array) -> npt.NDArray[np.float64]:
        """What `uniforms` returns for the same, [n]; nothing may be written to it."""
        rows = (seeds.tobytes(), choices.tobytes())
        num_steps = len(self._drawn)
        if rows != self._rows or cursors.tobytes() != self._cursors.tobytes():
            self._rows, self._cursors = rows, cursors.copy()
            self._draw(seeds, choices, 1)
        elif self._taken == num_steps:
            most = min(_MAX_DRAWN_AHEAD // max(len(seeds), 1), _MAX_STEPS_AHEAD)
            self._draw(seeds, choices, max(min(num_steps * _GROWTH, most), 1))
        drawn: npt.NDArray[np.float64] = self._drawn[self._taken]
        self._taken += 1
        self._cursors += 1
        return drawn

    def _draw(self, seeds: UInt64Array, choices: Int32Array, num_steps: int) -> None:
        cursors = self._cursors + np.arange(num_steps, dtype=np.int32)[:, None]
        self._drawn, self._taken = uniforms(seeds, choices, cursors), 0
