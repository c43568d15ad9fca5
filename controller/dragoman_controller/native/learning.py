"""What was learnt of an agent, kept and moved by C++: AgentQuotes with other insides."""

from __future__ import annotations

import ctypes
import struct
from array import array

from dragoman_controller.native.library import Library
from dragoman_controller.quote import PRIOR_RATIOS, AgentQuotes, Features, Judgement, Quantiles, Ratios, Weights, Went
from dragoman_controller.tuples import new

# As struct Outcome, Verdict, Lesson and Taught of learn.cpp.
_OUTCOME, _VERDICT, _LESSON, _TAUGHT = (struct.Struct(f"<{count}d") for count in (15, 15, 10, 8))
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
    __slots__ = ("_address", "_learning", "_state")

    def __init__(self, learning: Learning) -> None:
        # Without the windows and weights of the Python code.
        self._learning = learning
        self._state = bytearray(learning.library.learnt_bytes)
        self._address = _address(self._state)
        prior = array("d", PRIOR_RATIOS)
        learning.library.begin_learning(self._address, prior.buffer_info()[0], len(prior))
        self.weights, self.pace = Weights(), 1.0
        self.ratios = (Quantiles(_NOTHING, _NOTHING, _NOTHING),) * 3
        self.judge((_NOTHING,) * 3, Went(_NOTHING, _NOTHING, 0))  # tells the quantiles of the prior

    def judge(
        self, predicted: tuple[float, float, float], outcome: Went, promised: Ratios | None = None
    ) -> list[Judgement]:
        """See AgentQuotes."""
        ttft, total, num_tokens = outcome
        tpot = (total - ttft) / (num_tokens - 1) if num_tokens > 1 else _NOTHING
        learning = self._learning
        ttft_said, tpot_said, finish_said = promised or self.ratios
        _OUTCOME.pack_into(learning.given, 0, *predicted, ttft, tpot, total, *ttft_said, *tpot_said, *finish_said)
        learning.library.judge(self._address, *learning.addresses)
        e0, i0, e1, i1, e2, i2, *quantiles = _VERDICT.unpack_from(learning.told)
        self.ratios = (
            new(Quantiles, quantiles[:3]),
            new(Quantiles, quantiles[3:6]),
            new(Quantiles, quantiles[6:]),
        )
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
