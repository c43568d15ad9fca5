"""TLS from the environment, and what a failed handshake is told as."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.controller.authority import Authority

from dragoman import AsyncClient, DragomanError
from dragoman.tls import TlsError, environment_identity, handshake_problem


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.named("cell")


def variables(folder: Path) -> dict[str, str]:
    return {f"DRAGOMAN_TLS_{name.upper()}": str(folder / name) for name in ("certificate", "key", "ca")}


def test_the_variables_of_the_processes_name_the_files(authority: Authority, tmp_path: Path) -> None:
    assert environment_identity({}) is None
    authority.write(tmp_path, "me")
    found = variables(tmp_path)
    identity = environment_identity(found)
    assert identity is not None and identity.names == ("me",)
    assert identity.server_credentials() is not None
    found["DRAGOMAN_TLS_CLIENT_CA"] = found.pop("DRAGOMAN_TLS_CA")
    assert environment_identity(found) == identity
    del found["DRAGOMAN_TLS_KEY"]
    with pytest.raises(TlsError, match="all three of DRAGOMAN_TLS_CERTIFICATE"):
        environment_identity(found)


async def test_a_client_says_what_is_wrong_with_the_files(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.write(tmp_path, "me", expired=True)
    for name, value in variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DragomanError, match="certificate has expired"):
        AsyncClient("127.0.0.1:9")


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ("Custom verification check failed: Hostname Verification Check failed.", "not for this name"),
        ("SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: certificate has expired", "has expired"),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", "not trusted here"),
        ("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "does not speak TLS"),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "closed the connection before the first answer"),
        ("Stream removed (Socket closed)", "it closed the connection: it has ended, or"),
        ("Connection refused", ""),
    ],
)
def test_handshakes_are_told_in_plain_words(details: str, expected: str) -> None:
    told = handshake_problem(details)
    assert expected in told and bool(told) == bool(expected)
