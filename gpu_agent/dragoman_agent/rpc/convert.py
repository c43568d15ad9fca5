"""Engine events to protocol messages. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dragoman.durations import duration_of
from dragoman.v1 import generation_service_pb2
from dragoman_agent.engine.messages import Delta, Failed, Finished, LogprobEntry

TokenBytes = Callable[[int], bytes]
_FINISH = {
    "stop": generation_service_pb2.FINISH_REASON_STOP,
    "length": generation_service_pb2.FINISH_REASON_LENGTH,
    "cancelled": generation_service_pb2.FINISH_REASON_CANCELLED,
}


def fill_delta(message: generation_service_pb2.GenerationDelta, delta: Delta, token_bytes: TokenBytes) -> None:
    """Write one delta into a message, which a frame already holds: no copy of it is made."""
    ids = delta.token_ids
    if len(ids) == 1:  # nearly always, and a third quicker so
        message.token_ids.append(ids[0])
    else:
        message.token_ids.extend(ids)
    message.cursor = delta.cursor
    if delta.text:
        message.text = delta.text
    if delta.choice:
        message.choice_index = delta.choice
    for entry in delta.logprobs:
        _fill_logprob(message.logprobs.add(), entry, token_bytes)
    if delta.finish:
        message.finish.reason = _FINISH[delta.finish]
        if delta.stop_string is not None:
            message.finish.stop_string = delta.stop_string
        elif delta.stop_token_id is not None:
            message.finish.stop_token_id = delta.stop_token_id


def merge_deltas(first: Delta, second: Delta) -> Delta | None:
    """One delta for two that follow each other in one choice; None where they do not."""
    if (
        first.choice != second.choice
        or first.finish
        or first.cursor + len(first.token_ids) != second.cursor
        or first.request_id != second.request_id
    ):
        return None
    return Delta(
        request_id=first.request_id,
        choice=first.choice,
        cursor=first.cursor,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        logprobs=first.logprobs + second.logprobs,
        finish=second.finish,
        stop_string=second.stop_string,
        stop_token_id=second.stop_token_id,
    )


def fill_response(
    message: generation_service_pb2.GenerateResponse, event: Delta | Finished | Failed, token_bytes: TokenBytes
) -> None:
    """Write one event of an accepted request."""
    if type(event) is Delta:
        fill_delta(message.delta, event, token_bytes)
    elif type(event) is Finished:
        finished = message.finished
        _fill_usage(finished.usage, event)
        finished.time_to_first_token.CopyFrom(duration_of(event.first_token_seconds))
        finished.queue_time.CopyFrom(duration_of(event.queue_seconds))
        finished.total_time.CopyFrom(duration_of(event.total_seconds))
    elif type(event) is Failed:
        message.failed.error.reason = event.reason  # type: ignore[assignment]
        message.failed.error.message = event.message
        if event.param:
            message.failed.error.metadata["param"] = event.param
        _fill_usage(message.failed.usage, event)


def _fill_usage(usage: generation_service_pb2.Usage, event: Finished | Failed) -> None:
    usage.prompt_tokens = event.prompt_tokens
    usage.cached_tokens = event.cached_tokens
    usage.output_tokens = event.output_tokens


def _fill_logprob(message: generation_service_pb2.TokenLogprob, entry: LogprobEntry, token_bytes: TokenBytes) -> None:
    message.token_id = entry.token_id
    message.logprob = entry.logprob
    message.token_bytes = token_bytes(entry.token_id)
    for token_id, logprob in entry.top:
        message.top.add(token_id=token_id, logprob=logprob, token_bytes=token_bytes(token_id))
