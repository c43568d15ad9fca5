"""How much longer an engine's step takes because an rpc process serves its streams: the whole agent against a bare reader.

    python -m benchmarks.beside [--streams 64] [--tokens 1500] [--rounds 5] [--record]

The same engine process on the null device, at a model's speed, in turns with one that reads its socket and throws the frames
away. With the agent three processes are at work (engine, rpc, client), beside the bare reader two.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import time

from benchmarks.attach import agent_on_null, one_round
from benchmarks.record import make_record, save

from dragoman_agent.config import AgentSettings
from dragoman_agent.device.null_model import default_null_plan, open_null_model
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.messages import Ready, Sampling, Start, Step, Stop
from dragoman_agent.startup import EarlyEngine, engine_config

PREDICTED_RATIO = 1.01
_READ_BYTES = 1 << 20


def bare_step_seconds(num_streams: int, num_tokens: int) -> float:
    """Mean step of an engine process whose frames are read and thrown away, but for their number."""
    plan = default_null_plan(open_null_model("null"))
    early = EarlyEngine("null")
    try:
        process = early.configure(engine_config(AgentSettings(device="null", open=True, null_speed=1.0), plan))
        listener = process.take_listener()
        listener.settimeout(30)
        stream, _ = listener.accept()
        listener.close()
        with stream:
            stream.settimeout(30)
            return _read_steps(stream, num_streams, num_tokens)
    finally:
        early.stop()


def _read_steps(stream: socket.socket, num_streams: int, num_tokens: int) -> float:
    decoder = FrameDecoder()

    def frames() -> list[object]:
        return decoder.feed(stream.recv(_READ_BYTES))

    while not any(isinstance(message, Ready) for message in frames()):
        pass
    requests = [
        Start(f"r{i}", [1, 2, 3, i], Sampling(), Stop(max_output_tokens=num_tokens), credit=1 << 30)
        for i in range(num_streams)
    ]
    stream.sendall(b"".join(map(encode, requests)))
    begun = last = 0.0
    steps = 0
    while True:
        for message in frames():
            if not isinstance(message, Step) or not message.load.decode_tokens:
                continue
            if message.load.running < num_streams:
                if steps:
                    return (last - begun) / steps
                continue
            last = time.perf_counter()
            if begun:
                steps += 1
            else:
                begun = last


def main() -> None:
    """Print the ratio of each pair; save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="put the result into benchmarks/results/control.json")
    options = parser.parse_args()
    ratios = []
    with agent_on_null() as (address, rpc):
        asyncio.run(one_round(address, rpc, options.streams, 100))
        for _ in range(options.rounds):
            bare = bare_step_seconds(options.streams, options.tokens)
            served = asyncio.run(one_round(address, rpc, options.streams, options.tokens)).step_seconds
            ratios.append(served / bare)
            print(f"bare {1e3 * bare:.3f} ms a step, with the agent {1e3 * served:.3f}: {ratios[-1]:.4f}", flush=True)
    print(f"median {statistics.median(ratios):.4f} at {options.streams} streams")
    if options.record:
        record = make_record(
            bench="beside",
            case=str(options.streams),
            metric="step_with_agent_over_bare",
            unit="1",
            samples=ratios,
            predicted=PREDICTED_RATIO,
            packages=("grpcio", "protobuf", "uvloop", "msgpack"),
            command=f"python -m benchmarks.beside --streams {options.streams} --record",
            note="engine, rpc process and client on two cores, against engine and a bare reader",
        )
        print(f"saved to {save('control', [record])}")


if __name__ == "__main__":
    main()
