"""The process: start, ports, signals, bad settings, what it must not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dragoman.v1 import fleet_service_pb2, fleet_service_pb2_grpc
from dragoman_controller.config import ControllerSettings
from dragoman_controller.server import SERVICE_NAMES, ControllerServer, StartupError

COMMAND = [sys.executable, "-P", "-c", "from dragoman_controller.main import main; main()"]


def start(*flags: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--metrics-port", "0", "--announce", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@pytest.fixture
def running() -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A controller process and what it announced."""
    process, announced = start()
    yield process, announced
    process.kill()
    process.communicate(timeout=10)


def test_it_announces_its_ports_and_serves_metrics(running: Any) -> None:
    _, announced = running
    assert announced["event"] == "serving"
    with urllib.request.urlopen(f"http://{announced['metrics']}/metrics", timeout=5) as response:
        text = response.read().decode()
    for name in ("dragoman_tickets_total", "dragoman_requests_waiting", "dragoman_agents", "dragoman_build_info"):
        assert f"\n# TYPE {name.removesuffix('_total')}" in text or f"\n# TYPE {name}" in text


def test_health_by_name_and_reflection(running: Any) -> None:
    _, announced = running
    with grpc.insecure_channel(announced["grpc"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "readiness", *SERVICE_NAMES):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = list(reflect.ServerReflectionInfo(iter([request]), timeout=5))
        listed = {service.name for service in answer.list_services_response.service}
    assert listed >= set(SERVICE_NAMES)
    assert len(SERVICE_NAMES) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_0_although_a_watch_is_open(running: Any, number: signal.Signals) -> None:
    process, announced = running
    with grpc.insecure_channel(announced["grpc"]) as channel:
        watch = fleet_service_pb2_grpc.FleetServiceStub(channel).WatchFleet(fleet_service_pb2.WatchFleetRequest())
        next(watch)
        process.send_signal(number)
        _, errors = process.communicate(timeout=5)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--host", "0.0.0.0"], "--tls-certificate"),
        (["--tls-key", "x.pem"], "all three"),
        (["--cell-key-file", "/nonexistent/keys"], "/nonexistent/keys"),
        (["--policy-file", "/nonexistent/policy.toml"], "/nonexistent/policy.toml"),
        (["--port", "99999"], "--port"),
        (["--polcy-file", "x"], "policy-file"),
    ],
)
def test_bad_settings_give_one_line_and_exit_2(flags: list[str], expected: str) -> None:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert expected in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


async def test_a_port_in_use_is_said_so(server: ControllerServer) -> None:
    for settings, flag in (
        (ControllerSettings(port=server.port, metrics_port=0), "--port"),
        (ControllerSettings(port=0, metrics_port=server.metrics_port), "--metrics-port"),
    ):
        second = ControllerServer(settings)
        with pytest.raises(StartupError, match=f"pid {os.getpid()}.*{flag}"):
            await second.start()
        await second.stop()


def test_a_port_in_use_gives_one_line_of_the_command(server: ControllerServer) -> None:
    command = [*COMMAND, "--port", str(server.port), "--metrics-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and f"pid {os.getpid()}" in lines[0]


def test_it_imports_no_tensor_library_and_no_part_of_the_agent() -> None:
    program = (
        "import sys, dragoman_controller.server, dragoman_controller.main\n"
        "banned = {'torch', 'triton', 'numpy', 'dragoman_agent', 'dragoman_kernels', 'dragoman_gateway'}\n"
        "print(sorted(banned & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_key_files_are_read_again_on_sighup(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"1 {'ab' * 32}\n")
    process, _ = start("--cell-key-file", str(keys))
    try:
        assert process.stderr is not None
        keys.write_text(f"2 {'cd' * 32}\n1 {'ab' * 32}\n")
        process.send_signal(signal.SIGHUP)
        while "the newest is 2" not in (line := process.stderr.readline()):
            assert line, "the log ended without a word of the new keys"
        keys.write_text("nonsense\n")
        process.send_signal(signal.SIGHUP)
        while "stay as they are" not in (line := process.stderr.readline()):
            assert line, "the log ended without a word of the bad file"
    finally:
        process.kill()
        process.communicate(timeout=10)
