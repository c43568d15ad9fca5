"""Hosts and ports as they are written in addresses."""

from __future__ import annotations

import ipaddress
import re

MAX_PORT = 65535
# What gRPC dials by a path or a name of its own, where there is no port.
_PORTLESS = ("unix:", "unix-abstract:")
_RESOLVERS = ("dns:", "ipv4:", "ipv6:")  # and a host:port after it


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


def address_problem(address: str) -> str:
    """What is wrong with the host:port of a server to dial, to be read after the address; empty for a usable one.

    The transport would take port 443 where none is written, and a number modulo 65536, without a word.
    """
    if address.startswith(_PORTLESS):
        return ""
    scheme, separator, _ = address.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        return f"is a URL: give host:port, without {scheme}://"
    if re.sub(r"\[.*?\]", "", address).count(":") > 1 + address.startswith(_RESOLVERS):
        return "is an IPv6 address without brackets: give them and a port, such as [::1]:50050"
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        return "has no port: give host:port, such as 127.0.0.1:50050"
    return "" if 0 < int(port) <= MAX_PORT else f"has no port from 1 to {MAX_PORT}"
