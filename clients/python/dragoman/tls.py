"""Mutual TLS between the processes of a cell: reads the files, builds the credentials, and says what is wrong with them.

A controller's certificate names its address, an agent's its agent id, whatever its address. Both name them as subject
alternative names.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dragoman.channel import channel_options
from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2

FLAGS = ("--tls-certificate", "--tls-key", "--tls-ca")
VARIABLES = ("DRAGOMAN_TLS_CERTIFICATE", "DRAGOMAN_TLS_KEY", "DRAGOMAN_TLS_CA")


class TlsError(ValueError):
    """The TLS files cannot be used. One line: what, why, what to do; never a part of a key."""


@dataclass(frozen=True, slots=True, repr=False)
class TlsIdentity:
    """Who this process is, and whom it believes. `names` are those its certificate is for."""

    certificate: bytes
    key: bytes
    authorities: bytes
    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"TlsIdentity(names={self.names})"

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that asks each client for a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authorities, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For channels to controllers and agents."""
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)


def read_tls(
    certificate: Path | None, key: Path | None, authorities: Path | None, flags: tuple[str, str, str] = FLAGS
) -> TlsIdentity | None:
    """The identity in three PEM files; None where none is given. Raises TlsError naming the flag."""
    if certificate is None and key is None and authorities is None:
        return None
    if certificate is None or key is None or authorities is None:
        raise TlsError(f"TLS needs all three of {flags[0]}, {flags[1]} and {flags[2]}")
    contents = [_read(path, flag) for path, flag in zip((certificate, key, authorities), flags, strict=True)]
    try:
        ssl.create_default_context(cadata=_text(contents[2]))
    except (ssl.SSLError, ValueError):
        raise TlsError(f"{flags[2]} {authorities} holds no certificate in PEM form: give the authority's own") from None
    names = _check_pair(certificate, key, contents[0], flags)
    return TlsIdentity(contents[0], contents[1], contents[2], names)


def environment_identity(environ: Mapping[str, str] = os.environ) -> TlsIdentity | None:
    """The identity that $DRAGOMAN_TLS_CERTIFICATE, _KEY and _CA name, as the processes read them too. Raises TlsError."""
    named = [environ.get(name, "") for name in VARIABLES]
    # The controller's own variable for the third file has another name, for its flag has.
    named[2] = named[2] or environ.get("DRAGOMAN_TLS_CLIENT_CA", "")
    certificate, key, authorities = (Path(text) if text else None for text in named)
    return read_tls(certificate, key, authorities, VARIABLES)


def environment_credentials() -> grpc.ChannelCredentials | None:
    """For the channels of a client; None where the variables are not set. Raises DragomanError INVALID_REQUEST."""
    try:
        identity = environment_identity()
    except TlsError as error:
        raise DragomanError(error_pb2.ERROR_REASON_INVALID_REQUEST, str(error)) from None
    return identity.channel_credentials() if identity else None


def open_channel(address: str, credentials: grpc.ChannelCredentials | None, agent_id: str = "") -> grpc.aio.Channel:
    """A channel to `address`, plain without `credentials`. With them an agent's certificate must name its `agent_id`."""
    options: list[tuple[str, int | str]] = [*channel_options()]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if agent_id:
        options.append(("grpc.ssl_target_name_override", agent_id))
    return grpc.aio.secure_channel(address, credentials, options=options)


def handshake_problem(details: str) -> str:
    """What a transport's failure to connect says about TLS, in plain words; empty where it says nothing."""
    if "Hostname Verification Check failed" in details:
        return "its certificate is not for this name: a controller's must name its address, an agent's its agent id"
    if "certificate has expired" in details:
        return "its certificate has expired: give it a new one"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return "its certificate is signed by an authority that is not trusted here: see --tls-ca"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not speak TLS: start it with the --tls flags, or leave them out here"
    if "Stream removed" in details:  # of a connection that was up; a refused certificate may come to light that late
        return "it closed the connection: it has ended, or, where it speaks TLS, does not take the certificate it was shown"
    if "Socket closed" in details or "Connection reset" in details:
        return (
            "it closed the connection before the first answer; if it speaks TLS, it wants a certificate that is valid now "
            "and signed by its authority: see the --tls flags"
        )
    return ""


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{flag} {path} cannot be read: {error.strerror or error}") from None


def _text(pem: bytes) -> str:
    return pem.decode("ascii", errors="replace")


def _check_pair(certificate: Path, key: Path, pem: bytes, flags: tuple[str, str, str]) -> tuple[str, ...]:
    """The names of a certificate that is valid now and belongs to the key. Raises TlsError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise TlsError(
                f"{flags[1]} {key} is not the key of {flags[0]} {certificate}: give a matching pair"
            ) from None
        raise TlsError(
            f"{flags[0]} {certificate} and {flags[1]} {key} are not a certificate and its key in PEM form, or the key is "
            "protected by a password: gRPC reads neither"
        ) from None
    except ValueError:
        raise TlsError(f"{flags[1]} {key} is protected by a password: write it without one") from None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate is its own authority here: whether others trust it is for them to say, but it must be valid now.
    client.load_verify_locations(cadata=_text(pem))
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        peer = _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        raise TlsError(f"{flags[0]} {certificate} cannot be used: {error.verify_message}; give a new one") from None
    return tuple(value for kind, value in peer.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))


def _no_password() -> str:
    raise ValueError("a password is asked for")


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What the client sees of the server's certificate, after a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for _ in range(8):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(sides[0].getpeercert() or {})
