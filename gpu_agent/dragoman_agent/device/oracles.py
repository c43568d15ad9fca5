"""What the null device writes instead of computing: deterministic answers from what it finds in its arena.

Every oracle gives one token a sampled row. `narrow` then applies what sampling asks for, in a documented order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dragoman_agent.device.base import DeviceError, Int32Array, SamplingBatch

UInt64Array = npt.NDArray[np.uint64]

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz etaoinsh", dtype=np.uint8).astype(np.int32)
_FORCING_BIAS = 100.0
_CLOSERS = (
    *b'"}]',
    *range(256, 259),
)  # the last are the null model's control tokens, of which a mask lets the end pass


@dataclass(slots=True)
class Context:
    """What an oracle may look at: one row a sampled sequence."""

    states: UInt64Array  # [num_samples] hash of the whole prefix, read through the block tables
    last_tokens: Int32Array  # [num_samples] last token of the context, read through the block tables
    prompt_lens: Int32Array  # [num_samples]
    cursors: Int32Array  # [num_samples] output tokens before this one
    read_token: Callable[[Int32Array], Int32Array]  # positions [num_samples] -> tokens, through the block tables


Oracle = Callable[[Context], Int32Array]


def mix(values: UInt64Array) -> UInt64Array:
    """Spread each value over 64 bits: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_oracle(context: Context) -> Int32Array:
    """A letter or a space, chosen by the hash of the whole prefix (and by the seed, where temperature is over 0)."""
    picks = (mix(context.states) >> np.uint64(33)) % np.uint64(len(LETTERS))
    return LETTERS[picks.astype(np.intp)]


def echo_oracle(context: Context) -> Int32Array:
    """The prompt's tokens again and again, read from the arena."""
    return context.read_token(context.cursors % context.prompt_lens)


def alphabet_oracle(context: Context) -> Int32Array:
    """The letter after the context's last letter, Z then A again; after anything else, A."""
    last = context.last_tokens
    upper = np.where((last >= 65) & (last <= 90), 65 + (last - 64) % 26, 65)
    return np.where((last >= 97) & (last <= 122), 97 + (last - 96) % 26, upper).astype(np.int32)


def script_oracle(token_ids: Int32Array, end_token_id: int) -> Oracle:
    """The tokens of a list by cursor, then the end token for ever."""
    padded = np.append(token_ids, np.int32(end_token_id)).astype(np.int32)

    def read(context: Context) -> Int32Array:
        tokens: Int32Array = padded[np.minimum(context.cursors, len(padded) - 1)]
        return tokens

    return read


_NAMED: dict[str, Oracle] = {"hash": hash_oracle, "echo": echo_oracle, "alphabet": alphabet_oracle}


def make_oracle(name: str, vocab_size: int, end_token_id: int) -> Oracle:
    """The oracle of `hash`, `echo`, `alphabet` or `script:FILE`. Raises DeviceError for another name or a bad file.

    A script file is a JSON list of token ids, or a JSON string, which stands for the ids of its UTF-8 bytes.
    """
    if name in _NAMED:
        return _NAMED[name]
    kind, _, path = name.partition(":")
    if kind != "script" or not path:
        raise DeviceError(f"null oracle {name!r} is not known; use hash, echo, alphabet or script:FILE")
    try:
        value = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DeviceError(f"null oracle: {path} cannot be read ({error.strerror or error}); check the path") from None
    except ValueError as error:
        raise DeviceError(f"null oracle: {path} is not JSON ({error}); write a list of token ids or a string") from None
    ids = list(value.encode()) if isinstance(value, str) else value
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise DeviceError(f"null oracle: {path} must hold a string, or a list of token ids under {vocab_size}")
    return script_oracle(np.array(ids, dtype=np.int32), end_token_id)


def seeded(states: UInt64Array, sampling: SamplingBatch) -> UInt64Array:
    """States with seed, choice and cursor stirred in where temperature is over 0; greedy rows as they are."""
    hot = sampling.temperatures > 0
    if not hot.any():
        return states
    draw = mix(sampling.seeds + np.uint64(0x9E3779B97F4A7C15))
    counters: UInt64Array = (sampling.choices.astype(np.uint64) << np.uint64(32)) + sampling.cursors.astype(np.uint64)
    draw = mix(draw ^ counters)
    return np.where(hot, states ^ draw, states)


def narrow(token_ids: Int32Array, states: UInt64Array, sampling: SamplingBatch, vocab_size: int) -> list[int]:
    """Apply logit bias, allowed and banned ids and grammar masks to the oracle's tokens, in place; rows with no id left.

    A bias of +100 makes its id the answer (the smallest such id of several); one of -100 bans it. Otherwise the oracle's
    token stands if it may; if not, one of the ids that may come is chosen by the state: letters first, then any. In a row
    with a mask, every third state closes what is open: the first of `"`, `}`, `]` and the end token that may come wins.
    """
    masks = {
        int(row): _ids_of(mask, vocab_size) for row, mask in zip(sampling.masked_rows, sampling.masks, strict=True)
    }
    empty: list[int] = []
    rows = sampling.logit_bias.keys() | sampling.allowed.keys() | sampling.banned.keys() | masks.keys()
    for row in sorted(rows):
        banned = {int(i) for i in sampling.banned.get(row, ())}
        forced = []
        ids, added = sampling.logit_bias.get(row, ((), ()))
        for token_id, bias in zip(ids, added, strict=True):
            if bias >= _FORCING_BIAS:
                forced.append(int(token_id))
            elif bias <= -_FORCING_BIAS:
                banned.add(int(token_id))
        may = [int(i) for i in sampling.allowed[row]] if row in sampling.allowed else None
        if row in masks:
            allowed = may
            may = masks[row] if allowed is None else [i for i in masks[row] if i in allowed]
        forced = [i for i in forced if i not in banned and (may is None or i in may)]
        if forced:
            token_ids[row] = min(forced)
            continue
        closers = [i for i in _CLOSERS if row in masks and may is not None and i in may and i not in banned]
        if closers and mix(states[row : row + 1] + np.uint64(1))[0] % np.uint64(3) == 0:
            token_ids[row] = closers[0]
            continue
        if int(token_ids[row]) not in banned and (may is None or int(token_ids[row]) in may):
            continue
        pools = [_printable(may), may] if may is not None else [LETTERS.tolist(), list(range(vocab_size))]
        candidates = next((left for pool in pools if (left := [i for i in pool if i not in banned])), None)
        if candidates is None:
            empty.append(row)
        else:
            token_ids[row] = candidates[int(mix(states[row : row + 1])[0] % np.uint64(len(candidates)))]
    return empty


def _ids_of(mask: Int32Array, vocab_size: int) -> list[int]:
    """Ids whose bit is set in a packed mask."""
    octets = np.ascontiguousarray(mask, dtype="<i4").view(np.uint8)
    ids: list[int] = np.flatnonzero(np.unpackbits(octets, count=vocab_size, bitorder="little")).tolist()
    return ids


def _printable(ids: list[int]) -> list[int]:
    """Those of printable ASCII; of a byte vocabulary, the others rarely make valid text."""
    return [i for i in ids if 0x20 <= i < 0x7F]


def logprobs(
    token_ids: Int32Array, states: UInt64Array, num_logprobs: int, vocab_size: int
) -> tuple[npt.NDArray[np.float32], Int32Array, npt.NDArray[np.float32]]:
    """Made-up but fixed and finite log-probabilities: of the tokens, and the best `num_logprobs` ids, best first."""
    own = -0.05 - (mix(states) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 25)
    ranks = np.arange(num_logprobs, dtype=np.int32)
    top_ids = (token_ids[:, None] + ranks * 7) % np.int32(vocab_size)
    return own, top_ids, own[:, None] - ranks.astype(np.float32)
