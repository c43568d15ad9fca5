"""What was delivered of one generation, choice by choice: the cursors, and the state that a resume sends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dragoman.results import Choice, Token, TokenLogprob, finish_reason_of, token_logprob_of
from dragoman.v1 import generation_service_pb2 as pb
from dragoman.v1.tokens_pb2 import TokenIds


class CursorGapError(Exception):
    """A delta that does not continue its choice: taking it would lose or double a token."""


@dataclass(slots=True)
class _Delivered:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: pb.ChoiceFinish | None = None


class Progress:
    """Owner of the delivered tokens of one generation."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_Delivered() for _ in range(num_choices)]

    @property
    def num_tokens(self) -> int:
        """Tokens delivered over all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self._choices)

    def take(self, delta: pb.GenerationDelta) -> Token | None:
        """The delta as an item of the stream, or None when all of it was delivered before.

        Raises CursorGapError when it leaves tokens out, overlaps in part (its text cannot be cut), comes after the
        end of its choice, or is of a choice that was not asked for. Nothing is taken then.
        """
        if delta.choice_index >= len(self._choices):
            raise CursorGapError(f"choice {delta.choice_index} was not asked for")
        choice = self._choices[delta.choice_index]
        expected = len(choice.token_ids)
        if delta.cursor + len(delta.token_ids) <= expected and (delta.cursor < expected or choice.finish is not None):
            return None
        if delta.cursor != expected:
            raise CursorGapError(f"choice {delta.choice_index}: cursor {delta.cursor} came where {expected} is next")
        if choice.finish is not None:
            raise CursorGapError(f"choice {delta.choice_index}: tokens came after its end")
        logprobs = tuple(token_logprob_of(entry) for entry in delta.logprobs)
        choice.token_ids.extend(delta.token_ids)
        choice.texts.append(delta.text)
        choice.logprobs.extend(logprobs)
        finish_reason = None
        if delta.HasField("finish"):
            choice.finish = delta.finish
            finish_reason = finish_reason_of(delta.finish.reason)
        return Token(delta.text, tuple(delta.token_ids), delta.cursor, delta.choice_index, logprobs, finish_reason)

    def resume_state(self, *, attempt: int, origin_epoch: int, seed: int) -> pb.ResumeState:
        """What the next agent needs to go on exactly where the last one was cut."""
        choices = [
            pb.ChoiceProgress(choice_index=index, token_ids=TokenIds(ids=choice.token_ids), finish=choice.finish)
            for index, choice in enumerate(self._choices)
        ]
        return pb.ResumeState(attempt=attempt, origin_epoch=origin_epoch, seed=seed, choices=choices)

    def choices(self) -> tuple[Choice, ...]:
        """The outputs. To be called when `complete`."""
        return tuple(_choice_of(choice) for choice in self._choices)


def _choice_of(delivered: _Delivered) -> Choice:
    finish = delivered.finish or pb.ChoiceFinish()
    kind = finish.WhichOneof("stop")
    return Choice(
        text="".join(delivered.texts),
        token_ids=tuple(delivered.token_ids),
        finish_reason=finish_reason_of(finish.reason),
        stop_string=finish.stop_string if kind == "stop_string" else None,
        stop_token_id=finish.stop_token_id if kind == "stop_token_id" else None,
        logprobs=tuple(delivered.logprobs),
    )
