"""The controller process: services, health, timer, signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from dragoman.address import host_port
from dragoman.channel import server_options
from dragoman.errors import DragomanError
from dragoman.serving import ErrorInterceptor
from dragoman.tls import read_tls
from dragoman.v1 import (
    admission_service_pb2,
    admission_service_pb2_grpc,
    agent_registry_service_pb2,
    agent_registry_service_pb2_grpc,
    error_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    policy_service_pb2,
    policy_service_pb2_grpc,
    prefetch_service_pb2,
    prefetch_service_pb2_grpc,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
)
from dragoman_cli.ports import listen_problem
from dragoman_cli.process import MetricsServer
from dragoman_controller.cell import TICK_SECONDS, Cell
from dragoman_controller.config import ControllerSettings, check
from dragoman_controller.metrics import ControllerMetrics
from dragoman_controller.native.library import load
from dragoman_controller.policy import Policy
from dragoman_controller.policy_file import PolicyFile
from dragoman_controller.rpc.admission import AdmissionServicer
from dragoman_controller.rpc.fleet import FleetServicer
from dragoman_controller.rpc.policy import PolicyServicer
from dragoman_controller.rpc.prefetch import PrefetchServicer
from dragoman_controller.rpc.registry import AgentRegistryServicer
from dragoman_controller.rpc.telemetry import TelemetryServicer
from dragoman_controller.shared import Shared
from dragoman_controller.state import MemoryStore, StateStore
from dragoman_controller.tickets import CellKey, read_cell_keys

logger = logging.getLogger(__name__)

SERVICE_NAMES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (admission_service_pb2, "AdmissionService"),
        (agent_registry_service_pb2, "AgentRegistryService"),
        (fleet_service_pb2, "FleetService"),
        (policy_service_pb2, "PolicyService"),
        (prefetch_service_pb2, "PrefetchService"),
        (telemetry_service_pb2, "TelemetryService"),
    )
)
LIVENESS, READINESS = "liveness", "readiness"
_SAMPLE_TICKS = 5
_FILE_TICKS = 10
_CLOSE_SECONDS = 3.0


class StartupError(Exception):
    """The controller cannot start; one line says why and what to do."""


class ControllerServer:
    """One controller: its cell, its gRPC server and its /metrics."""

    def __init__(self, settings: ControllerSettings) -> None:
        """Reads the key, policy and TLS files. Raises StartupError."""
        try:
            check(settings)
            keys = read_cell_keys(settings.cell_key_file) if settings.cell_key_file else (CellKey.random(),)
            self._policy_file = PolicyFile(settings.policy_file) if settings.policy_file else None
            policy = self._policy_file.read() if self._policy_file else Policy()
            self._credentials = _credentials(settings)
            etcd_credentials = _etcd_credentials(settings)
        except OSError as error:
            raise StartupError(f"cannot read {error.filename}: {error.strerror}") from None
        except ValueError as error:
            raise StartupError(str(error)) from None
        self._settings = settings
        self.metrics = ControllerMetrics()
        self._library = load()
        self.cell = Cell(keys, policy, self.metrics, library=self._library)
        self.cell.hints.for_queue = settings.prefetch
        self.controller_id = secrets.token_hex(8)
        file_keys = keys if settings.cell_key_file else ()
        self.shared = Shared(
            _open_store(settings.etcd, etcd_credentials), self.cell, self.controller_id, settings.cell, file_keys
        )
        self._server = grpc.aio.server(options=server_options(), interceptors=[ErrorInterceptor()])
        self._health = health_aio.HealthServicer()
        self._http: MetricsServer | None = None
        self._timer: asyncio.Task[None] | None = None
        self._reloads: set[asyncio.Task[None]] = set()
        self.port = 0
        self.metrics_port = 0
        self._add_services()

    def _add_services(self) -> None:
        cell, server = self.cell, self._server
        admission_service_pb2_grpc.add_AdmissionServiceServicer_to_server(
            AdmissionServicer(cell, self._library), server
        )
        agent_registry_service_pb2_grpc.add_AgentRegistryServiceServicer_to_server(
            AgentRegistryServicer(cell, self.controller_id), server
        )
        fleet_service_pb2_grpc.add_FleetServiceServicer_to_server(FleetServicer(cell, self.shared), server)
        policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(cell, self.shared), server)
        prefetch_service_pb2_grpc.add_PrefetchServiceServicer_to_server(PrefetchServicer(cell), server)
        telemetry = TelemetryServicer(cell, self.metrics.registry)
        telemetry_service_pb2_grpc.add_TelemetryServiceServicer_to_server(telemetry, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((*SERVICE_NAMES, health_name, reflection.SERVICE_NAME), server)

    async def start(self) -> None:
        """Listens on both ports; `port` and `metrics_port` tell which. Raises StartupError."""
        host = self._settings.host.strip("[]")
        address = host_port(host, self._settings.port)
        if problem := listen_problem(host, self._settings.port, "--port"):
            raise StartupError(problem)
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:  # it was taken meanwhile
            raise StartupError(f"cannot listen on {address}: {error}") from None
        try:
            self._http = MetricsServer(self.metrics.registry, host, self._settings.metrics_port)
        except OSError as error:
            problem = listen_problem(host, self._settings.metrics_port, "--metrics-port")
            raise StartupError(problem or f"cannot serve /metrics: {error}") from None
        self.metrics_port = self._http.port
        await self.shared.start(self._settings.advertise or host_port(host, self.port))
        for name in ("", LIVENESS, READINESS, *SERVICE_NAMES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        self._timer = asyncio.create_task(self._run_timer())

    async def drain(self) -> None:
        """Not ready; refuses new requests; waits for those in the queue, at most the drain timeout."""
        for name in ("", READINESS):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        error = _closing()
        self.cell.admission.close(error)
        for _ in range(math.ceil(self._settings.drain_timeout / TICK_SECONDS)):
            if not self.cell.admission.has_waiting:
                break
            await asyncio.sleep(TICK_SECONDS)

    async def stop(self) -> None:
        """Refuses what waits and closes both ports. Agents and streams go on without this controller."""
        self.cell.admission.close(_closing())
        self.cell.admission.refuse_all(_closing())
        # One turn of the loop lets the handlers of what was refused answer before their calls are cancelled.
        await asyncio.sleep(TICK_SECONDS)
        await self.shared.close()
        await self._server.stop(0)
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
        if self._http is not None:
            await asyncio.to_thread(self._http.close)

    def reload(self) -> None:
        """Reads the cell key file and the policy file again; a file that cannot be used changes nothing."""
        for work in (self._reload_keys(), self._reload_policy()):
            task = asyncio.create_task(work)
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def _reload_keys(self) -> None:
        path = self._settings.cell_key_file
        if path is None:
            logger.warning("SIGHUP: the cell key was drawn at start, there is no --cell-key-file to read again")
            return
        try:
            await self.shared.publish_keys(read_cell_keys(path))
        except (OSError, ValueError, DragomanError) as error:
            logger.error("SIGHUP: the cell keys stay as they are: %s", error)
        else:
            logger.info("SIGHUP: cell keys read, the newest is %d", self.cell.minter.key_ids[0])

    async def _reload_policy(self) -> None:
        if self._policy_file is None:
            return
        try:
            updated = await self.shared.replace_policy(self._policy_file.read())
        except (OSError, ValueError, DragomanError) as error:
            logger.error("policy revision %d stays in force: %s", self.cell.policy.current.revision, error)
        else:
            if updated is not None:
                logger.info("policy file read, revision %d is in force", updated.revision)

    async def _run_timer(self) -> None:
        tick = 0
        while True:
            try:
                self.cell.tick()
                if tick % _SAMPLE_TICKS == 0:
                    self.metrics.sample(self.cell)
                if tick % _FILE_TICKS == 0 and self._policy_file is not None and self._policy_file.has_changed():
                    await self._reload_policy()
            except Exception:
                # A fault here must not stop leases and waits for good; it is logged each time until it is mended.
                logger.exception("fault in the timer")
            tick += 1
            await asyncio.sleep(TICK_SECONDS)


async def serve(settings: ControllerSettings) -> None:
    """Runs until a signal. SIGTERM drains; SIGINT stops now; a second signal stops at once. Raises StartupError."""
    server = ControllerServer(settings)
    stop, drain = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(event: asyncio.Event) -> None:
        if stop.is_set() or drain.is_set():
            stop.set()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            return
        event.set()

    loop.add_signal_handler(signal.SIGINT, on_signal, stop)
    loop.add_signal_handler(signal.SIGTERM, on_signal, drain)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    await server.start()
    try:
        logger.info("serving on %s:%d, metrics on %d", settings.host, server.port, server.metrics_port)
        if settings.announce:
            _announce(settings.host, server)
        await _first_of(stop, drain)
        if drain.is_set():
            draining = asyncio.create_task(server.drain())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((draining, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (draining, stopping):
                task.cancel()
    except asyncio.CancelledError:
        # The second signal: nothing is waited for any more.
        return
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(server.stop(), timeout=_CLOSE_SECONDS)


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _announce(host: str, server: ControllerServer) -> None:
    event = {
        "event": "serving",
        "grpc": host_port(host, server.port),
        "metrics": host_port(host, server.metrics_port),
    }
    print(json.dumps(event), flush=True)


def _closing() -> DragomanError:
    return DragomanError(
        error_pb2.ERROR_REASON_AGENT_DRAINING,
        "the controller is shutting down: ask another one, or this one again in 1 s",
        retry_delay=1.0,
    )


def _credentials(settings: ControllerSettings) -> grpc.ServerCredentials | None:
    flags = "--tls-certificate", "--tls-key", "--tls-client-ca"
    identity = read_tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca, flags)
    return identity.server_credentials() if identity else None


def _etcd_credentials(settings: ControllerSettings) -> grpc.ChannelCredentials | None:
    if settings.etcd_ca is None:
        return None
    certificate, key = (
        Path(path).read_bytes() if path else None for path in (settings.etcd_certificate, settings.etcd_key)
    )
    return grpc.ssl_channel_credentials(Path(settings.etcd_ca).read_bytes(), key, certificate)


def _open_store(endpoints: tuple[str, ...], credentials: grpc.ChannelCredentials | None) -> StateStore:
    if not endpoints:
        return MemoryStore()
    from dragoman_controller.etcd_store import EtcdStore

    return EtcdStore(endpoints, credentials)
