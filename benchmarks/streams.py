"""Streams that are followed token by token, through the gateway or straight to the agents, for faults and soak."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from dragoman import AsyncClient, DragomanError

STREAM_SECONDS = 120.0


@dataclass(slots=True)
class Stream:
    """What one reader saw. `times` are monotonic seconds of the arrivals; `ends` counts terminal statuses."""

    prompt: str
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ends: int = 0
    error: str = ""
    agent_id: str = ""
    num_resumes: int = 0
    num_gaps: int = 0  # cursors that did not follow the one before

    def took(self, token_ids: list[int]) -> None:
        """Tokens arrived."""
        self.token_ids.extend(token_ids)
        self.times.append(time.monotonic())

    def stall(self) -> float:
        """Longest wait between two arrivals, in seconds."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def read_client(client: AsyncClient, stream: Stream, num_tokens: int, **options: Any) -> Stream:
    """Follow one greedy stream with the client library, which resumes by itself and names each token's cursor."""
    asked = {"max_output_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "deadline": STREAM_SECONDS}
    generation = client.generate(stream.prompt, **{**asked, **options})
    try:
        async for token in generation:
            stream.num_gaps += token.cursor != len(stream.token_ids)
            stream.agent_id = generation.agent_id or ""
            stream.took(list(token.token_ids))
            stream.ends += token.finish_reason is not None
    except DragomanError as error:
        stream.error = f"{error.reason_name}: {error.message}"
        stream.ends += 1
    stream.num_resumes = generation.num_resumes
    return stream


async def read_gateway(http: httpx.AsyncClient, stream: Stream, num_tokens: int, **options: Any) -> Stream:
    """Follow one greedy stream over HTTP; the gateway resumes."""
    body = {
        "prompt": stream.prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, **options,
    }  # fmt: skip
    try:
        async with http.stream("POST", "/v1/completions", json=body, timeout=STREAM_SECONDS) as reply:
            if reply.status_code != 200:
                stream.error = (await reply.aread()).decode()
                stream.ends += 1
                return stream
            stream.agent_id = reply.headers.get("x-dragoman-agent", "")
            async for event in _events(reply):
                if event is None:
                    continue
                if "error" in event:
                    stream.error = json.dumps(event["error"])
                    stream.ends += 1
                for choice in event.get("choices", ()):
                    if choice["index"] == 0:
                        stream.took(choice.get("token_ids") or [])
                        stream.ends += choice["finish_reason"] is not None
    except httpx.HTTPError as error:
        stream.error = repr(error)
        stream.ends += 1
    return stream


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else json.loads(line[6:])


async def until_flowing(streams: list[Stream], num_tokens: int, seconds: float = 30.0) -> None:
    """Until every stream has so many tokens or an error. Raises TimeoutError."""
    for _ in range(int(seconds * 100)):
        if all(len(stream.token_ids) >= num_tokens or stream.error for stream in streams):
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"not every stream had {num_tokens} tokens after {seconds:g} s")
