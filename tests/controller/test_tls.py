"""Mutual TLS: nobody without a certificate, and an agent only under the name in its own."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dragoman.errors import from_rpc_error
from dragoman.v1 import agent_registry_service_pb2, agent_registry_service_pb2_grpc, error_pb2
from dragoman_controller.config import ControllerSettings
from dragoman_controller.server import ControllerServer


@dataclass
class Authority:
    """Signs certificates for a day."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name

    def issue(self, subject: str, is_authority: bool = False) -> tuple[bytes, bytes]:
        """Certificate and key in PEM form."""
        key = self.key if is_authority else ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(
                self.name if is_authority else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
            )
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), private


@pytest.fixture
def authority() -> Authority:
    """The cell's own authority."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cell")])
    return Authority(ec.generate_private_key(ec.SECP256R1()), name)


@pytest.fixture
async def tls_server(authority: Authority, tmp_path: Path) -> AsyncIterator[ControllerServer]:
    """A controller under TLS that listens on every address."""
    certificate, key = authority.issue("controller")
    for name, content in (("cert", certificate), ("key", key), ("ca", authority.issue("cell", is_authority=True)[0])):
        (tmp_path / name).write_bytes(content)
    server = ControllerServer(
        ControllerSettings(
            host="0.0.0.0",
            port=0,
            metrics_port=0,
            tls_certificate=tmp_path / "cert",
            tls_key=tmp_path / "key",
            tls_client_ca=tmp_path / "ca",
        )
    )
    await server.start()
    yield server
    await server.stop()


def stub(server: ControllerServer, authority: Authority, pair: tuple[bytes, bytes] | None) -> Any:
    certificate, key = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(authority.issue("cell", is_authority=True)[0], key, certificate)
    channel = grpc.aio.secure_channel(
        f"127.0.0.1:{server.port}", credentials, options=[("grpc.ssl_target_name_override", "controller")]
    )
    return channel, agent_registry_service_pb2_grpc.AgentRegistryServiceStub(channel)


async def test_an_agent_registers_under_the_name_in_its_certificate_alone(
    tls_server: ControllerServer, authority: Authority, agent_messages: Any
) -> None:
    channel, registry = stub(tls_server, authority, authority.issue("agent-a"))
    async with channel:
        request = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-a"), epoch=1)
        assert (await registry.RegisterAgent(request, timeout=5)).lease_id
        other = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-b"), epoch=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await registry.RegisterAgent(other, timeout=5)
    error = from_rpc_error(raised.value)
    assert error.reason == error_pb2.ERROR_REASON_PERMISSION_DENIED and "agent-a" in error.message


async def test_nobody_without_a_certificate_gets_in(
    tls_server: ControllerServer, authority: Authority, agent_messages: Any
) -> None:
    channel, registry = stub(tls_server, authority, None)
    async with channel:
        request = agent_registry_service_pb2.RegisterAgentRequest(agent=agent_messages("agent-a"), epoch=1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await registry.RegisterAgent(request, timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(tls_server.cell.fleet) == 0
