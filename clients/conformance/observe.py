"""Turns the lines of a runner into one document a call, and holds what must be true of every stream. Pure."""

from __future__ import annotations

import math
from typing import Any

ENDS = ("result", "error", "cancelled", "value")


class BadRunnerError(Exception):
    """A runner that does not keep the protocol; the message says which line and why."""


def documents(lines: list[dict[str, Any]], num_calls: int) -> list[dict[str, Any]]:
    """One document a call, in order. Raises BadRunnerError."""
    return [_document([line for line in lines if line.get("call") == index], index) for index in range(num_calls)]


def _document(lines: list[dict[str, Any]], index: int) -> dict[str, Any]:
    ends = [line for line in lines if line["event"] in ENDS]
    if len(ends) != 1:
        raise BadRunnerError(
            f"call {index} ended {len(ends)} times, not once: {[line['event'] for line in lines][-5:]}"
        )
    if lines[-1] is not ends[0]:
        raise BadRunnerError(f"call {index} went on after its end: {lines[-1]}")
    end = ends[0]
    tokens = [line for line in lines if line["event"] == "token"]
    document: dict[str, Any] = {
        "end": end["event"],
        "tokens": tokens,
        "num_tokens": sum(len(token["token_ids"]) for token in tokens),
        "seconds": end.get("seconds"),
        "streamed": _streamed(tokens),
    }
    if end["event"] == "error":
        document["error"] = {key: end.get(key) for key in _ERROR_KEYS}
    if end["event"] == "result":
        document["result"] = {key: value for key, value in end.items() if key not in ("event", "call")}
    if end["event"] == "value":
        document["value"] = end.get("value")
        _add_norms(document)
    document["problems"] = problems(document)
    return document


_ERROR_KEYS = ("reason", "message", "retryable", "retry_delay_seconds", "metadata", "http_status", "grpc_code")


def _streamed(tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    num_choices = 1 + max((token["choice"] for token in tokens), default=-1)
    return [
        {
            "text": "".join(token["text"] for token in tokens if token["choice"] == choice),
            "token_ids": [i for token in tokens if token["choice"] == choice for i in token["token_ids"]],
            "finish_reason": next(
                (token["finish_reason"] for token in reversed(tokens) if token["choice"] == choice), None
            ),
        }
        for choice in range(num_choices)
    ]


def _add_norms(document: dict[str, Any]) -> None:
    value = document["value"]
    if isinstance(value, dict) and isinstance(value.get("vectors"), list):
        document["norms"] = [math.sqrt(sum(x * x for x in vector)) for vector in value["vectors"]]
        document["widths"] = [len(vector) for vector in value["vectors"]]


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with a stream whatever the case: cursors, ends, and that the result is the sum of the stream."""
    found: list[str] = []
    following: dict[int, int] = {}
    ended: set[int] = set()
    for token in document["tokens"]:
        choice, cursor = token["choice"], token["cursor"]
        if cursor != following.get(choice, 0):
            found.append(f"choice {choice}: cursor {cursor} came where {following.get(choice, 0)} is next")
        if choice in ended:
            found.append(f"choice {choice}: a token came after its end")
        following[choice] = cursor + len(token["token_ids"])
        if token["finish_reason"] is not None:
            ended.add(choice)
    if document["end"] == "result":
        choices = document["result"].get("choices", [])
        for index, choice in enumerate(choices):
            if index >= len(document["streamed"]):
                found.append(f"choice {index} is in the result, and nothing of it was streamed")
                continue
            for key in ("text", "token_ids", "finish_reason"):
                if choice[key] != document["streamed"][index][key]:
                    found.append(f"choice {index}: {key} of the result is not what was streamed")
        if len(ended) != len(choices):
            found.append(f"{len(ended)} of {len(choices)} choices were streamed to their end")
    if "�" in "".join(choice["text"] for choice in document["streamed"]):
        found.append("U+FFFD in the text: a character was split between two items")
    return found
