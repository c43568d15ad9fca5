"""What a request will cost in seconds, learnt from how earlier predictions turned out.

Two layers: weights that turn what the step model and the live load say into an expectation, and an interval around it
from the latest ratios of observed to expected, those of requests of its length (intervals.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dragoman_controller.intervals import NUM_LENGTHS, Estimate, Lengths, Quantiles, Ratios, RatiosByLength
from dragoman_controller.recent import MAX_NUM_AGENTS, RecentAgents
from dragoman_controller.regression import Regression
from dragoman_controller.tuples import new

# Weights follow at most so many observations a second of one agent: more would cost time and teach nothing new.
_MIN_LEARN_SECONDS = 0.05
# The pace is a mean over so many outcomes, and begins as if so many had been as the step model says.
_PACE_OUTCOMES, _PRIOR_OUTCOMES = 500, 4
_MAX_LOG_PACE = math.log(32.0)
_MIN_SECONDS = 1e-6
_OVERHEAD_SECONDS, _STEP_SECONDS = 0.05, 0.02


class Quote(NamedTuple):
    """What is promised of a request, from its acceptance at the agent: predictions, and the ratios around each."""

    ttft_seconds: float
    tpot_seconds: float
    finish_seconds: float
    ratios: Ratios

    @property
    def time_to_first_token(self) -> Estimate:
        """Seconds to the first token."""
        return self.ratios[0].estimate(self.ttft_seconds)

    @property
    def time_per_output_token(self) -> Estimate:
        """Mean seconds between two tokens."""
        return self.ratios[1].estimate(self.tpot_seconds)

    @property
    def finish(self) -> Estimate:
        """Seconds to the last token."""
        return self.ratios[2].estimate(self.finish_seconds)


class Features(NamedTuple):
    """What a prediction is made of, in seconds.

    `queue`: the work in front at the agent, its prompts at the speed learnt; the others are not learnt. `prefill`: of the own
    uncached tokens. `step`: of the batch that runs now, which a newcomer waits for, 0 where nothing runs. `decode`: of the
    batch it joins, by the step model. `observed_step`: of the agent's last second, prefills of others
    and whatever else slows it included; `decode` where nothing ran.
    """

    queue: float
    prefill: float
    step: float
    decode: float
    observed_step: float


NO_FEATURES = Features(0.0, 0.0, 0.0, 0.0, 0.0)


class Weights(NamedTuple):
    """Expected seconds: TTFT = queue, prefill and step, TPOT = decode and observed_step, each times its weight.

    `overhead` is what every first token takes whatever there is to do, in units of 50 ms; `usual_step` what every step
    takes whatever runs with it, in units of 20 ms: batches come and go while a request lasts.
    """

    queue: float = 1.0
    prefill: float = 1.0
    step: float = 1.0
    overhead: float = 0.0
    decode: float = 1.0
    observed_step: float = 0.0
    usual_step: float = 0.0


class Judgement(NamedTuple):
    """How one quoted quantity turned out: relative error of the expected value, and whether it lay in p10 to p90."""

    quantity: str
    error: float
    inside: bool


class Went(NamedTuple):
    """How a request went: seconds from acceptance, and tokens of its longest choice."""

    ttft_seconds: float
    total_seconds: float
    output_tokens: int

    @property
    def tpot_seconds(self) -> float:
        """Between two tokens; 0 where there was only one."""
        return (self.total_seconds - self.ttft_seconds) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class AgentQuotes:
    """Quotes of one agent and what was learnt of it."""

    __slots__ = (
        "_decode",
        "_first",
        "_learnt_at",
        "_log_pace",
        "_num_learnt",
        "_own",
        "_windows",
        "pace",
        "weights",
    )

    def __init__(self) -> None:
        self._windows = RatiosByLength(), RatiosByLength(), RatiosByLength()
        self._begin()
        self.weights = Weights()
        self._first = Regression(self.weights[:4])
        self._decode = Regression(self.weights[4:])
        self._learnt_at = float("-inf")
        self.pace = 1.0
        """Seconds of its requests over those of the step model, in the long run: what placement goes by. Within 1/32 and 32."""
        self._log_pace, self._num_learnt = 0.0, 0

    def expect(self, features: Features) -> tuple[float, float]:
        """Expected TTFT and TPOT, which intervals are put around."""
        queue, prefill, step, decode, observed_step = features
        weights = self.weights
        # Written out, in the order of Regression.predict.
        ttft = weights[0] * queue + weights[1] * prefill + weights[2] * step + weights[3] * _OVERHEAD_SECONDS
        tpot = weights[4] * decode + weights[5] * observed_step + weights[6] * _STEP_SECONDS
        return ttft if ttft > _MIN_SECONDS else _MIN_SECONDS, tpot if tpot > _MIN_SECONDS else _MIN_SECONDS

    def _begin(self) -> None:
        self._own: tuple[list[Quantiles | None], ...] = tuple([[None] * NUM_LENGTHS for _ in range(3)])
        """Of TTFT, TPOT and finish, by length, where enough is known of it."""

    def ratios_of(self, lengths: Lengths) -> Ratios:
        """What quotes of requests of these lengths are made with now."""
        prompt, output = lengths
        (ttft_own, tpot_own, finish_own), (ttft, tpot, finish) = self._own, self._windows
        return (
            ttft_own[prompt] or ttft.all.quantiles,
            tpot_own[output] or tpot.all.quantiles,
            finish_own[output] or finish.all.quantiles,
        )

    def quote(self, ttft_seconds: float, tpot_seconds: float, finish_seconds: float, lengths: Lengths) -> Quote:
        """The quote from what the weights expect."""
        return new(Quote, (ttft_seconds, tpot_seconds, finish_seconds, self.ratios_of(lengths)))

    def judge(
        self,
        predicted: tuple[float, float, float],
        outcome: Went,
        lengths: Lengths,
        promised: Ratios | None = None,
    ) -> list[Judgement]:
        """Takes an outcome; `predicted` are TTFT, TPOT and finish as the weights had it, for the tokens that came.

        `lengths`: as it was quoted. `promised`: the ratios of the quote; None where they are those of now.
        """
        judgements = []
        ttft_seconds, total_seconds, num_tokens = outcome
        tpot_seconds = (total_seconds - ttft_seconds) / (num_tokens - 1) if num_tokens > 1 else 0.0
        prompt, output = lengths
        said = promised or self.ratios_of(lengths)
        for number, (quantity, length, expected, observed) in enumerate((
            ("time_to_first_token", prompt, predicted[0], ttft_seconds),
            ("time_per_output_token", output, predicted[1], tpot_seconds),
            ("finish", output, predicted[2], total_seconds),
        )):  # fmt: skip
            if expected <= 0 or observed <= 0:
                continue
            p10, p50, p90 = said[number]
            middle = expected * p50
            is_inside = expected * p10 <= observed <= expected * p90
            judgements.append(new(Judgement, (quantity, abs(observed - middle) / middle, is_inside)))
            window = self._windows[number]
            window.add(length, observed / expected, said[number])
            self._own[number][length] = window.own(length)
        return judgements

    def learn(self, features: Features, outcome: Went, now: float) -> bool:
        """Moves pace and weights towards an outcome; False for the weights where one was learnt from just before."""
        self._learn_pace(features, outcome)
        if now - self._learnt_at < _MIN_LEARN_SECONDS:
            return False
        self._learnt_at = now
        if outcome.ttft_seconds > 0:
            self._first.learn((*features[:3], _OVERHEAD_SECONDS), outcome.ttft_seconds)
        tpot_seconds = outcome.tpot_seconds
        if tpot_seconds > 0:
            self._decode.learn((*features[3:], _STEP_SECONDS), tpot_seconds)
        self.weights = Weights(*self._first.weights, *self._decode.weights)
        return True

    def _learn_pace(self, features: Features, outcome: Went) -> None:
        """Slowly: equal agents must not look unequal for the chance in their last few requests."""
        queue, prefill, step, decode, _ = features
        _, total_seconds, num_tokens = outcome
        modelled = queue + prefill + step + (num_tokens - 1 if num_tokens > 1 else 0) * decode
        if modelled <= 0 or total_seconds <= 0:
            return
        if self._num_learnt < _PACE_OUTCOMES:
            self._num_learnt += 1
        error = math.log(total_seconds / modelled) - self._log_pace
        error = _MAX_LOG_PACE if error > _MAX_LOG_PACE else -_MAX_LOG_PACE if error < -_MAX_LOG_PACE else error
        self._log_pace += error / (self._num_learnt + _PRIOR_OUTCOMES)
        self._log_pace = max(min(self._log_pace, _MAX_LOG_PACE), -_MAX_LOG_PACE)
        self.pace = math.exp(self._log_pace)


class Quotes:
    """Owns what was learnt of each agent. An agent keeps it over restarts: its device is the same.

    Names may come and go for as long as the controller runs: of more than `max_num_agents`, the one not asked about
    for longest is forgotten and starts with the prior again.
    """

    def __init__(self, max_num_agents: int = MAX_NUM_AGENTS, make: Callable[[], AgentQuotes] = AgentQuotes) -> None:
        """`make`: what is known of an agent that nothing is known of."""
        self._agents: RecentAgents[AgentQuotes] = RecentAgents(max_num_agents)
        self._make = make

    def of(self, agent_id: str) -> AgentQuotes:
        """The quotes of an agent."""
        quotes = self._agents.get(agent_id)
        if quotes is None:
            quotes = self._make()
            self._agents.put(agent_id, quotes)
        return quotes
