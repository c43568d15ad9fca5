"""Addresses, and who can reach them."""

from __future__ import annotations

import re

import pytest

from dragoman.address import address_problem, host_port, is_loopback


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("a.example", "a.example:5")],
)
def test_ipv6_hosts_are_bracketed_once(host: str, written: str) -> None:
    assert host_port(host, 5) == written


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "", "localhost.evil"))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "a.example:65535",
        "[::1]:50050",
        "dns:a:50050",
        "dns:///a:5",
        "ipv4:1.2.3.4:5",
        "ipv6:[::1]:5",
        "unix:/s",
    ],
)
def test_what_can_be_dialled(address: str) -> None:
    assert address_problem(address) == ""


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "has no port: give host:port"),
        ("localhost", "has no port: give host:port"),
        ("127.0.0.1:", "has no port: give host:port"),
        (":50050", "has no port: give host:port"),
        ("a:b", "has no port: give host:port"),
        ("a:²", "has no port: give host:port"),
        ("a:0", "has no port from 1 to 65535"),
        ("a:65536", "has no port from 1 to 65535"),
        ("http://a:5", "is a URL: give host:port, without http://"),
        ("HTTPS://a:5/x", "is a URL: give host:port, without HTTPS://"),
        ("::1", r"without brackets: .* such as \[::1\]:50050"),
        ("::1:50050", "without brackets"),
        ("[::1]", "has no port: give host:port"),
    ],
)
def test_what_cannot_be_dialled_and_why(address: str, problem: str) -> None:
    assert re.search(problem, address_problem(address))
