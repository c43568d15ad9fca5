"""Settings of the controller process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from dragoman.address import MAX_PORT, address_problem, is_loopback

_CELL = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Admission, placement and quotes for a cell of agents."""

    host: str = field(
        default="127.0.0.1",
        metadata={"help": "address to listen on; other than loopback needs TLS", "group": "network"},
    )
    port: int = field(
        default=50050, metadata={"help": "gRPC port; 0 takes a free one", "group": "network", "min": 0, "max": 65535}
    )
    metrics_port: int = field(
        default=9470,
        metadata={"help": "port of /metrics; 0 takes a free one", "group": "network", "min": 0, "max": 65535},
    )
    tls_certificate: Path | None = field(
        default=None, metadata={"help": "PEM certificate chain of this controller", "group": "security"}
    )
    tls_key: Path | None = field(default=None, metadata={"help": "PEM key of that certificate", "group": "security"})
    tls_client_ca: Path | None = field(
        default=None, metadata={"help": "PEM certificates that sign agents and clients", "group": "security"}
    )
    cell_key_file: Path | None = field(
        default=None,
        metadata={
            "help": "lines KEY_ID 64_HEX_DIGITS, newest first, read again on SIGHUP; unset draws a key at start",
            "group": "security",
        },
    )
    advertise: str = field(
        default="",
        metadata={"help": "host:port that agents and clients dial, when it is not the one bound", "group": "network"},
    )
    etcd: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "etcd servers, as host:port, that hold what several controllers share; unset keeps it in memory",
            "group": "state",
        },
    )
    cell: str = field(
        default="default", metadata={"help": "name of the cell; its controllers share one", "group": "state"}
    )
    etcd_ca: Path | None = field(
        default=None, metadata={"help": "PEM certificates that sign the etcd servers'; turns TLS on", "group": "state"}
    )
    etcd_certificate: Path | None = field(
        default=None, metadata={"help": "PEM certificate shown to etcd (mutual TLS)", "group": "state"}
    )
    etcd_key: Path | None = field(default=None, metadata={"help": "PEM key of that certificate", "group": "state"})
    policy_file: Path | None = field(
        default=None,
        metadata={
            "help": "TOML file with the admission policy, taken over again when it changes and on SIGHUP",
            "group": "process",
        },
    )
    prefetch: bool = field(
        default=True,
        metadata={
            "help": "bring prefixes of waiting requests to the agents that will run them, where that beats computing",
            "group": "process",
        },
    )
    announce: bool = field(
        default=False, metadata={"help": "print life events as JSON lines on stdout", "group": "process"}
    )
    log_level: str = field(
        default="info",
        metadata={
            "help": "least severe log records shown",
            "group": "process",
            "choices": ("debug", "info", "warning", "error"),
        },
    )
    drain_timeout: float = field(
        default=30.0,
        metadata={
            "help": "on SIGTERM, waiting requests are refused after this",
            "group": "process",
            "unit": "seconds",
            "min": 0.0,
        },
    )

    @property
    def has_tls(self) -> bool:
        """Whether the three TLS files are given."""
        return None not in (self.tls_certificate, self.tls_key, self.tls_client_ca)


def check(settings: ControllerSettings) -> None:
    """Raises ValueError with one line that says what to do."""
    files = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    if any(files) and not settings.has_tls:
        raise ValueError("TLS needs all three of --tls-certificate, --tls-key and --tls-client-ca")
    if not _CELL.fullmatch(settings.cell):
        raise ValueError(
            f"--cell {settings.cell[:80]!r} must be 1 to 64 letters, digits, dots, dashes or underscores, as it is part "
            "of keys in etcd"
        )
    if bool(settings.etcd_certificate) != bool(settings.etcd_key) or (settings.etcd_key and not settings.etcd_ca):
        raise ValueError("mutual TLS with etcd needs all three of --etcd-ca, --etcd-certificate and --etcd-key")
    if settings.advertise and (problem := address_problem(settings.advertise)):
        raise ValueError(f"--advertise {settings.advertise!r} {problem}")
    for endpoint in settings.etcd:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= MAX_PORT or "/" in endpoint:
            raise ValueError(f"--etcd {endpoint!r} is no host:port: give each server as one, without http://")
        if not is_loopback(host.strip("[]")) and settings.etcd_ca is None:
            raise ValueError(
                f"--etcd {endpoint} is another machine, and without TLS the cell keys would cross the network in the "
                "clear: give --etcd-ca"
            )
    if not settings.has_tls and not is_loopback(settings.host):
        raise ValueError(
            f"--host {settings.host} can be reached from other machines, and without TLS ticket keys would cross the "
            "network in the clear: give --tls-certificate, --tls-key and --tls-client-ca, or listen on 127.0.0.1"
        )
