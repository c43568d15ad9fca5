"""What is to be admitted, as the controller knows it: sizes and hashes, never the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from dragoman.errors import DragomanError
from dragoman.limits import MAX_EMBED_TOKENS, MAX_ID_BYTES, MAX_NUM_CHOICES, MAX_NUM_INPUTS, MAX_RESUMES
from dragoman.prefix_hash import UNIT_TOKENS
from dragoman.v1 import error_pb2
from dragoman_controller.agent_view import Shape
from dragoman_controller.tuples import new

DIGEST_BYTES = 32
# English text runs at about four bytes a token; used only to predict where the client has no tokenizer.
BYTES_PER_TOKEN_GUESS = 4.0
# A tokenizer may put a few tokens of its own around a text.
NUM_ADDED_TOKENS = 16
# Output predicted where the client sets no limit; a whole context would make every agent look alike.
DEFAULT_OUTPUT_TOKENS = 256


class Priority(IntEnum):
    """Class of service; the numbers are those of dragoman.v1.Priority."""

    INTERACTIVE = 1
    STANDARD = 2
    BATCH = 3

    @property
    def label(self) -> str:
        """Such as "interactive"."""
        return self.name.lower()


class Resume(NamedTuple):
    """The stream a request continues; `from_cursor` counts the delivered tokens of all choices."""

    origin_agent_id: str
    origin_epoch: int
    attempt: int
    from_cursor: int


@dataclass(slots=True, eq=False)
class AdmissionRequest:
    """One request. Its block hashes are let go once it is placed. `prompt_tokens` is None where the client has no tokenizer; `prompt_bytes` bounds it then."""

    request_id: str
    model: str
    prompt_tokens: int | None
    prompt_bytes: int
    prompt_digest: bytes
    max_output_tokens: int
    block_hashes: Sequence[int] = ()
    priority: Priority = Priority.STANDARD
    tenant: str = ""
    num_choices: int = 1
    num_inputs: int = 0  # to embed; 0 is a generation. Tokens and bytes of the prompt are over all of them
    max_queue_wait_seconds: float | None = None
    deadline_seconds: float | None = None
    resume: Resume | None = None
    key: tuple[str, str, int] = field(init=False)
    """What makes two asks the same ask: a resume of a request is another one."""

    def __post_init__(self) -> None:
        self.key = self.tenant, self.request_id, self.resume.attempt if self.resume else 0

    def predicted_prompt_tokens(self, bytes_per_token: float = BYTES_PER_TOKEN_GUESS) -> int:
        """Tokens the agent is expected to find in the context at its start: prompt and delivered tokens."""
        delivered = self.resume.from_cursor if self.resume is not None else 0
        if self.prompt_tokens is not None:
            return self.prompt_tokens + delivered
        return max(1, int(self.prompt_bytes / bytes_per_token)) + delivered

    def min_context_tokens(self) -> int:
        """Least context that can hold the request: its prompt and one token, of inputs to embed the longest that there must
        be. 1 where only bytes are known."""
        if self.prompt_tokens is None:
            return 1
        return -(-self.prompt_tokens // self.num_inputs) if self.num_inputs else self.prompt_tokens + 1

    def max_prompt_tokens(self, max_context_tokens: int) -> int:
        """Upper bound of the prompt that the ticket allows."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        if not self.num_inputs:
            return min(self.prompt_bytes + NUM_ADDED_TOKENS, max_context_tokens)
        most = min(max_context_tokens * self.num_inputs, MAX_EMBED_TOKENS)
        return min(self.prompt_bytes + NUM_ADDED_TOKENS * self.num_inputs, most)

    def output_tokens(self, max_context_tokens: int) -> int:
        """Tokens a choice may generate: the asked-for number, clamped to the room the prompt leaves."""
        wanted, room = self.max_output_tokens, max_context_tokens - (self.prompt_tokens or 0)
        room = room if room > 1 else 1
        return wanted if 0 < wanted < room else room

    def predicted_output_tokens(self) -> int:
        """Tokens still to come in each choice, for the score; the same for every agent."""
        num_tokens = self.max_output_tokens or DEFAULT_OUTPUT_TOKENS
        if self.resume is None:
            return num_tokens
        return max(num_tokens - self.resume.from_cursor // self.num_choices, 1)

    @property
    def deadline_budget_ms(self) -> int:
        """The deadline of a ticket; 0 is none."""
        seconds = self.deadline_seconds
        return 0 if seconds is None else min(max(int(seconds * 1000), 1), (1 << 32) - 1)


def shape_of(request: AdmissionRequest, prompt_tokens: int, largest_context: int) -> Shape:
    """What placement needs of a request of `prompt_tokens`, as far as they are known.

    No request is taken for longer than any agent's context: an absurd claim must not weigh on an agent's view.
    """
    min_context, most_output = request.min_context_tokens(), request.max_output_tokens
    output_tokens = request.predicted_output_tokens()
    # With comparisons: it is made for each request.
    return new(
        Shape,
        (
            prompt_tokens if prompt_tokens < largest_context else largest_context,
            output_tokens if output_tokens < largest_context else largest_context,
            request.num_choices,
            min_context,
            min_context - 1 + (most_output if most_output > 1 else 1),
        ),
    )


def validate(request: AdmissionRequest, needs_id: bool = True) -> None:
    """Raises DragomanError naming the field in metadata "param"."""
    if needs_id and not request.request_id:
        raise _invalid("request_id", "request_id is empty: send a UUID, so that asking again gives the same answer")
    for name, value in (("request_id", request.request_id), ("tenant", request.tenant), ("model", request.model)):
        if len(value) > MAX_ID_BYTES or (not value.isascii() and len(value.encode()) > MAX_ID_BYTES):
            raise _invalid(name, f"{name} has {len(value.encode())} bytes, at most {MAX_ID_BYTES} are allowed")
        if not value.isprintable():
            raise _invalid(
                name, f"{name} holds a character that cannot be printed, and it appears in logs: leave it out"
            )
    if not request.model:
        raise _invalid("model", "model is empty: name the model to run")
    if request.prompt_tokens is None and not request.prompt_bytes:
        raise _invalid("prompt_bytes", "prompt_tokens and prompt_bytes are both unset: send one, it bounds the prompt")
    if request.prompt_tokens == 0:
        raise _invalid("prompt_tokens", "prompt_tokens is 0: a prompt needs at least one token")
    if len(request.prompt_digest) != DIGEST_BYTES:
        raise _invalid(
            "prompt_digest",
            f"prompt_digest has {len(request.prompt_digest)} bytes, must be the {DIGEST_BYTES} of the prompt's SHA-256",
        )
    if request.num_inputs > MAX_NUM_INPUTS:
        raise _invalid("num_inputs", f"num_inputs is {request.num_inputs}, at most {MAX_NUM_INPUTS} are allowed")
    if request.num_inputs and (request.prompt_tokens or 0) > MAX_EMBED_TOKENS:
        raise _invalid(
            "prompt_tokens",
            f"prompt_tokens is {request.prompt_tokens}, at most {MAX_EMBED_TOKENS} may be embedded in one request: send several",
        )
    if request.num_choices > MAX_NUM_CHOICES:
        raise _invalid("num_choices", f"num_choices is {request.num_choices}, at most {MAX_NUM_CHOICES} are allowed")
    if request.prompt_tokens is not None and len(request.block_hashes) * UNIT_TOKENS > request.prompt_tokens:
        raise _invalid(
            "block_hashes",
            f"block_hashes has {len(request.block_hashes)} for {request.prompt_tokens} prompt tokens: "
            f"one for each full unit of {UNIT_TOKENS} tokens is possible",
        )
    if request.max_queue_wait_seconds is not None and request.max_queue_wait_seconds < 0:
        raise _invalid(
            "max_queue_wait", f"max_queue_wait is {request.max_queue_wait_seconds:g} s, must not be negative"
        )
    if request.deadline_seconds is not None and request.deadline_seconds <= 0:
        raise _invalid(
            "deadline",
            f"deadline is {request.deadline_seconds:g} s, must be over 0: leave it out for a request without one",
        )
    if request.resume is not None:
        _validate_resume(request.resume)


def _validate_resume(resume: Resume) -> None:
    if resume.attempt == 0:
        raise _invalid("resume.attempt", "resume.attempt is 0: the first resume is attempt 1")
    if resume.attempt > MAX_RESUMES:
        raise DragomanError(
            error_pb2.ERROR_REASON_RESUME_REFUSED,
            f"resume attempt {resume.attempt} is refused: a stream is resumed at most {MAX_RESUMES} times, "
            "start the request again",
            metadata={"param": "resume.attempt", "limit": str(MAX_RESUMES)},
        )


def _invalid(param: str, message: str) -> DragomanError:
    return DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, message, metadata={"param": param})
