"""Server-sent events, written by hand: fixed bytes around the JSON of the text. Never an `id:` line or an empty event."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def error_event(body: bytes) -> bytes:
    """The event of an error envelope, and the end of the stream."""
    return b"data: " + body + b"\n\n" + DONE


class Chunks:
    """The chunks of one response. All carry the same id, created, model and fingerprint."""

    def __init__(
        self,
        *,
        response_id: str,
        object_name: str,
        created: int,
        model: str,
        fingerprint: str,
        include_usage: bool,
        is_chat: bool,
    ) -> None:
        common = {
            "id": response_id,
            "object": object_name,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._start = b"data: " + orjson.dumps(common)[:-1] + b',"choices":[{"index":'
        self._no_choices = b"data: " + orjson.dumps(common)[:-1] + b',"choices":[],"usage":'
        self._end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._is_chat = is_chat
        self._open = b',"delta":{"content":' if is_chat else b',"text":'
        self._close = b"}" if is_chat else b""
        self._plain_end = self._close + b',"logprobs":null,"finish_reason":null}]' + self._end
        self._heads: dict[int, bytes] = {}

    def text(self, index: int, text: str, logprobs: Any = None, token_ids: list[int] | None = None) -> bytes:
        """The chunk of some text of a choice."""
        head = self._heads.get(index)
        if head is None:
            head = self._heads[index] = self._start + str(index).encode() + self._open
        if logprobs is None and token_ids is None:
            return head + orjson.dumps(text) + self._plain_end
        ids = b"" if token_ids is None else b',"token_ids":' + orjson.dumps(token_ids)
        tail = b',"logprobs":' + orjson.dumps(logprobs) + ids + b',"finish_reason":null}]' + self._end
        return head + orjson.dumps(text) + self._close + tail

    def role(self, index: int) -> bytes:
        """The first chunk of a chat choice, the only one with a role."""
        return (
            self._start + str(index).encode() + b',"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]' + self._end
        )

    def finish(self, index: int, reason: str, stop_reason: str | int | None) -> bytes:
        """The last chunk of a choice."""
        body = b',"delta":{}' if self._is_chat else b',"text":""'
        end = {"logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}
        return self._start + str(index).encode() + body + b"," + orjson.dumps(end)[1:] + b"]" + self._end

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The one chunk after the last finish: no choices, the totals."""
        return self._no_choices + orjson.dumps(usage) + b"}\n\n"
