"""The container's health check against the real health service."""

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dragoman.healthcheck import check


@pytest.fixture
async def server() -> object:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
    await servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_it_tells_serving_from_not_serving_from_unknown_from_gone(server: str) -> None:
    import asyncio

    assert await asyncio.to_thread(check, server, "liveness") == ""
    assert await asyncio.to_thread(check, server) == ""
    assert "not serving" in await asyncio.to_thread(check, server, "readiness")
    assert "NOT_FOUND" in await asyncio.to_thread(check, server, "nonsense")
    assert "UNAVAILABLE" in await asyncio.to_thread(check, "127.0.0.1:1", "liveness")
    assert "300 bytes in its name" in await asyncio.to_thread(check, server, "a" * 300)


def test_what_cannot_be_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("localhost").startswith("the address 'localhost' has no port")
    monkeypatch.setenv("DRAGOMAN_TLS_CERTIFICATE", "/absent.pem")
    assert check("127.0.0.1:1").startswith("TLS needs all three of ")
