"""Whether a port is free, and who holds it when it is not."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from dragoman.address import host_port
from dragoman_cli.failure import Failure

_HOLDS = " holds it"
HOST_REMEDY = "give an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"


def check_port(host: str, port: int, flag: str, what: str) -> None:
    """Raises Failure naming the process and the flag when `port` cannot be bound. Port 0 is always free."""
    problem = port_problem(host, port)
    if problem:
        remedy = f"pass {flag} PORT (0 takes a free one)"
        is_held = problem.endswith(_HOLDS)
        raise Failure(f"port {port} for {what} cannot be used", problem, f"stop it, or {remedy}" if is_held else remedy)


def check_host(host: str) -> None:
    """Raises Failure when no server of this machine can listen on `host`, whatever the port."""
    if problem := host_problem(host):
        raise Failure(f"--host {host} cannot be used", problem, HOST_REMEDY)


def host_problem(host: str) -> str:
    """Why no server of this machine can listen on `host`, whatever the port; empty when one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.bind(address)
    except OSError as error:  # a failed look-up of the name is one, too
        if error.errno == errno.EADDRNOTAVAIL:
            return "it is no address of this machine"
        return (error.strerror or str(error)).lower()
    return ""


def port_problem(host: str, port: int) -> str:
    """Why the port cannot be bound; empty when it can."""
    if port == 0:
        return ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        # As servers do: connections of a server that just ended, in TIME_WAIT, do not keep the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            return f"ports below 1024 need special rights, and {port} is one" if port < 1024 else "permission denied"
        except OSError as error:
            holder = holder_of(port)
            return f"{holder}{_HOLDS}" if holder else f"{host}:{port}: {(error.strerror or str(error)).lower()}"
    return ""


def listen_problem(host: str, port: int, flag: str) -> str:
    """The line of a process that cannot listen there, with its way out; empty when it can. `flag` is the port's.

    Asked before a server binds: gRPC would print lines of its own about a port that is taken.
    """
    if problem := host_problem(host):
        return f"--host {host} cannot be used: {problem}; {HOST_REMEDY}"
    problem = port_problem(host.strip("[]"), port)
    if not problem:
        return ""
    if holder := holder_of(port):
        return f"port {port} is in use by {holder}; stop it or choose another port with {flag}"
    return f"cannot listen on {host_port(host, port)}: {problem}; choose another with {flag}"


def holder_of(port: int) -> str:
    """Such as "nginx (pid 1234)"; empty when the system does not tell."""
    inode = _listening_inode(port)
    if inode is None:
        return ""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if _holds(entry / "fd", inode):
                return f"{(entry / 'comm').read_text().strip()} (pid {entry.name})"
        except OSError:  # another user's process, or one that ended meanwhile
            continue
    return ""


def _holds(folder: Path, inode: str) -> bool:
    for link in folder.iterdir():
        try:
            if str(link.readlink()) == f"socket:[{inode}]":
                return True
        except OSError:  # a descriptor that was closed meanwhile, such as our own of this folder
            continue
    return False


def _listening_inode(port: int) -> str | None:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            # local address as HEX:PORT, state 0A is LISTEN
            if columns[3] == "0A" and int(columns[1].rsplit(":", 1)[1], 16) == port:
                return columns[9]
    return None
