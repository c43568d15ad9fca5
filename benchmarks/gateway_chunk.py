"""CPU time the gateway spends on one streamed chunk, against a bare uvicorn server that sends the same bytes.

    python -m benchmarks.gateway_chunk [--streams 64] [--tokens 400] [--rounds 5] [--record]

Starts a real controller, agent (null device, `--null-speed 1`) and gateway, and beside them an ASGI application of ten lines
on the same uvicorn, httptools and uvloop, that sends as many chunks of the same size, one write each. The CPU time of each
server process comes from the operating system. Rounds alternate, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from benchmarks.record import make_record, save

PREDICTED_RATIO = 1.5  # gRPC frames in, credits out and JSON of the text, on top of what uvicorn's write costs
PATH = "/v1/completions"
_BARE = """
import asyncio, sys, uvicorn
CHUNK = b"x" * int(sys.argv[2])
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(int(scope["path"][1:])):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(float(sys.argv[3]))
    await send({"type": "http.response.body", "body": b""})
uvicorn.run(app, port=int(sys.argv[1]), http="httptools", loop="uvloop", lifespan="off", log_level="error")
"""


@contextmanager
def child(*command: str, waits_for: str | None = None) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A child process and the announce line it was waited for."""
    process = subprocess.Popen([sys.executable, "-P", *command], stdout=subprocess.PIPE, text=True)
    try:
        event: dict[str, Any] = {}
        if waits_for is not None:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == waits_for:
                    break
        yield process, event
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def module(name: str, *options: str) -> tuple[str, ...]:
    """The command line of one of our processes."""
    return ("-c", f"from {name}.main import main; main()", *options, "--announce", "--log-level", "error")


async def read_streams(client: httpx.AsyncClient, method: str, path: str, body: Any, num_streams: int) -> list[bytes]:
    """All of `num_streams` answers, read at once."""
    replies = await asyncio.gather(*(client.request(method, path, json=body) for _ in range(num_streams)))
    assert all(reply.status_code == 200 for reply in replies)
    return [reply.content for reply in replies]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def measure(
    gateway: tuple[str, int], bare: tuple[str, int], num_streams: int, num_tokens: int, num_rounds: int
) -> tuple[list[float], list[float]]:
    """CPU microseconds a chunk of (gateway, bare server), one sample a round; the first round warms up."""
    limits = httpx.Limits(max_connections=num_streams)
    ours, theirs = [], []
    async with (
        httpx.AsyncClient(base_url=gateway[0], timeout=120, limits=limits) as http,
        httpx.AsyncClient(base_url=bare[0], timeout=120, limits=limits) as peer,
    ):
        body = {"prompt": "bench", "stream": True, "max_tokens": num_tokens, "ignore_eos": True}
        for _ in range(num_rounds + 1):
            before = cpu_seconds(gateway[1])
            answers = await read_streams(http, "POST", PATH, body, num_streams)
            num_chunks = sum(answer.count(b"data: {") for answer in answers)
            ours.append((cpu_seconds(gateway[1]) - before) / num_chunks * 1e6)
            before = cpu_seconds(bare[1])
            await read_streams(peer, "GET", f"/{num_tokens}", None, num_streams)
            theirs.append((cpu_seconds(bare[1]) - before) / (num_tokens * num_streams) * 1e6)
    return ours[1:], theirs[1:]


def run(num_streams: int, num_tokens: int, num_rounds: int) -> tuple[list[float], list[float]]:
    """Start everything, measure, stop."""
    zero = ("--port", "0")
    with child(*module("dragoman_controller", *zero, "--metrics-port", "0"), waits_for="serving") as (_, controller):
        agent_options = (
            "--device",
            "null",
            "--model",
            "null",
            "--null-speed",
            "1",
            "--controllers",
            controller["grpc"],
        )
        agent = module("dragoman_agent", *zero, "--metrics-port", "0", *agent_options)
        gateway = module("dragoman_gateway", *zero, "--controller", controller["grpc"])
        bare_port = str(20_000 + os.getpid() % 20_000)
        with (
            child(*agent, waits_for="ready"),
            child(*gateway, waits_for="serving") as (process, serving),
            child("-c", _BARE, bare_port, "230", "0.001") as (bare, _),
        ):
            url = f"http://{serving['http']}"
            wait_for(f"{url}/health")
            wait_for(f"http://127.0.0.1:{bare_port}/1")
            return asyncio.run(
                measure(
                    (url, process.pid), (f"http://127.0.0.1:{bare_port}", bare.pid), num_streams, num_tokens, num_rounds
                )
            )


def wait_for(url: str) -> None:
    """Returns when `url` answers 200. Raises TimeoutError after 30 s."""
    transport = httpx.HTTPTransport(retries=20)
    with httpx.Client(transport=transport, timeout=10) as client:
        for _ in range(300):
            if client.get(url).status_code == 200:
                return
    raise TimeoutError(f"{url} did not get ready")


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="put the result into benchmarks/results/gateway.json")
    options = parser.parse_args()
    ours, theirs = run(options.streams, options.tokens, options.rounds)
    for mine, bare in zip(ours, theirs, strict=True):
        print(f"gateway {mine:6.1f} us/chunk   bare uvicorn {bare:6.1f} us/chunk   ratio {mine / bare:.2f}")
    ratios = [mine / bare for mine, bare in zip(ours, theirs, strict=True)]
    print(f"median ratio {statistics.median(ratios):.2f}")
    if options.record:
        common = {
            "bench": "gateway_chunk",
            "case": str(options.streams),
            "packages": ("uvicorn", "httptools", "uvloop", "orjson", "grpcio"),
            "command": f"python -m benchmarks.gateway_chunk --streams {options.streams} --record",
        }
        note = "the gateway process alone; the bare server sends 230-byte chunks, one write each"
        records = [
            make_record(**common, metric="cpu_us_per_chunk", unit="us", samples=ours, predicted=None, note=note),
            make_record(
                **common, metric="cpu_ratio_to_bare", unit="1", samples=ratios, predicted=PREDICTED_RATIO, note=note
            ),
        ]
        print(f"saved to {save('gateway', records)}")


if __name__ == "__main__":
    main()
