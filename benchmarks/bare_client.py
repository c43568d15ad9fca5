"""The least a Python client can do: grpc.aio, one Generate a stream, every token counted, and nothing else.

    python -m benchmarks.bare_client HOST:PORT STREAMS TOKENS

Prints one JSON object after a round to warm up: tokens, items, cpu_seconds of this process, wall_seconds.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
import uuid

import grpc

from dragoman.channel import channel_options
from dragoman.v1 import generation_service_pb2 as pb
from dragoman.v1 import generation_service_pb2_grpc


async def read(stub: generation_service_pb2_grpc.GenerationServiceStub, index: int, num_tokens: int) -> tuple[int, int]:
    """One stream to its end: tokens and messages with tokens."""
    stop = pb.StopCriteria(max_output_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(request_id=str(uuid.uuid4()), text=f"prompt {index}", stop=stop)
    tokens = items = 0
    async for response in stub.Generate(request):
        count = len(response.delta.token_ids)
        tokens += count
        items += count > 0
    return tokens, items


async def main(address: str, num_streams: int, num_tokens: int) -> None:
    """A short round, then the one that counts."""
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
        for length in (num_tokens // 4, num_tokens):
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            counts = await asyncio.gather(*(read(stub, index, length) for index in range(num_streams)))
            after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    tokens, items = sum(one for one, _ in counts), sum(one for _, one in counts)
    print(json.dumps({"tokens": tokens, "items": items, "cpu_seconds": cpu, "wall_seconds": time.monotonic() - began}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
