"""What a client gets back: tokens while they come, results when they are complete. Frozen, without protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dragoman.durations import seconds_of
from dragoman.v1 import admission_service_pb2, generation_service_pb2

FinishReason = Literal["stop", "length", "cancelled"]

_FINISH_REASONS: dict[int, FinishReason] = {
    generation_service_pb2.FINISH_REASON_STOP: "stop",
    generation_service_pb2.FINISH_REASON_LENGTH: "length",
    generation_service_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token: natural logarithm, finite. `top` holds the best alternatives, best first."""

    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """New tokens of one choice; one item of a stream.

    `text` is what became certain with them and may be empty while a character or a stop string is incomplete.
    `cursor` is the position of the first of them in the output of the choice. `finish_reason` is set with the last.
    """

    text: str
    token_ids: tuple[int, ...]
    cursor: int
    choice: int
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens used. Output tokens are counted over all choices."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. The first three are the finishing agent's own, from acceptance, and None where it did not say.

    The `client_` ones are seen by the client from its call on, with admission and resumes in them.
    """

    queue_seconds: float | None
    time_to_first_token_seconds: float | None
    total_seconds: float | None
    client_time_to_first_token_seconds: float | None
    client_total_seconds: float


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A complete generation. `text`, `token_ids` and `finish_reason` are those of the first choice."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    seed: int
    agent_id: str
    num_resumes: int
    quote: Quote | None
    prompt_logprobs: tuple[TokenLogprob, ...]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Estimate:
    """One prediction in seconds: the middle, and the interval that holds eight in ten outcomes."""

    expected_seconds: float
    p10_seconds: float
    p90_seconds: float


@dataclass(frozen=True, slots=True)
class Quote:
    """What the controller predicts for a request, and the agent it would go to."""

    time_to_first_token: Estimate
    time_per_output_token: Estimate
    finish: Estimate
    agent_id: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector of Euclidean norm 1 an input, in order."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int


def finish_reason_of(reason: int) -> FinishReason:
    """The name of a finish reason; a number this version does not know reads as "stop"."""
    return _FINISH_REASONS.get(reason, "stop")


def token_logprob_of(entry: generation_service_pb2.TokenLogprob) -> TokenLogprob:
    """A received log-probability."""
    top = tuple(TokenLogprob(other.token_id, other.logprob, other.token_bytes) for other in entry.top)
    return TokenLogprob(entry.token_id, entry.logprob, entry.token_bytes, top)


def quote_of(quote: admission_service_pb2.LatencyQuote, agent_id: str) -> Quote:
    """A received quote."""
    return Quote(
        _estimate_of(quote.time_to_first_token),
        _estimate_of(quote.time_per_output_token),
        _estimate_of(quote.finish),
        agent_id,
    )


def _estimate_of(estimate: admission_service_pb2.LatencyEstimate) -> Estimate:
    return Estimate(seconds_of(estimate.expected), seconds_of(estimate.p10), seconds_of(estimate.p90))
