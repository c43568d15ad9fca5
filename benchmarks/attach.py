"""CPU time the agent's rpc process spends on a token when one gateway attaches 64 streams.

    python -m benchmarks.attach [--streams 64] [--tokens 400] [--rounds 5] [--record]

Starts a real agent on the null device with `--null-speed 1`, so that steps come as a model's would, and reads the CPU time of
the rpc process and of the engine process from the operating system, before and after. The client grants credit as tokens
come, so the cost of taking credit is in the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import psutil
from benchmarks.record import make_record, save

from dragoman.channel import channel_options
from dragoman.v1 import generation_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import AttachCredit, AttachRequest, AttachStart, GenerateRequest, StopCriteria

CREDIT_PIECE = 128
PREDICTED_MICROSECONDS = 5.0  # 3-5 us seen with a bare grpc.aio server and one frame a step


@dataclass(frozen=True, slots=True)
class Sample:
    """One round. CPU microseconds a token, and tokens a frame."""

    rpc: float
    engine: float
    tokens_per_frame: float
    step_seconds: float  # mean, from when all streams write to their end


async def one_round(address: str, rpc: psutil.Process, num_streams: int, num_tokens: int) -> Sample:
    """Run all streams to their end on one Attach."""
    engine = rpc.children()[0]
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        call = generation_service_pb2_grpc.GenerationServiceStub(channel).Attach()
        stop = StopCriteria(max_output_tokens=num_tokens)
        for stream in range(num_streams):
            request = GenerateRequest(request_id=str(uuid.uuid4()), text=f"prompt {stream}", stop=stop)
            await call.write(AttachRequest(start=AttachStart(stream_id=stream, request=request)))
        before = (_cpu(rpc), _cpu(engine))
        tokens = frames = ended = full = 0
        begun = last = 0.0
        granted = dict.fromkeys(range(num_streams), 256)
        while ended < num_streams:
            frame = await call.read()
            frames += 1
            if len(frame.events) == num_streams and not ended:
                last = time.perf_counter()
                begun = begun or last
                full += sum(len(event.response.delta.token_ids) for event in frame.events) / num_streams
            for event in frame.events:
                delta = event.response.delta
                tokens += len(delta.token_ids)
                ended += event.response.HasField("finished")
                if delta.cursor + 256 - granted[event.stream_id] >= CREDIT_PIECE:
                    until = granted[event.stream_id] = delta.cursor + 256
                    credit = AttachCredit(stream_id=event.stream_id, until_cursor=until)
                    await call.write(AttachRequest(credit=credit))
        after = (_cpu(rpc), _cpu(engine))
        await call.done_writing()
    assert tokens == num_streams * num_tokens, tokens
    rpc_cpu, engine_cpu = ((now - then) / tokens * 1e6 for then, now in zip(before, after, strict=True))
    return Sample(rpc_cpu, engine_cpu, tokens / frames, (last - begun) / max(full - 1, 1))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def agent_on_null() -> Iterator[tuple[str, psutil.Process]]:
    """The address of an agent on the null device at a model's speed, and its rpc process."""
    command = [sys.executable, "-P", "-m", "dragoman_agent.main", "--device", "null", "--open", "--null-speed", "1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--metrics-port", "0", "--announce", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            event = json.loads(line)
            address = event.get("grpc", address)
            if event["event"] == "ready":
                break
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def measure(num_streams: int, num_tokens: int, num_rounds: int) -> list[Sample]:
    """Samples of `num_rounds` rounds after one to warm up."""
    with agent_on_null() as (address, rpc):

        async def rounds() -> list[Sample]:
            return [await one_round(address, rpc, num_streams, num_tokens) for _ in range(num_rounds + 1)]

        return asyncio.run(rounds())[1:]


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="put the result into benchmarks/results/control.json")
    options = parser.parse_args()
    samples = measure(options.streams, options.tokens, options.rounds)
    for sample in samples:
        print(
            f"rpc {sample.rpc:6.2f} us/token   engine {sample.engine:6.2f} us/token   "
            f"{sample.tokens_per_frame:5.1f} tokens/frame"
        )
    print(
        f"median: rpc {statistics.median(sample.rpc for sample in samples):.2f} us/token at {options.streams} streams"
    )
    if options.record:
        engine = statistics.median(sample.engine for sample in samples)
        record = make_record(
            bench="attach",
            case=str(options.streams),
            metric="cpu_us_per_token",
            unit="us",
            samples=[sample.rpc for sample in samples],
            predicted=PREDICTED_MICROSECONDS,
            packages=("grpcio", "protobuf", "uvloop", "msgpack"),
            command=f"python -m benchmarks.attach --streams {options.streams} --record",
            note=f"rpc process alone, credits included; the engine process on the null device takes {engine:.1f} us more",
        )
        print(f"saved to {save('control', [record])}")


if __name__ == "__main__":
    main()
