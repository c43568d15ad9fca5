"""The events a request sends: how a sampled token, an end and a set of log-probabilities look on the wire."""

from __future__ import annotations

import math

from dragoman_agent.device.base import StepResult
from dragoman_agent.engine.messages import Delta, Embedded, Failed, Finished, LogprobEntry, Opened
from dragoman_agent.engine.output import Piece
from dragoman_agent.engine.request import Request, Sequence

Event = Opened | Delta | Finished | Failed | Embedded


def closing_delta(sequence: Sequence, piece: Piece) -> Delta:
    """The end of a choice that comes without a token."""
    return Delta(
        sequence.request.request_id,
        sequence.choice,
        sequence.num_sent,
        [],
        piece.text,
        [],
        piece.finish,
        piece.stop_string,
        piece.stop_token_id,
    )


def last_delta(sequence: Sequence, token_id: int) -> Delta:
    """The token that ends a stream with a key, already taken. A stop wins over the length when both come with it."""
    is_stop = token_id in sequence.stop_ids and len(sequence.token_ids) > sequence.min_num_tokens
    return Delta(
        sequence.request.request_id,
        sequence.choice,
        sequence.num_output - 1,
        [token_id],
        "",
        finish="stop" if is_stop else "length",
        stop_token_id=token_id if is_stop else None,
    )


def finished(request: Request, now: float, *, cancelled: bool) -> Finished:
    """The end of a request; times that never came count until `now`."""
    started = now if request.started is None else request.started
    first_token = now if request.first_token is None else request.first_token
    return Finished(
        request.request_id,
        len(request.prompt_ids),
        request.num_cached_tokens,
        request.num_sent_tokens,
        started - request.arrived,
        first_token - request.arrived,
        now - request.arrived,
        cancelled,
    )


def failed(request: Request, reason: int, message: str, param: str = "") -> Failed:
    """The failure of a request that was accepted."""
    return Failed(
        request.request_id,
        int(reason),
        message,
        len(request.prompt_ids),
        request.num_cached_tokens,
        request.num_sent_tokens,
        param,
    )


def logprob_entries(result: StepResult, index: int, num_logprobs: int) -> list[LogprobEntry]:
    """The entry of one sampled token, finite values only; empty when none was asked for."""
    if num_logprobs < 0 or result.logprobs is None:
        return []
    top: list[tuple[int, float]] = []
    if num_logprobs and result.top_ids is not None and result.top_logprobs is not None:
        ids = result.top_ids[index, :num_logprobs].tolist()
        values = result.top_logprobs[index, :num_logprobs].tolist()
        top = [(i, v) for i, v in zip(ids, values, strict=True) if math.isfinite(v)]
    return [LogprobEntry(int(result.token_ids[index]), float(result.logprobs[index]), top)]
