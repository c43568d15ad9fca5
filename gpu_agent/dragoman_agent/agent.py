"""The life of an agent process: plan, listen, load, serve, drain, stop. One owner of the order in which this happens."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import time
from typing import Any

from dragoman.address import host_port
from dragoman.tls import TlsIdentity, open_channel
from dragoman.v1 import agent_pb2, error_pb2, telemetry_service_pb2
from dragoman_agent.config import AgentSettings
from dragoman_agent.draining import Drainer
from dragoman_agent.engine.messages import Progress, Ready, Step, TierReport, Tune, Warmed
from dragoman_agent.hardware_watch import HardwareWatch
from dragoman_agent.kv_journal import KvJournal
from dragoman_agent.membership import Membership
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.pal.observed import Observations
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.replan import SUBJECT as REPLAN_SUBJECT
from dragoman_agent.prefetch import Prefetcher
from dragoman_agent.registration import AgentPart
from dragoman_agent.rpc.acceptance import Acceptance
from dragoman_agent.rpc.embedding import EmbeddingServicer
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.gate import Capacity, Gate, Phase, StepClock
from dragoman_agent.rpc.generation import GenerationServicer
from dragoman_agent.rpc.hardware import HardwareServicer
from dragoman_agent.rpc.kv_transfer import KvFormat, KvTransferServicer
from dragoman_agent.rpc.served_model import served_model
from dragoman_agent.rpc.server import AgentServer, Services
from dragoman_agent.rpc.telemetry import TelemetryServicer
from dragoman_agent.rpc.tokenizer import TokenizerServicer
from dragoman_agent.rpc.vllm_engine import VllmEngineServicer, vllm_facts
from dragoman_agent.self_report import describe_agent, load_of_agent
from dragoman_agent.startup import Prepared, StartupError
from dragoman_agent.tickets import TicketVerifier
from dragoman_cli.ports import listen_problem
from dragoman_cli.process import MetricsServer

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.25
# On SIGINT: the engine ends its streams, the last messages leave, everything is gone well within 5 s.
ENGINE_STOP_SECONDS = 2.0
FLUSH_SECONDS = 0.5
_STATES = {
    Phase.LOADING: agent_pb2.AGENT_STATE_STARTING,
    Phase.SERVING: agent_pb2.AGENT_STATE_SERVING,
    Phase.DRAINING: agent_pb2.AGENT_STATE_DRAINING,
    Phase.CLOSED: agent_pb2.AGENT_STATE_DRAINING,
}


class Agent:
    """One agent. `run` returns the exit code."""

    def __init__(self, settings: AgentSettings, prepared: Prepared, tls: TlsIdentity | None = None) -> None:
        """`tls`: who the agent is towards clients, controllers and other agents; None for loopback. Raises StartupError."""
        self._settings = settings
        self._model = served_model(
            prepared.source, settings.served_model_name, prepared.max_context_tokens, prepared.chat_template
        )
        self._pal = prepared.pal
        self._engine_process = prepared.engine
        self._defaults = prepared.source.generation.in_words()
        self._num_parameters = prepared.source.config.num_parameters
        self._vllm_facts = vllm_facts(prepared.source, settings.model_spec, prepared.pal.plan, is_open=settings.open)
        plan = prepared.pal.plan
        self.agent_id = settings.resolved_agent_id(plan.device_kind)
        if tls is not None and self.agent_id not in tls.names:
            raise StartupError(
                f"--tls-certificate is for {', '.join(tls.names) or 'no name'}, and not for agent {self.agent_id!r}: clients "
                "and controllers would refuse it; give the agent a certificate with its id as subject alternative name"
            )
        self._tls = tls
        self._credentials = tls.channel_credentials() if tls else None
        self.epoch = secrets.randbits(64) | 1
        self._engine = EngineClient(prepared.engine, self, self._model.tokenizer)
        self._journal = KvJournal()
        verifier = None
        if not settings.open:
            verifier = TicketVerifier(self.agent_id, self.epoch, self._model.digest, _monotonic_ms)
        self._verifier = verifier
        self._metrics = AgentMetrics(
            device_kind=plan.device_kind, waiting_by_class=lambda: self._gate.waiting_by_class()
        )
        self._observations = Observations(plan, prepared.pal.log, self._metrics.take_decision)
        for decision in prepared.pal.log.all():
            self._metrics.take_decision(decision)
        model = None if plan.device_kind == "null" else prepared.source.config
        pids = (os.getpid(), prepared.engine.pid)
        self._watch = HardwareWatch(prepared.pal, model, self._metrics, self, lambda: pids)
        self._step_clock = StepClock(plan.step_model.decode_step_seconds(1, plan.max_context_tokens / 2))
        self._gate = Gate(
            self._engine,
            Capacity(plan.max_num_seqs, plan.max_num_waiting),
            verifier,
            self._metrics,
            self._step_clock.mean_or_predicted,
        )
        self._acceptance = Acceptance(self._gate, self._model, self.epoch)
        self._generation = GenerationServicer(self._engine, self._acceptance, self._model, self.epoch)
        self._kv_transfer = KvTransferServicer(self._engine, self._gate)
        self._prefetcher = Prefetcher(
            self._engine,
            self._journal,
            lambda outcome: self._metrics.hints.labels(outcome).inc(),
            dial=lambda address, agent_id: open_channel(address, self._credentials, agent_id),
        )
        self._tier_rate = 0.0  # bytes/s
        self._server: AgentServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._membership: Membership | None = None
        self._end: asyncio.Future[int] | None = None
        self._ready_task: asyncio.Task[None] | None = None
        self._drainer = Drainer(self, notice_seconds=settings.drain_notice, limit_seconds=settings.drain_timeout)
        self._engine.on_step(self._take_step)
        self._engine.on_tiers = self._take_tiers

    async def run(self) -> int:
        """Serve until told to stop or the engine dies; the exit code. Raises StartupError."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        health = asyncio.create_task(self._watch_health())
        try:
            await self._listen()
            await self._engine.start()
            return await self._end
        finally:
            health.cancel()
            self._drainer.cancel()
            await self._close()

    async def _listen(self) -> None:
        settings = self._settings
        embedding = EmbeddingServicer(self._engine, self._gate, self._model)
        vllm = VllmEngineServicer(
            self._engine, self._gate, self._acceptance, self._model, embedding, self._metrics.registry, self._vllm_facts
        )
        self._server = AgentServer(
            Services(
                generation=self._generation,
                embedding=embedding,
                tokenizer=TokenizerServicer(self._model),
                hardware=HardwareServicer(self._pal.view),
                telemetry=TelemetryServicer(self._metrics.registry, self._load_sample, self._engine),
                kv_transfer=self._kv_transfer,
                vllm=vllm if settings.vllm_grpc == "on" else None,
            ),
            self._tls.server_credentials() if self._tls else None,
        )
        await self._server.start(settings.host, settings.port)
        try:
            self._metrics_server = MetricsServer(self._metrics.registry, settings.host, settings.metrics_port)
        except OSError as error:
            problem = listen_problem(settings.host, settings.metrics_port, "--metrics-port")
            raise StartupError(problem or f"cannot serve /metrics: {error}") from None
        logger.info("%s: %s; listening on %s", self.agent_id, self._pal.reason, self._grpc_address)
        self._announce("serving", grpc=self._grpc_address, metrics=self._metrics_address, agent_id=self.agent_id)

    @property
    def _grpc_address(self) -> str:
        return host_port(self._settings.host, self._server.port if self._server else 0)

    @property
    def _metrics_address(self) -> str:
        port = self._metrics_server.port if self._metrics_server else 0
        return host_port(self._settings.host, port)

    # What the engine says.

    def engine_progress(self, progress: Progress) -> None:
        """Loading goes on."""
        self._announce("progress", phase=progress.phase, done=progress.done, total=progress.total, unit=progress.unit)

    def engine_ready(self, ready: Ready) -> None:
        """The first step has run: register and take requests."""
        if self._gate.phase is Phase.LOADING:
            self._gate.phase = Phase.SERVING
        self._take_timed(ready.info)
        self._kv_transfer.format = self._prefetcher.format = KvFormat.of_ready(
            ready.info, self._model.digest, self._pal.plan.page_size
        )
        self._watch.start()
        self._membership = Membership(self._settings.controllers, self._agent_part())
        self._gate.on_outcome = self._membership.report
        self._membership.start()
        self._ready_task = asyncio.create_task(self._tell_ready({**ready.info, **self._facts()}))

    async def _tell_ready(self, info: dict[str, Any]) -> None:
        """Health first: who reads the announcement may ask at once."""
        await self._update_health()
        logger.info("ready: %s", json.dumps(info))
        self._announce("ready", info=info)

    def engine_warmed(self, warmed: Warmed) -> None:
        """What the start left for later is there, or has a problem. Where steps were timed, the step model is made anew."""
        self._take_timed(warmed.info)
        if not warmed.problem:  # of which the engine's process has warned
            logger.info("warmed up: %s", json.dumps(warmed.info))
        self._announce("warmed", info=warmed.info, problem=warmed.problem)

    def _take_timed(self, info: dict[str, Any]) -> None:
        """What the engine timed: the measured sides of decisions, and the step model."""
        self._observations.loaded(info)
        self._watch.steps_timed([tuple(step) for step in info.get("decode_steps", ())])

    def engine_died(self, reason: int, message: str) -> None:
        """Every stream has got its end. The process leaves too: a supervisor starts it anew with a new epoch."""
        logger.error("the engine is gone, the agent stops: %s", message)
        self._gate.phase = Phase.CLOSED
        self._announce("fatal", message=message)
        self._finish(1)

    def _take_step(self, step: Step) -> None:
        self._metrics.take_step(step, self._engine.num_tokens_of_step)
        self._observations.take_step(step.load, step.step_seconds)
        self._watch.take_step(step)
        if step.step_seconds:
            # The host works on one step while the device runs another: the slower of the two sets the pace.
            self._step_clock.add(max(step.step_seconds, step.host_seconds))
        if step.stored_hashes or step.removed_hashes:
            self._journal.take(step.stored_hashes, step.removed_hashes)
        if step.lower_stored_hashes or step.lower_removed_hashes:
            self._journal.take_below(step.lower_stored_hashes, step.lower_removed_hashes)

    def _take_tiers(self, report: TierReport) -> None:
        self._metrics.take_tiers(report)
        self._tier_rate = report.bring_bytes_per_second
        self._observations.take_tiers(report.tiers)

    def _facts(self) -> dict[str, Any]:
        plan = self._pal.plan
        return {
            "agent_id": self.agent_id,
            "model": self._model.name,
            "names": list(self._model.names),
            "device": plan.device_kind,
            "device_name": self._pal.device_name,
            "reason": self._pal.reason,
            "num_parameters": 0 if plan.device_kind == "null" else self._num_parameters,
            "road": plan.road,
            "max_context_tokens": self._model.limits.max_context_tokens,
            "kv_tokens": (plan.num_blocks - 1) * plan.page_size,
            "max_num_seqs": plan.max_num_seqs,
            "sampling_defaults": self._defaults,
            "grpc": self._grpc_address,
        }

    # What others ask.

    def _agent_part(self) -> AgentPart:
        return AgentPart(
            describe=self._describe,
            epoch=self.epoch,
            monotonic_ms=_monotonic_ms,
            state=self._state,
            load=self._load,
            set_keys=self._verifier.set_keys if self._verifier is not None else lambda source, keys: None,
            drain=self.drain,
            undrain=self._drainer.undrain,
            revoke=self._gate.revoke,
            prefetch=self._prefetcher.hint,
            journal=self._journal,
            dial=lambda address: open_channel(address, self._credentials),
        )

    def _describe(self) -> agent_pb2.Agent:
        return describe_agent(
            self.agent_id,
            self._settings.advertise or self._grpc_address,
            self._metrics_address,
            self._pal.view.candidates(),
            self._model,
            self._watch.plan,
            self._kv_transfer.format,
        )

    def _state(self) -> agent_pb2.AgentState:
        return agent_pb2.AGENT_STATE_DRAINING if self._gate.cordoned else _STATES[self._gate.phase]

    def _load(self) -> agent_pb2.AgentLoad:
        return load_of_agent(
            self._engine, self._pal.plan.num_blocks - 1, self._step_clock.mean(), self._prefetcher.rate, self._tier_rate
        )

    def _load_sample(self) -> telemetry_service_pb2.AgentLoadSample:
        return telemetry_service_pb2.AgentLoadSample(agent_id=self.agent_id, state=self._state(), load=self._load())

    async def _watch_health(self) -> None:
        """Liveness and readiness follow the step age: a process that answers and does not step is not healthy."""
        was_serving: bool | None = None  # None until the engine is ready
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            stepping = self._engine.is_serving
            if was_serving and not stepping:
                logger.error("no engine step for %.1f s: not serving", self._engine.step_age)
            if stepping and was_serving is False:
                logger.warning("the engine steps again: serving")
            if stepping or was_serving:
                was_serving = stepping
            if told := self._engine.let_go_when_wedged(self._gate.tell_lost):
                logger.error("the engine is wedged: %d requests were told to resume elsewhere", told)
            if self._engine.give_up_when_hung():
                return
            await self._update_health()

    async def _update_health(self) -> None:
        if self._server is None:
            return
        stepping = self._engine.is_serving
        live = stepping or (self._engine.ready is None and not self._engine.is_dead)
        await self._server.set_health(live=live, ready=stepping and self._gate.is_open)

    # WatchHost.

    def tune(self, limits: Tune) -> None:
        """See WatchHost."""
        self._engine.tune(limits)

    def plan_changed(self, plan: Plan) -> None:
        """See WatchHost."""
        self._observations.use(plan, REPLAN_SUBJECT)
        if self._membership is not None:
            self._membership.describe_again()

    def cordon(self, reason: str) -> None:
        """See WatchHost. The process stays until it is told to go: what it serves may still end well."""
        self._gate.cordoned = reason
        self._announce("cordoned", message=reason)

    def device_lost(self, reason: str) -> None:
        """See WatchHost."""
        self._engine.abandon(int(error_pb2.ERROR_REASON_DEVICE_FAULT), f"{reason}; resume on another agent")

    # The end.

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._drainer.drain(None, final=True)
            return
        if self._gate.phase is Phase.CLOSED and self._end is not None and self._end.done():
            self._engine_process.kill()
            os._exit(130)
        logger.info("interrupted: ending all streams now")
        self._gate.phase = Phase.CLOSED
        self._finish(0)

    def drain(self, grace_seconds: float | None) -> None:
        """Announce the end, then refuse new requests, finish those under way, hand over the rest, exit 0."""
        self._drainer.drain(grace_seconds)

    # DrainHost.

    @property
    def num_live(self) -> int:
        """See DrainHost."""
        return len(self._engine.live)

    async def announce_drain(self) -> None:
        """See DrainHost."""
        if self._gate.phase is not Phase.CLOSED:
            self._gate.phase = Phase.DRAINING
        if self._server is not None:
            await self._server.set_health(live=True, ready=False)

    def close_door(self) -> None:
        """See DrainHost."""
        self._gate.phase = Phase.CLOSED

    async def wait_idle(self) -> None:
        """See DrainHost."""
        await self._engine.wait_idle()

    async def reopen(self) -> None:
        """See DrainHost."""
        self._gate.phase = Phase.SERVING if self._engine.ready is not None else Phase.LOADING
        await self._update_health()

    def leave(self) -> None:
        """See DrainHost."""
        self._finish(0)

    def _finish(self, code: int) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(code)

    async def _close(self) -> None:
        """End the streams, let their last messages leave, then let go of everything."""
        self._gate.phase = Phase.CLOSED
        if self._server is not None:
            await self._server.set_health(live=False, ready=False)
        # Each waits up to half a second for others, and none for another: an agent that lost its device is to be gone in 1 s.
        is_lost = self._engine.was_lost  # a driver that takes a failed context down may hold up who asks for counters
        closing = [asyncio.create_task(self._watch.close(0.2 if is_lost else 1.0))]
        if self._membership is not None:
            closing.append(asyncio.create_task(self._membership.close()))
        if self._metrics_server is not None:
            closing.append(asyncio.create_task(asyncio.to_thread(self._metrics_server.close)))
        await self._prefetcher.close()
        await self._engine.stop(ENGINE_STOP_SECONDS)
        self._generation.finish_attaches()
        if self._server is not None:
            await self._server.stop(FLUSH_SECONDS)
        await asyncio.gather(*closing)

    def _announce(self, event: str, **fields: Any) -> None:
        if self._settings.announce:
            print(json.dumps({"event": event, **fields}), flush=True)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
