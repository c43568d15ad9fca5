"""Addresses, and who can reach them."""

from __future__ import annotations

import pytest

from dragoman.address import host_port, is_loopback


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5"), ("a.example", "a.example:5")],
)
def test_ipv6_hosts_are_bracketed_once(host: str, written: str) -> None:
    assert host_port(host, 5) == written


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "", "localhost.evil"))
