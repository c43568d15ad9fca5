"""Certificates for one run: an authority, and servers and clients that it signs."""

from __future__ import annotations

import datetime
import ipaddress

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; owner of its key, which never leaves the process."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "conformance authority")])
        certificate = self._builder(self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self._certificate = certificate.sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> str:
        """The authority's certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(self, name: str) -> tuple[str, str]:
        """Key and certificate, PEM, of `name`; "controller" stands for the address 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        san: x509.GeneralName = x509.DNSName(name)
        if name == "controller":
            san = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([san]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return private.decode(), certificate.public_bytes(pem).decode()

    def server_credentials(self, name: str) -> grpc.ServerCredentials:
        """Credentials of a server called `name` that asks every client for a certificate of this authority."""
        key, certificate = self.issue(name)
        return grpc.ssl_server_credentials(
            [(key.encode(), certificate.encode())], self.pem.encode(), require_client_auth=True
        )

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )
