"""Certificates for tests: an authority that signs what it is asked to, also what nobody should accept."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


@dataclass
class Authority:
    """Signs certificates for a day, or for the day before yesterday."""

    key: ec.EllipticCurvePrivateKey
    name: x509.Name

    @classmethod
    def named(cls, name: str) -> Authority:
        """A new one."""
        return cls(ec.generate_private_key(ec.SECP256R1()), x509.Name([_common_name(name)]))

    @property
    def certificate(self) -> bytes:
        """Its own, in PEM form."""
        return self._sign(self.name, self.key, x509.BasicConstraints(ca=True, path_length=None), (), False)

    def issue(self, *names: str, expired: bool = False) -> tuple[bytes, bytes]:
        """Certificate and key in PEM form, for these names; one that is an IP address is named as such."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([_common_name(names[0] if names else "nobody")])
        pem = self._sign(subject, key, x509.BasicConstraints(ca=False, path_length=None), names, expired)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem, private

    def write(self, folder: Path, *names: str, expired: bool = False) -> list[str]:
        """The three --tls flags of a process with these names."""
        folder.mkdir(parents=True, exist_ok=True)
        certificate, key = self.issue(*names, expired=expired)
        for name, content in (("certificate", certificate), ("key", key), ("ca", self.certificate)):
            (folder / name).write_bytes(content)
        return [part for name in ("certificate", "key", "ca") for part in (f"--tls-{name}", str(folder / name))]

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
        names: tuple[str, ...],
        expired: bool,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        start, end = (now - 2 * DAY, now - DAY) if expired else (now - DAY / 24, now + DAY)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(constraints, critical=True)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(n) for n in names]), critical=False
            )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _common_name(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(x509.NameOID.COMMON_NAME, name)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
