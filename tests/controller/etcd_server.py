"""A real etcd server for tests: free ports, a data directory of its own, stopped and started again at will."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.needs import need


class EtcdServer:
    """One server. `address` stays the same over restarts."""

    def __init__(self, *flags: str) -> None:
        """`flags`: further ones, such as for TLS; the client URL is then https."""
        self._path = need("etcd")
        self._flags = flags
        self._scheme = "https" if flags else "http"
        self._directory = tempfile.TemporaryDirectory(prefix="dragoman-etcd-")
        self._client, self._peer = _free_ports(2)
        self.address = f"127.0.0.1:{self._client}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it until it accepts connections."""
        client, peer = f"{self._scheme}://{self.address}", f"http://127.0.0.1:{self._peer}"
        self._process = subprocess.Popen(
            [
                self._path, "--data-dir", self._directory.name, "--log-level", "error", "--unsafe-no-fsync",
                "--heartbeat-interval", "20", "--election-timeout", "200",
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"default={peer}", *self._flags,
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=Path("/"),
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while True:
            assert self._process.poll() is None, f"etcd ended with {self._process.returncode}"
            assert time.monotonic() < deadline, "etcd did not start"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._client)) == 0:
                    return
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once, as a lost machine would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End it and remove its data."""
        self.kill()
        self._directory.cleanup()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
