"""Hosts and ports as they are written in addresses."""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 host is put in brackets, unless it has them."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
