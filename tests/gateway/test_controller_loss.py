"""The controller goes and comes back: running streams do not notice, waiting requests are asked again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
from tests.gateway.conftest import parse_events
from tests.gateway.stack import start_controller, start_gateway, wait_until_ready

PATH = "/v1/completions"


def test_a_controller_without_agents_is_told_apart_from_none() -> None:
    controller, address = start_controller()
    gateway, url = start_gateway(address)
    try:
        deadline = time.monotonic() + 5
        while (phase := httpx.get(f"{url}/health").json()["phase"]) != "no_agent" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert phase == "no_agent"
        reply = httpx.post(f"{url}{PATH}", json={"prompt": "x"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_agent")
    finally:
        gateway.stop()
        controller.stop()


def test_f4_streams_go_on_without_the_controller(start_stack: Callable[..., Any]) -> None:
    from tests.gateway.stack import Process

    stack = start_stack([("--null-speed", "10")])
    port = stack.controller_address.rpartition(":")[2]
    body = {
        "prompt": "x",
        "stream": True,
        "max_tokens": 300,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{stack.url}{PATH}", json=body, timeout=30) as reply:
        pieces = reply.iter_raw()
        received = next(pieces)
        stack.controller.child.kill()
        stack.controller.stop()
        start = time.monotonic()
        for _ in range(2):  # the first may still wait for the controller to come back
            refused = httpx.post(f"{stack.url}{PATH}", json={"prompt": "x", "max_tokens": 2}, timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_agent")
            assert int(refused.headers["retry-after"]) >= 1
        assert time.monotonic() - start < 8
        received += b"".join(pieces)
    assert parse_events(received)[-1]["usage"]["completion_tokens"] == 300
    stack.controller = Process("dragoman_controller.main", "--port", port, "--metrics-port", "0")
    stack.controller.wait_for("serving")
    start = time.monotonic()
    reply = httpx.post(f"{stack.url}{PATH}", json={"prompt": "x", "max_tokens": 2}, timeout=30)
    while reply.status_code == 503 and time.monotonic() - start < 15:
        assert reply.headers["x-should-retry"] == "true"
        time.sleep(0.2)
        reply = httpx.post(f"{stack.url}{PATH}", json={"prompt": "x", "max_tokens": 2}, timeout=30)
    assert reply.status_code == 200
    wait_until_ready(stack.url)


def test_the_gateway_knows_no_device() -> None:
    code = (
        "import sys, dragoman_gateway.server; "
        "bad = {'torch', 'triton', 'numpy', 'dragoman_agent', 'dragoman_kernels', 'dragoman_controller'} & set(sys.modules); "
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
