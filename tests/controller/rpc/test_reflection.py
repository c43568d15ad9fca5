"""Reflection of a controller."""

from __future__ import annotations

import asyncio

import grpc
from tests.reflection import listed_services

from dragoman_controller.server import ControllerServer


async def test_every_service_is_listed_and_described(server: ControllerServer) -> None:
    def listed() -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            return listed_services(channel)

    ours = {"Admission", "AgentRegistry", "Fleet", "Policy", "Prefetch", "Telemetry"}
    found = await asyncio.to_thread(listed)
    assert {f"dragoman.v1.{name}Service" for name in ours} <= found
    assert "dragoman.v1.GenerationService" not in found, "that is the agents'"
