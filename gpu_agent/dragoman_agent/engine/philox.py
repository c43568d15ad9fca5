"""Philox4x32-10 counter-based random numbers on the host (Salmon et al., SC 2011, doi 10.1145/2063384.2063405)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import Int32Array

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Ten rounds. `counter` [n, 4], `key` [n, 2]; returns [n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(seeds: UInt64Array, choices: Int32Array, cursors: Int32Array) -> npt.NDArray[np.float64]:
    """One uniform of 53 bits in [0, 1) for each row, [n].

    Key = the seed's low and high words, counter = (cursor, choice, 0, 0); the uniform is
    ((word 0 << 32 | word 1) >> 11) / 2**53, so it depends on nothing but its own request.
    """
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0], counter[:, 1] = cursors, choices
    key = np.stack((seeds & _LOW, seeds >> _SHIFT), axis=1).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits: UInt64Array = ((words[:, 0] << _SHIFT) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
