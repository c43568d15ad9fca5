"""Tenants: by API key or header, and what the controller does to them is seen over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers
from tests.gateway.stack import Process, Stack, start_agent, start_controller, start_gateway, wait_until_ready

from dragoman_gateway.errors import ApiError
from dragoman_gateway.tenants import read_keys, tenant_of


def test_a_key_file_names_keys_and_the_tenants_of_some(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alpha acme\n\nbeta\n")
    keys = read_keys("gamma", path)
    assert keys.tenants == {b"gamma": "", b"alpha": "acme", b"beta": ""}
    assert keys.find(Headers({"authorization": "Bearer alpha"})) == "acme"
    assert keys.find(Headers({"x-api-key": "beta"})) == ""
    assert keys.find(Headers({"x-api-key": "acme"})) is None and keys.find(Headers()) is None
    assert "alpha" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# no key\n\n", ":1: expected a key"),
        ("\n \n", "holds no key"),
        ("k " + "t" * 129, ":1: expected a key"),
        ("k bob\nj\nk carol\n", ":3: the key is above with another tenant"),
    ],
)
def test_a_bad_key_file_is_refused_with_the_line_and_without_the_key(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=expected) as raised:
        read_keys("", tmp_path / "keys")
    assert "no key\n" not in str(raised.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys("", tmp_path / "absent")


def test_the_tenant_is_that_of_the_key_else_of_the_header() -> None:
    assert tenant_of("acme", Headers()) == tenant_of("acme", Headers({"x-dragoman-tenant": "acme"})) == "acme"
    assert tenant_of("", Headers({"x-dragoman-tenant": "other"})) == "other"
    assert tenant_of("", Headers()) == ""
    for key_tenant, asked, status in (("acme", "other", 403), ("", "t" * 129, 400), ("", "a\x7fb", 400)):
        with pytest.raises(ApiError) as raised:
            tenant_of(key_tenant, Headers({"x-dragoman-tenant": asked}))
        assert raised.value.status == status and raised.value.param == "x-dragoman-tenant"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A cell where the tenant `poor` may run one request and let one wait."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "policy.toml").write_text("[tenants.poor]\nmax_running_requests = 1\nmax_queued_requests = 1\n")
    (folder / "keys").write_text("poor-key poor\nany-key\n")
    controller, address = start_controller("--policy-file", str(folder / "policy.toml"))
    stack = Stack(controller, address)
    try:
        stack.agents.append(start_agent(address, "--null-speed", "10"))
        stack.gateway, stack.url = start_gateway(address, "--api-key-file", str(folder / "keys"))
        stack.agents[0].wait_for("ready")
        wait_until_ready(stack.url)
        yield stack
    finally:
        stack.stop()


def complete(url: str, headers: dict[str, str], max_tokens: int) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)


def test_a_tenant_at_its_limits_is_refused_and_others_are_not(limited: Stack) -> None:
    poor = {"authorization": "Bearer poor-key"}
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(complete(limited.url, poor, 150))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "tenant 'poor'" in refused.json()["error"]["message"] and int(refused.headers["retry-after"]) >= 1
    rich = {"authorization": "Bearer any-key", "x-dragoman-tenant": "rich"}
    others = [threading.Thread(target=lambda: answers.append(complete(limited.url, rich, 20))) for _ in range(4)]
    del answers[:]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4


def test_a_key_of_one_tenant_does_not_pass_for_another(limited: Stack) -> None:
    reply = complete(limited.url, {"authorization": "Bearer poor-key", "x-dragoman-tenant": "rich"}, 1)
    assert reply.status_code == 403 and reply.json()["error"]["code"] == "tenant_mismatch"


def test_a_gateway_with_half_an_identity_does_not_start(tmp_path: Path) -> None:
    gateway = Process("dragoman_gateway.main", "--port", "0", "--tls-ca", str(tmp_path / "ca"))
    assert gateway.child.wait(20) == 2
    gateway.stop()
    assert any("all three of --tls-certificate, --tls-key and --tls-ca" in line for line in gateway.log)
