"""What HTTP alone decides: routes, methods, CORS, keys, limits, deadlines. Against a real gateway without a controller."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest
from tests.gateway.stack import start_gateway

FOUR_KEYS = {"message", "type", "param", "code"}


def assert_envelope(reply: httpx.Response, status: int) -> dict[str, object]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert reply.headers["access-control-allow-origin"] == "*"
    body = reply.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == FOUR_KEYS
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    assert "Traceback" not in reply.text
    return body["error"]


def raw_exchange(url: str, data: bytes, *, seconds: float = 5.0) -> bytes:
    """Everything the server says to `data` until it closes."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=seconds) as connection:
        received = b""
        with suppress(ConnectionError):
            connection.sendall(data)
        with suppress(ConnectionResetError):  # what the server did not read of ours
            while chunk := connection.recv(65536):
                received += chunk
        return received


def test_unknown_route_is_an_envelope(lonely_gateway: str) -> None:
    error = assert_envelope(httpx.get(f"{lonely_gateway}/nowhere"), 404)
    assert "/nowhere" in str(error["message"])
    assert_envelope(httpx.post(f"{lonely_gateway}/v1/rerank", json={}), 404)
    assert_envelope(httpx.post(f"{lonely_gateway}/v1/responses", json={}), 404)


def test_wrong_method_says_which_is_allowed(lonely_gateway: str) -> None:
    reply = httpx.get(f"{lonely_gateway}/v1/chat/completions")
    assert_envelope(reply, 405)
    assert "POST" in reply.headers["allow"]
    reply = httpx.delete(f"{lonely_gateway}/v1/models")
    assert_envelope(reply, 405)
    assert "GET" in reply.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/docs", "/openapi.json", "/version"])
def test_head_works_where_get_does(lonely_gateway: str, path: str) -> None:
    head, get = httpx.head(f"{lonely_gateway}{path}"), httpx.get(f"{lonely_gateway}{path}")
    assert head.status_code == get.status_code
    assert head.content == b""


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/tokenize", "/health", "/nowhere"])
def test_s11_options_needs_no_key_and_reflects_headers(keyed_gateway: str, path: str) -> None:
    reply = httpx.options(
        f"{keyed_gateway}{path}",
        headers={
            "origin": "http://example.org",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-stainless-os",
        },
    )
    assert reply.status_code in (200, 204)
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "authorization" in reply.headers["access-control-allow-headers"]
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert int(reply.headers["access-control-max-age"]) > 0


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}, {"x-api-key": "sesam"},
     {"authorization": "Bearer sésame".encode().decode("latin-1")}],
)  # fmt: skip
def test_a_wrong_key_is_refused(keyed_gateway: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    error = assert_envelope(httpx.get(f"{keyed_gateway}/v1/models", headers=encoded), 401)
    assert error["code"] == "invalid_api_key"


@pytest.mark.parametrize("headers", [{"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}])
def test_the_right_key_is_accepted_in_both_forms(keyed_gateway: str, headers: dict[str, str]) -> None:
    assert httpx.get(f"{keyed_gateway}/v1/models", headers=headers).status_code == 200
    assert httpx.get(f"{keyed_gateway}/version").status_code == 200


def test_no_key_is_in_a_log_a_metric_or_an_error() -> None:
    """Neither the gateway's own nor one that somebody guessed; at the log level that says most."""
    gateway, url = start_gateway("127.0.0.1:9", "--api-key", "sesame-7f3a", "--log-level", "debug")
    try:
        shown = ""
        for key in ("sesame-7f3a", "guess-91bc"):
            for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
                for path, body in (
                    ("/v1/models", None),
                    ("/v1/completions", "{"),
                    ("/nowhere", None),
                    ("/metrics", None),
                ):
                    reply = httpx.request("POST" if body else "GET", url + path, headers={name: value}, content=body)
                    shown += f"{reply.headers} {reply.text}"
        assert "invalid_api_key" in shown and "dragoman_" in shown
    finally:
        gateway.stop()
    assert gateway.log, "the gateway logs at this level"
    assert not [key for key in ("sesame-7f3a", "guess-91bc") if key in shown + "".join(gateway.log)]


def test_a_key_is_ignored_where_none_is_set(lonely_gateway: str) -> None:
    assert httpx.get(f"{lonely_gateway}/v1/models", headers={"authorization": "Bearer any"}).status_code == 200


def test_request_id_is_echoed_or_made(lonely_gateway: str) -> None:
    assert httpx.get(f"{lonely_gateway}/version", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"
    made = {httpx.get(f"{lonely_gateway}/version").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2


def test_s23_a_megabyte_request_id_is_capped(lonely_gateway: str) -> None:
    reply = httpx.get(f"{lonely_gateway}/version", headers={"x-request-id": "x" * 1_000_000})
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == "x" * 128


def test_s18_doubled_and_trailing_slashes_are_tolerated(lonely_gateway: str) -> None:
    for path in ("/v1//models", "//v1/models", "/v1/models/"):
        assert httpx.get(f"{lonely_gateway}{path}").json() == {"object": "list", "data": []}, path


def test_health_says_why_nothing_is_served(lonely_gateway: str) -> None:
    for path in ("/health", "/ready"):
        reply = httpx.get(f"{lonely_gateway}{path}")
        assert reply.status_code == 503
        assert reply.json()["phase"] == "controller_unreachable"
        assert 1 <= int(reply.headers["retry-after"]) <= 60


def test_generation_without_a_controller_is_a_retryable_503(lonely_gateway: str) -> None:
    reply = httpx.post(f"{lonely_gateway}/v1/completions", json={"prompt": "x"})
    assert_envelope(reply, 503)
    assert reply.headers["x-should-retry"] == "true"
    assert 1 <= int(reply.headers["retry-after"]) <= 60


def test_a_body_over_the_limit_is_413(lonely_gateway: str) -> None:
    big = b"[" + b" " * (16 << 20) + b"]"
    assert assert_envelope(httpx.post(f"{lonely_gateway}/v1/completions", content=big), 413)["code"] == (
        "request_too_large"
    )
    chunked = httpx.post(f"{lonely_gateway}/v1/completions", content=iter([big[: 1 << 20]] * 18))
    assert_envelope(chunked, 413)


def test_s29_a_half_sent_body_is_408_within_the_deadline(lonely_gateway: str) -> None:
    start = time.monotonic()
    reply = raw_exchange(lonely_gateway, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in reply
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_s29_half_sent_headers_and_silence_end(lonely_gateway: str, data: bytes) -> None:
    start = time.monotonic()
    reply = raw_exchange(lonely_gateway, data)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - start < 4


def test_endless_headers_are_refused(lonely_gateway: str) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    reply = raw_exchange(lonely_gateway, head + b"".join(b"h%d: " % i + b"x" * 60000 + b"\r\n" for i in range(40)))
    assert reply == b"" or reply.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(f"{lonely_gateway}/version").status_code == 200


def test_what_is_not_http_gets_an_envelope(lonely_gateway: str) -> None:
    reply = raw_exchange(lonely_gateway, b"\x16\x03\x01 hello\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b'"type":"invalid_request_error"' in reply


def test_s12_an_idle_connection_outlives_seventy_five_seconds() -> None:
    from dragoman_gateway.config import GatewaySettings

    assert GatewaySettings().keep_alive >= 75


def test_s12_an_idle_connection_ends_when_it_was_said_to_and_not_before() -> None:
    gateway, url = start_gateway("127.0.0.1:9", "--keep-alive", "1.2", "--header-timeout", "0.5")
    try:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=8) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            began = time.monotonic()
            assert connection.recv(65536) == b""
            assert time.monotonic() - began > 1.0
    finally:
        gateway.stop()


def test_s12_a_connection_serves_many_requests(lonely_gateway: str) -> None:
    with httpx.Client() as client:
        for _ in range(200):
            assert client.get(f"{lonely_gateway}/version").status_code == 200
        time.sleep(1.7)  # longer than the deadline of headers, which an idle connection must not meet
        assert client.post(f"{lonely_gateway}/v1/completions", content=b"[").status_code == 400


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"null", b"3", b"{:", b"", b"\xef\xbb\xbf{}", b'{"a":"\xe9"}', b"[" * 2000,
                                  b'{"temperature":NaN}', b'{"temperature":1e999}', b'{"prompt":"\\udc8d"}'])  # fmt: skip
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_b12_a_body_that_is_no_json_object_is_400(lonely_gateway: str, route: str, body: bytes) -> None:
    assert_envelope(httpx.post(f"{lonely_gateway}{route}", content=body), 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"logit_bias":{"4":1,"5":1e400}}', "logit_bias.5"), (b'{"prompt":[1,[-Infinity]]}', "prompt[1][0]"),
        (b'{"\\ud83d":NaN}', "?"), (b'{"a":[{}],"b":{"c":[1.5,{"d":NaN}]}}', "b.c[1].d"), (b"NaN", None),
        (b'{"a":' * 900 + b"NaN" + b"}" * 900, "a" + ".a" * 127 + "."), (b'{"a":' + b"[" * 5000 + b"NaN", None),
    ],
)  # fmt: skip
def test_b05_b07_a_number_that_json_lacks_is_named(lonely_gateway: str, body: bytes, param: str | None) -> None:
    reply = httpx.post(f"{lonely_gateway}/v1/completions", content=body)
    assert assert_envelope(reply, 400)["param"] == param


def test_json_is_read_whatever_the_content_type_says(lonely_gateway: str) -> None:
    reply = httpx.post(
        f"{lonely_gateway}/v1/completions", content=b'{"prompt":3.5,"n":0}', headers={"content-type": "text/plain"}
    )
    assert assert_envelope(reply, 400)["param"] == "n"


def test_openapi_describes_every_route_and_docs_need_no_other_server(lonely_gateway: str) -> None:
    document = httpx.get(f"{lonely_gateway}/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            reply = httpx.request(method, f"{lonely_gateway}{path.replace('{id}', 'x')}", content=b"")
            assert str(reply.status_code) in methods[method]["responses"], (path, reply.status_code)
    page = httpx.get(f"{lonely_gateway}/docs").text
    assert "http://" not in page and "https://" not in page


def test_metrics_are_exposed(lonely_gateway: str) -> None:
    text = httpx.get(f"{lonely_gateway}/metrics").text
    assert 'dragoman_gateway_requests_total{outcome="ok",route="chat"}' in text
    assert "dragoman_build_info" in text
