"""Three real etcd members on loopback, of which any can be killed and started again."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.needs import need

NUM_MEMBERS = 3


class EtcdCluster:
    """Members 0 to 2; `addresses` stay the same over restarts."""

    def __init__(self) -> None:
        self._path = need("etcd")
        self._directory = tempfile.TemporaryDirectory(prefix="dragoman-etcd-")
        ports = _free_ports(2 * NUM_MEMBERS)
        self.addresses = [f"127.0.0.1:{port}" for port in ports[:NUM_MEMBERS]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[NUM_MEMBERS:]]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for member in range(NUM_MEMBERS):
            self.start(member)
        self.leader()

    def start(self, member: int) -> None:
        """Start one that does not run."""
        client, peer = f"http://{self.addresses[member]}", self._peers[member]
        cluster = ",".join(f"m{index}={url}" for index, url in enumerate(self._peers))
        self._processes[member] = subprocess.Popen(
            [
                self._path, "--name", f"m{member}", "--data-dir", f"{self._directory.name}/{member}", "--log-level", "error",
                "--unsafe-no-fsync", "--heartbeat-interval", "50", "--election-timeout", "500",
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=Path("/"),
        )  # fmt: skip

    def kill(self, member: int) -> None:
        """End one at once, as a lost machine would."""
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    @property
    def running(self) -> list[int]:
        """Members that have not been killed."""
        return sorted(self._processes)

    def leader(self) -> int:
        """The member that leads, once one does. Raises AssertionError after 30 s."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for member in self.running:
                status = self._status(member)
                if status.get("leader", "0") != "0" and status["leader"] == status["header"]["member_id"]:
                    return member
            time.sleep(0.1)
        raise AssertionError("no member leads")

    def _status(self, member: int) -> dict[str, Any]:
        """What a member says of itself, over etcd's own JSON gateway; empty where it does not answer."""
        url = f"http://{self.addresses[member]}/v3/maintenance/status"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=5) as reply:
                status: dict[str, Any] = json.load(reply)
        except OSError:
            return {}
        return status

    def close(self) -> None:
        """End all and remove their data."""
        for member in self.running:
            self.kill(member)
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
