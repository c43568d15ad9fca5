"""What was learnt of an agent, kept and moved by C++: AgentQuotes with other insides."""

from __future__ import annotations

import ctypes
import struct
from array import array

from dragoman_controller.intervals import PRIOR_RATIOS, Lengths, Quantiles, Ratios
from dragoman_controller.native.library import Library
from dragoman_controller.quote import AgentQuotes, Features, Judgement, Weights, Went
from dragoman_controller.tuples import new

# As struct Outcome, Verdict, Lesson and Taught of learn.cpp.
_OUTCOME = struct.Struct("<15d2q")
_VERDICT, _LESSON, _TAUGHT = (struct.Struct(f"<{count}d") for count in (27, 10, 8))
_NUM_TOLD = _VERDICT.size // 8
# Where a verdict has the quantiles of all requests and of those of one length, behind nine words of what was judged.
(_TTFT_ALL, _TPOT_ALL, _FINISH_ALL, _TTFT_OWN, _TPOT_OWN, _FINISH_OWN) = (
    slice(start, start + 3) for start in range(9, _NUM_TOLD, 3)
)
_NOTHING = 0.0


class Learning:
    """The functions of a library, and what is passed to them and back."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.given, self.told = bytearray(_OUTCOME.size), bytearray(_VERDICT.size)
        self.addresses = _address(self.given), _address(self.told)

    def make(self) -> AgentQuotes:
        """Of an agent that nothing is known of."""
        return _NativeAgentQuotes(self)


class _NativeAgentQuotes(AgentQuotes):
    __slots__ = ("_address", "_learning", "_state", "_told")

    def __init__(self, learning: Learning) -> None:
        # Without the windows and weights of the Python code.
        self._learning = learning
        self._state = bytearray(learning.library.learnt_bytes)
        self._address = _address(self._state)
        prior = array("d", PRIOR_RATIOS)
        learning.library.begin_learning(self._address, prior.buffer_info()[0], len(prior))
        self.weights, self.pace = Weights(), 1.0
        self._begin()
        self._told = (_NOTHING,) * _NUM_TOLD
        self.judge((_NOTHING,) * 3, Went(_NOTHING, _NOTHING, 0), (0, 0))  # tells the quantiles of the prior

    def ratios_of(self, lengths: Lengths) -> Ratios:
        """See AgentQuotes."""
        prompt, output = lengths
        (ttft_own, tpot_own, finish_own), told = self._own, self._told
        return (
            ttft_own[prompt] or new(Quantiles, told[_TTFT_ALL]),
            tpot_own[output] or new(Quantiles, told[_TPOT_ALL]),
            finish_own[output] or new(Quantiles, told[_FINISH_ALL]),
        )

    def judge(
        self,
        predicted: tuple[float, float, float],
        outcome: Went,
        lengths: Lengths,
        promised: Ratios | None = None,
    ) -> list[Judgement]:
        """See AgentQuotes."""
        ttft, total, num_tokens = outcome
        tpot = (total - ttft) / (num_tokens - 1) if num_tokens > 1 else _NOTHING
        learning = self._learning
        said = promised or self.ratios_of(lengths)
        _OUTCOME.pack_into(learning.given, 0, *predicted, ttft, tpot, total, *said[0], *said[1], *said[2], *lengths)
        learning.library.judge(self._address, *learning.addresses)
        self._told = told = _VERDICT.unpack_from(learning.told)
        e0, i0, e1, i1, e2, i2, own0, own1, own2 = told[:9]
        prompt, output = lengths
        ttft_own, tpot_own, finish_own = self._own
        if own0:
            ttft_own[prompt] = new(Quantiles, told[_TTFT_OWN])
        if own1:
            tpot_own[output] = new(Quantiles, told[_TPOT_OWN])
        if own2:
            finish_own[output] = new(Quantiles, told[_FINISH_OWN])
        judgements = []
        if e0 >= 0.0:
            judgements.append(new(Judgement, ("time_to_first_token", e0, i0 != 0.0)))
        if e1 >= 0.0:
            judgements.append(new(Judgement, ("time_per_output_token", e1, i1 != 0.0)))
        if e2 >= 0.0:
            judgements.append(new(Judgement, ("finish", e2, i2 != 0.0)))
        return judgements

    def learn(self, features: Features, outcome: Went, now: float) -> bool:
        """See AgentQuotes."""
        ttft, total, num_tokens = outcome
        tpot = (total - ttft) / (num_tokens - 1) if num_tokens > 1 else _NOTHING
        learning = self._learning
        _LESSON.pack_into(learning.given, 0, *features, ttft, tpot, total, num_tokens, now)
        has_moved = learning.library.learn(self._address, *learning.addresses)
        self.pace, *weights = _TAUGHT.unpack_from(learning.told)
        if has_moved:
            self.weights = new(Weights, weights)
        return bool(has_moved)


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
