"""The Python client driven by the harness: see ../README.md for the protocol."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from dragoman import AsyncClient, DragomanError, GenerationResult, GenerationStream, RetryPolicy
from dragoman.durations import seconds_of

Call = dict[str, Any]


def emit(**line: Any) -> None:
    """One observation, seen by the harness at once."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def prompt_of(call: Call) -> Any:
    """The prompt in whichever form it is given."""
    prompt = call["prompt"]
    if "repeat" in prompt:
        return prompt["repeat"] * prompt["times"]
    return next(iter(prompt.values()))


async def generate(client: AsyncClient, index: int, call: Call) -> None:
    """Streams, with the actions of the call, to the one end."""
    actions = call.get("actions", {})
    stream = client.generate(prompt_of(call), **call.get("options", {}))
    if "cancel_after_seconds" in actions:
        reading = asyncio.ensure_future(read(stream, index, actions))
        done, _ = await asyncio.wait({reading}, timeout=actions["cancel_after_seconds"])
        if not done:
            reading.cancel()
            await asyncio.wait({reading})
            emit(call=index, event="cancelled")
        else:
            reading.result()
    else:
        await read(stream, index, actions)


async def read(stream: GenerationStream, index: int, actions: dict[str, Any]) -> None:
    """Emits each item; pauses and cancels as told."""
    num_tokens = 0
    if actions.get("cancel_after_tokens") == 0:
        await stream.aclose()
        emit(call=index, event="cancelled")
        return
    async for token in stream:
        num_tokens += len(token.token_ids)
        emit(
            call=index, event="token", cursor=token.cursor, choice=token.choice, token_ids=token.token_ids,
            text=token.text, finish_reason=token.finish_reason, num_logprobs=len(token.logprobs),
        )  # fmt: skip
        if num_tokens >= actions.get("cancel_after_tokens", float("inf")):
            await stream.aclose()
            emit(call=index, event="cancelled")
            return
        if num_tokens >= actions.get("pause_after_tokens", float("inf")):
            actions = {key: value for key, value in actions.items() if key != "pause_after_tokens"}
            await asyncio.sleep(actions["pause_seconds"])
    emit(call=index, event="result", **result_of(await stream.result()))


def result_of(result: GenerationResult) -> dict[str, Any]:
    """The result as the protocol has it."""
    choices = [
        {
            "text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason,
            "stop_string": choice.stop_string, "stop_token_id": choice.stop_token_id,
            "num_logprobs": len(choice.logprobs),
        }
        for choice in result.choices
    ]  # fmt: skip
    usage = {name: getattr(result.usage, name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
    return {
        "request_id": result.request_id, "model": result.model, "choices": choices, "usage": usage, "seed": result.seed,
        "agent_id": result.agent_id, "num_resumes": result.num_resumes,
    }  # fmt: skip


async def embed(client: AsyncClient, call: Call) -> Any:
    """The vectors."""
    answer = await client.embed(call["inputs"], **call.get("options", {}))
    return {"vectors": answer.vectors, "prompt_tokens": answer.prompt_tokens}


async def quote(client: AsyncClient, call: Call) -> Any:
    """The quote."""
    answer = await client.quote(prompt_of(call), **call.get("options", {}))
    return {
        "agent_id": answer.agent_id,
        **{
            name: [getattr(answer, name).p10_seconds, getattr(answer, name).expected_seconds,
                   getattr(answer, name).p90_seconds]
            for name in ("time_to_first_token", "time_per_output_token", "finish")
        },
    }  # fmt: skip


async def hardware(client: AsyncClient, call: Call) -> Any:
    """What is asked of the profile."""
    answer = await client.hardware(call.get("agent_id"))
    return {"kind": answer.profile.device.kind, "chosen": [candidate.chosen for candidate in answer.candidates]}


async def load(client: AsyncClient, _call: Call) -> Any:
    """Agents with their load."""
    return [
        {
            "agent_id": sample.agent_id, "running_requests": sample.load.running_requests,
            "waiting_requests": sample.load.waiting_requests, "free_kv_blocks": sample.load.free_kv_blocks,
        }
        for sample in await client.load()
    ]  # fmt: skip


async def agents(client: AsyncClient, _call: Call) -> Any:
    """Members with what the protocol asks of each."""
    return [
        {
            "agent_id": member.agent.agent_id, "state": member.state,
            "models": [served.model for served in member.agent.models],
            "heartbeat_age_seconds": seconds_of(member.heartbeat_age),
        }
        for member in await client.agents()
    ]  # fmt: skip


async def load_streams(client: AsyncClient, call: Call) -> Any:
    """Many streams at once, and the CPU seconds of this process for them."""

    async def one() -> tuple[int, int]:
        num_tokens = num_items = 0
        async for token in client.generate(prompt_of(call), **call.get("options", {})):
            num_tokens += len(token.token_ids)
            num_items += 1
        return num_tokens, num_items

    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    counts = await asyncio.gather(*(one() for _ in range(call["streams"])))
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "tokens": sum(num_tokens for num_tokens, _ in counts),
        "items": sum(num_items for _, num_items in counts),
        "cpu_seconds": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
        "wall_seconds": time.monotonic() - began,
    }


VALUES: dict[str, Callable[[AsyncClient, Call], Awaitable[Any]]] = {
    "embed": embed,
    "quote": quote,
    "hardware": hardware,
    "load": load,
    "agents": agents,
    "load_streams": load_streams,
    "models": lambda client, call: client.models(),
    "tokenize": lambda client, call: client.tokenize(call["text"], **call.get("options", {})),
    "detokenize": lambda client, call: client.detokenize(call["token_ids"], **call.get("options", {})),
    "cancel": lambda client, call: client.cancel(call["request_id"]),
}


async def play(client: AsyncClient, index: int, call: Call) -> None:
    """One call with its one end."""
    began = time.monotonic()
    try:
        if call["do"] == "generate":
            await generate(client, index, call)
            return
        value = await VALUES[call["do"]](client, call)
        emit(call=index, event="value", value=value)
    except DragomanError as error:
        emit(
            call=index, event="error", reason=error.reason_name, message=error.message, retryable=error.retryable,
            retry_delay_seconds=error.retry_delay, metadata=error.metadata, http_status=error.http_status,
            grpc_code=error.grpc_code.value[0], seconds=time.monotonic() - began,
        )  # fmt: skip


async def run(instruction: dict[str, Any]) -> None:
    """One instruction, with a client of its own."""
    credentials = None
    if "tls" in instruction:
        tls = instruction["tls"]
        credentials = grpc.ssl_channel_credentials(
            tls["ca_pem"].encode(), tls["key_pem"].encode(), tls["certificate_pem"].encode()
        )
    async with AsyncClient(
        instruction.get("controller"),
        agent=instruction.get("agent"),
        tenant=instruction["tenant"],
        credentials=credentials,
        retry=RetryPolicy(**instruction["retry"]),
    ) as client:
        for index, call in enumerate(instruction["calls"]):
            await play(client, index, call)
    emit(event="done", id=instruction["id"])


async def main() -> None:
    """Instructions until stdin ends."""
    emit(event="hello", protocol=1, language="python")
    while line := await asyncio.to_thread(sys.stdin.readline):
        await run(json.loads(line))


if __name__ == "__main__":
    asyncio.run(main())
