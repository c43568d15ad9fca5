"""The agent's gRPC server: every service, health by name, reflection, and a port that is really ours."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from dragoman.address import host_port
from dragoman.channel import server_options
from dragoman.compat import vllm_engine_pb2, vllm_engine_pb2_grpc
from dragoman.serving import ErrorInterceptor
from dragoman.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    hardware_service_pb2,
    hardware_service_pb2_grpc,
    kv_transfer_service_pb2,
    kv_transfer_service_pb2_grpc,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
    tokenizer_service_pb2,
    tokenizer_service_pb2_grpc,
)
from dragoman_agent.startup import StartupError
from dragoman_cli.ports import listen_problem

# A write must wait for the reader, since credit follows the writes: by default 64 KiB pile up here before one waits.
_STREAM_OPTIONS = [("grpc.http2.write_buffer_size", 1024)]
LIVENESS, READINESS = "liveness", "readiness"
_GENERATION = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_EMBEDDING = embedding_service_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name
_ALWAYS = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (tokenizer_service_pb2, "TokenizerService"),
        (hardware_service_pb2, "HardwareService"),
        (telemetry_service_pb2, "TelemetryService"),
    )
)
_KV_TRANSFER = kv_transfer_service_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name
_VLLM = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
# Names whose health follows readiness: they need the engine. "" is the whole server.
READY_NAMES = ("", READINESS, _GENERATION, _EMBEDDING, _KV_TRANSFER)


@dataclass(frozen=True, slots=True)
class Services:
    """The servicers of one agent."""

    generation: generation_service_pb2_grpc.GenerationServiceServicer
    embedding: embedding_service_pb2_grpc.EmbeddingServiceServicer
    tokenizer: tokenizer_service_pb2_grpc.TokenizerServiceServicer
    hardware: hardware_service_pb2_grpc.HardwareServiceServicer
    telemetry: telemetry_service_pb2_grpc.TelemetryServiceServicer
    kv_transfer: kv_transfer_service_pb2_grpc.KvTransferServiceServicer
    vllm: vllm_engine_pb2_grpc.VllmEngineServicer | None = None


class AgentServer:
    """The listening server and its health."""

    def __init__(self, services: Services, credentials: grpc.ServerCredentials | None = None) -> None:
        """Without credentials nothing is encrypted, and nobody is asked who they are: for loopback."""
        self._credentials = credentials
        self._server = grpc.aio.server(options=[*server_options(), *_STREAM_OPTIONS], interceptors=[ErrorInterceptor()])
        self._health = health_aio.HealthServicer()
        self._ready: bool | None = None
        self._live: bool | None = None
        self.port = 0
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(services.generation, self._server)
        embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(services.embedding, self._server)
        tokenizer_service_pb2_grpc.add_TokenizerServiceServicer_to_server(services.tokenizer, self._server)
        hardware_service_pb2_grpc.add_HardwareServiceServicer_to_server(services.hardware, self._server)
        telemetry_service_pb2_grpc.add_TelemetryServiceServicer_to_server(services.telemetry, self._server)
        kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(services.kv_transfer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._ready_names: tuple[str, ...] = READY_NAMES
        if services.vllm is not None:
            vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(services.vllm, self._server)
            self._ready_names = (*READY_NAMES, _VLLM)
        names = (
            *(name for name in self._ready_names if "." in name),
            *_ALWAYS,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        )
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> None:
        """Bind and listen; `port` 0 takes a free one, `self.port` says which. Raises StartupError."""
        if problem := listen_problem(host, port, "--port"):
            raise StartupError(problem)
        try:
            address = host_port(host, port)
            if self._credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:  # it was taken meanwhile
            raise StartupError(f"cannot listen on {host_port(host, port)}: {error}") from None
        for name in _ALWAYS:
            await self._set(name, True)
        await self.set_health(live=True, ready=False)
        await self._server.start()

    async def set_health(self, *, live: bool, ready: bool) -> None:
        """Publish the health of every name that follows the engine."""
        if live != self._live:
            self._live = live
            await self._set(LIVENESS, live)
        if ready != self._ready:
            self._ready = ready
            for name in self._ready_names:
                await self._set(name, ready)

    async def stop(self, grace: float) -> None:
        """Take no new calls; after `grace` seconds cancel those still open."""
        await self._server.stop(grace)

    async def _set(self, name: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, status)
