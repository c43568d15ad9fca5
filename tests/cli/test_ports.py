"""A port in use is found, and its holder named."""

from __future__ import annotations

import dataclasses
import os
import socket

import pytest

from dragoman_cli import ports
from dragoman_cli.failure import Failure
from dragoman_cli.ports import check_port, holder_of, host_problem, listen_problem, port_problem
from dragoman_cli.up import check_machine
from dragoman_cli.up_settings import UpSettings


def test_free_ports() -> None:
    assert port_problem("127.0.0.1", 0) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert port_problem("127.0.0.1", port) == ""
    assert holder_of(port) == ""


def test_a_port_in_use_names_the_process_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Failure) as failure:
            check_port("127.0.0.1", port, "--port", "HTTP")
    assert failure.value.what == f"port {port} for HTTP cannot be used"
    assert f"(pid {os.getpid()})" in failure.value.why
    assert "--port PORT" in failure.value.remedy


def test_a_port_that_nobody_holds_is_not_to_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "port_problem", lambda host, port: "ports below 1024 need special rights, and 80 is one")
    with pytest.raises(Failure) as failure:
        check_port("127.0.0.1", 80, "--port", "HTTP")
    assert failure.value.remedy == "pass --port PORT (0 takes a free one)"


def test_an_address_of_another_machine() -> None:
    assert "192.0.2.1:5" in port_problem("192.0.2.1", 5000)
    assert host_problem("192.0.2.1") == "it is no address of this machine"
    with pytest.raises(Failure, match=r"--host 192.0.2.1 cannot be used") as failure:
        check_machine(UpSettings(device="null", host="192.0.2.1"))
    assert "such as 127.0.0.1" in failure.value.remedy
    # Whatever the port: also one that is free, and one that another process holds on another address.
    with socket.create_server(("127.0.0.1", 0)) as server:
        for port in (0, server.getsockname()[1]):
            assert listen_problem("192.0.2.1", port, "--port").startswith("--host 192.0.2.1 cannot be used: it is no")


def test_hosts_that_can_be_bound_and_a_name_that_is_none() -> None:
    assert [host_problem(host) for host in ("127.0.0.1", "0.0.0.0", "localhost")] == ["", "", ""]
    assert "name" in host_problem("no.such.host.invalid")


def test_one_port_for_two_servers_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = UpSettings(
        device="null", port=port, controller_port=port, agent_port=0, controller_metrics_port=0, agent_metrics_port=0
    )
    with pytest.raises(Failure) as failure:
        check_machine(settings)
    assert failure.value.what == f"port {port} for the controller cannot be used"
    assert failure.value.why == f"--port is {port} as well"
    assert "--controller-port" in failure.value.remedy
    check_machine(dataclasses.replace(settings, port=0, controller_port=0))
