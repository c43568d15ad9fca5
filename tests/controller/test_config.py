"""Where the controller may listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman_controller.config import ControllerSettings, check


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_loopback_needs_no_tls(host: str) -> None:
    check(ControllerSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "controller.example"])
def test_other_addresses_need_tls(host: str) -> None:
    with pytest.raises(ValueError, match="--tls-certificate"):
        check(ControllerSettings(host=host))
    file = Path("x.pem")
    check(ControllerSettings(host=host, tls_certificate=file, tls_key=file, tls_client_ca=file))


def test_half_of_tls_is_refused() -> None:
    with pytest.raises(ValueError, match="all three"):
        check(ControllerSettings(tls_certificate=Path("x.pem"), tls_key=Path("y.pem")))


@pytest.mark.parametrize("endpoint", ["a", ":2379", "http://a:2379", "127.0.0.1:0", "127.0.0.1:65536"])
def test_an_address_of_etcd_that_cannot_be_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is no host:port"):
        check(ControllerSettings(etcd=("127.0.0.1:2379", endpoint)))


def test_an_advertised_address_that_nobody_could_dial_is_refused() -> None:
    with pytest.raises(ValueError, match="--advertise 'c1' has no port: give host:port"):
        check(ControllerSettings(advertise="c1"))
    check(ControllerSettings(advertise="c1:50050"))
