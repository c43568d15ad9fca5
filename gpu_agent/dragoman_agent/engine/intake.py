"""Whether a request can run at all, and the words for those that cannot or did not."""

from __future__ import annotations

from collections.abc import Collection

from dragoman.v1 import error_pb2
from dragoman_agent.engine.messages import Failed, Start, StartEmbed
from dragoman_agent.engine.output import OutputStream, Piece, replay_ids
from dragoman_agent.engine.request import Request, Sequence
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

CREDIT_TIMEOUT_MESSAGE = (
    "the client granted no credit for 60 s, so the request was ended and its memory freed; "
    "read the stream and grant credit as tokens arrive, or resume from the last cursor"
)
NON_FINITE_MESSAGE = (
    "the model produced a logit that is not a number, so this request was ended and its cached blocks dropped; "
    "other requests are unharmed; if it happens again with this prompt, check the weights: dragoman models verify MODEL"
)


NOTHING_LEFT_MESSAGE = "grammar, allowed_token_ids, bad_words and min_output_tokens leave no token to sample between them; loosen one of them"


def refusal(message: Start | StartEmbed, live: Collection[str], capacity_tokens: int, plan: Plan) -> Failed | None:
    """Why a request can never run, or None. `capacity_tokens` is the longest sequence the plan allows."""

    def failed(reason: error_pb2.ErrorReason, text: str) -> Failed:
        return Failed(message.request_id, int(reason), text, len(message.prompt_ids))

    if message.request_id in live:
        return failed(
            error_pb2.ERROR_REASON_DUPLICATE_REQUEST,
            f"request {message.request_id!r} is under way already; give each request its own id",
        )
    if len(live) >= plan.max_num_seqs + plan.max_num_waiting:
        return failed(
            error_pb2.ERROR_REASON_QUEUE_FULL,
            f"{len(live)} requests are under way or waiting, the most this agent keeps; try again shortly",
        )
    if not message.prompt_ids:
        return failed(error_pb2.ERROR_REASON_INVALID_REQUEST, "the prompt has no tokens; send at least one")
    longest = len(message.prompt_ids)
    if isinstance(message, StartEmbed):
        over = longest > capacity_tokens
        wanted = "an embedding"
    else:
        invalid = _invalid_start(message)
        if invalid is not None:
            return failed(error_pb2.ERROR_REASON_INVALID_REQUEST, invalid)
        over = longest >= capacity_tokens
        wanted = f"{message.stop.max_output_tokens} output tokens"
    if over:
        return failed(
            error_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
            f"the prompt has {longest} tokens and asks for {wanted}, but this agent holds sequences of at most "
            f"{capacity_tokens} tokens, prompt and output together; shorten the prompt",
        )
    return None


def _invalid_start(message: Start) -> str | None:
    if message.num_choices < 1:
        return f"num_choices is {message.num_choices}; ask for at least one"
    if len(message.delivered) > message.num_choices:
        return f"{len(message.delivered)} choices were delivered but only {message.num_choices} are asked for"
    unknown = [choice for choice in message.finished_choices if not 0 <= choice < message.num_choices]
    if unknown:
        return f"choice {unknown[0]} is said to be finished but only {message.num_choices} are asked for"
    if message.stop.max_output_tokens < 1:
        return f"max_output_tokens is {message.stop.max_output_tokens}; ask for at least one"
    if message.key >= 0 and not message.is_plain:
        return "a request that needs its text or log-probabilities in the engine cannot have a key; leave it out"
    return None


def open_output(message: Start, sequence: Sequence, tokenizer: TextTokenizer) -> Piece:
    """Attach the output stream of a choice, with what was delivered before a resume replayed; its last piece.

    A choice with a key has no stream here: its ids alone say whether it has ended.
    """
    max_num_tokens = sequence.max_num_tokens - sequence.num_prompt
    if sequence.key >= 0:
        delivered = sequence.token_ids[sequence.num_prompt :]
        num_taken, piece = replay_ids(delivered, sequence.stop_ids, message.stop.min_output_tokens, max_num_tokens)
        del sequence.token_ids[sequence.num_prompt + num_taken :]
        return piece
    output = OutputStream(tokenizer, message.stop, max_num_tokens, skip_special_tokens=message.skip_special_tokens)
    sequence.output = output
    return output.replay(sequence.token_ids[sequence.num_prompt :])


def deadline_message(request: Request, now: float) -> str:
    """What happened to a request whose time is over."""
    state = "while it waited" if request.started is None else f"after {request.num_sent_tokens} tokens"
    seconds = now - request.arrived
    spent = f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
    return (
        f"the request's time was over {spent} after it came, {state}; "
        "allow more time, ask for fewer tokens, or send it to a less loaded agent"
    )
