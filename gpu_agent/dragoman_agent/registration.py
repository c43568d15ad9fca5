"""Membership at the controllers: registers, beats, reports, obeys commands. Streams never depend on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from dragoman.durations import seconds_of
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.tls import handshake_problem, open_channel
from dragoman.v1 import agent_pb2, agent_registry_service_pb2, agent_registry_service_pb2_grpc, error_pb2
from dragoman_agent.kv_journal import KvFeed, KvJournal

logger = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 5.0
DEREGISTER_TIMEOUT_SECONDS = 1.0
DEFAULT_BEAT_SECONDS = 0.2
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
MAX_OUTCOMES_A_BEAT = 512
_COMMANDS_REMEMBERED = 1024
_KV_INTERVAL_SECONDS = 0.05
_INVALID_ARGUMENT = 3
_FAILED_PRECONDITION = 9
_UNIMPLEMENTED = 12

Stub = agent_registry_service_pb2_grpc.AgentRegistryServiceStub
Outcomes = deque[agent_registry_service_pb2.RequestOutcome]


@dataclass(frozen=True, slots=True)
class HintEnd:
    """What became of a prefetch hint, in the end."""

    outcome: agent_registry_service_pb2.HintOutcome
    message: str


@dataclass(frozen=True, slots=True)
class AgentPart:
    """What the links need of the agent."""

    describe: Callable[[], agent_pb2.Agent]
    epoch: int
    monotonic_ms: Callable[[], int]
    state: Callable[[], agent_pb2.AgentState]
    load: Callable[[], agent_pb2.AgentLoad]
    set_keys: Callable[[str, dict[int, bytes]], None]
    drain: Callable[[float | None], None]
    undrain: Callable[[], str]
    revoke: Callable[[bytes], bool]
    prefetch: Callable[[agent_registry_service_pb2.PrefetchPrefix, Callable[[HintEnd], None]], None]
    journal: KvJournal
    dial: Callable[[str], grpc.aio.Channel] = field(default=lambda address: open_channel(address, None))


class ControllerLink:
    """The membership at one controller. Runs until closed; a controller that is away is tried again and again."""

    def __init__(
        self,
        address: str,
        part: AgentPart,
        is_other: Callable[[ControllerLink], bool] = lambda link: True,
        heard: Callable[[ControllerLink, Sequence[agent_pb2.Controller]], None] = lambda link, controllers: None,
        rng: random.Random | None = None,
    ) -> None:
        """`is_other`: whether the controller just met is reached by no other link. `heard`: takes lists of controllers."""
        self.address = address
        self.controller_id = ""
        self.outcomes: Outcomes = deque(maxlen=4096)
        self.is_registered = False
        self._part = part
        self._is_other = is_other
        self._heard = heard
        self._stub: Any = None  # while a connection is up
        self._is_closing = False
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()  # what the agent says of itself, since it registered
        self._rng = rng or random.Random()
        self._lease_id = ""
        self._beat_seconds = DEFAULT_BEAT_SECONDS
        self._results: deque[agent_registry_service_pb2.CommandResult] = deque()
        self._answered: OrderedDict[str, agent_registry_service_pb2.CommandResult | None] = OrderedDict()
        self._kv_feed = KvFeed(part.journal)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to dial."""
        self._task = asyncio.create_task(self._run())

    def hurry(self) -> None:
        """Beat now: something does not wait for its turn."""
        self._hurry.set()

    def describe_again(self) -> None:
        """Register once more within the same membership: the agent's description has changed."""
        self._changed.set()

    async def close(self) -> None:
        """Leave the controller: DeregisterAgent ends the membership at once, and takes what no beat has told yet."""
        self._is_closing = True
        if self._stub is not None and self.is_registered:
            farewell = agent_registry_service_pb2.DeregisterAgentRequest(
                lease_id=self._lease_id, outcomes=self._take_outcomes()
            )
            try:
                await self._stub.DeregisterAgent(farewell, timeout=DEREGISTER_TIMEOUT_SECONDS)
            except grpc.RpcError as error:
                logger.info("could not deregister at %s: %s", self.address, from_rpc_error(error).message)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._kv_feed.close()

    def abandon(self) -> None:
        """Stop dialling a controller that is none any more."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
        self._kv_feed.close()
        self._part.set_keys(self.address, {})

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        last_problem = ""
        while True:
            try:
                async with self._part.dial(self.address) as channel:
                    self._stub = stub = _stub(channel)
                    await self._register(stub)
                    if not self._is_other(self):
                        logger.info("controller %s is one that is known by another name", self.address)
                        await asyncio.sleep(MAX_BACKOFF_SECONDS)
                        continue
                    self.is_registered = True
                    logger.info("registered at controller %s with lease %s", self.address, self._lease_id)
                    backoff, last_problem = FIRST_BACKOFF_SECONDS, ""
                    await self._stay(stub)
            except grpc.RpcError as error:
                problem = _problem(error)
            except DragomanError as error:
                problem = error
            else:
                problem = DragomanError(error_pb2.ERROR_REASON_LEASE_EXPIRED, "the controller ended the heartbeat")
            finally:
                self._stub = None
            if self._is_closing:
                return
            if self.is_registered or problem.message != last_problem:
                logger.warning("controller %s: %s; trying again", self.address, problem.message)
            last_problem = problem.message
            self.is_registered = False
            # Full jitter: after a controller restart a thousand agents must not come back in one instant.
            await asyncio.sleep(self._rng.uniform(0.02, backoff))
            backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)

    async def _register(self, stub: Any) -> None:
        self._changed.clear()
        response = await stub.RegisterAgent(
            agent_registry_service_pb2.RegisterAgentRequest(
                agent=self._part.describe(), epoch=self._part.epoch, agent_monotonic_ms=self._part.monotonic_ms()
            ),
            timeout=CALL_TIMEOUT_SECONDS,
        )
        keys = {entry.key_id: entry.key for entry in response.previous_keys}
        keys[response.key_id] = response.ticket_key
        self._take_keys(keys)
        self._lease_id, self.controller_id = response.lease_id, response.controller_id or self.address
        interval = seconds_of(response.heartbeat_interval)
        self._beat_seconds = min(max(interval, 0.02), 5.0) if interval else DEFAULT_BEAT_SECONDS

    def _take_keys(self, keys: dict[int, bytes]) -> None:
        try:
            self._part.set_keys(self.address, keys)
        except ValueError as error:
            raise DragomanError(error_pb2.ERROR_REASON_INTERNAL, f"the controller sent bad keys: {error}") from None

    async def _stay(self, stub: Any) -> None:
        """Beat, publish and tell changes until one of the streams ends; its error is raised."""
        parts = (self._heartbeat(stub), self._publish(stub), self._tell_changes(stub))
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_changes(self, stub: Any) -> None:
        """The same agent and epoch: the controller takes the new step model, and the lease stays."""
        while True:
            await self._changed.wait()
            await self._register(stub)

    async def _heartbeat(self, stub: Any) -> None:
        async for response in stub.Heartbeat(self._beats()):
            for command in response.commands:
                self._obey(command)
            if response.controllers:
                self._heard(self, response.controllers)

    async def _beats(self) -> AsyncIterator[agent_registry_service_pb2.HeartbeatRequest]:
        while True:
            self._hurry.clear()
            yield self._beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_seconds):
                    await self._hurry.wait()

    def _beat(self) -> agent_registry_service_pb2.HeartbeatRequest:
        results = [self._results.popleft() for _ in range(len(self._results))]
        return agent_registry_service_pb2.HeartbeatRequest(
            lease_id=self._lease_id,
            epoch=self._part.epoch,
            state=self._part.state(),
            load=self._part.load(),
            command_results=results,
            agent_monotonic_ms=self._part.monotonic_ms(),
            outcomes=self._take_outcomes(),
        )

    def _take_outcomes(self) -> list[agent_registry_service_pb2.RequestOutcome]:
        return [self.outcomes.popleft() for _ in range(min(len(self.outcomes), MAX_OUTCOMES_A_BEAT))]

    def _obey(self, command: agent_registry_service_pb2.Command) -> None:
        """Commands come at least once: one that was obeyed before is only answered again, once its end is known."""
        if command.command_id not in self._answered:
            self._answered[command.command_id] = self._carry_out(command)
            if len(self._answered) > _COMMANDS_REMEMBERED:
                self._answered.popitem(last=False)
        result = self._answered[command.command_id]
        if result is not None:
            self._results.append(result)

    def _hint_ended(self, command_id: str, end: HintEnd) -> None:
        result = agent_registry_service_pb2.CommandResult(
            command_id=command_id, message=end.message, hint_outcome=end.outcome
        )
        self._answered[command_id] = result
        self._results.append(result)

    def _carry_out(
        self, command: agent_registry_service_pb2.Command
    ) -> agent_registry_service_pb2.CommandResult | None:
        """The result; None where it is not known yet."""
        result = agent_registry_service_pb2.CommandResult(command_id=command.command_id)
        match command.WhichOneof("action"):
            case "drain":
                self._part.drain(_grace_of(command.drain))
                result.message = "draining"
            case "revoke_request":
                stopped = self._part.revoke(command.revoke_request.jti)
                result.message = "stopped" if stopped else "no request runs with this ticket; it is refused from now on"
            case "rotate_keys":
                try:
                    self._take_keys({entry.key_id: entry.key for entry in command.rotate_keys.keys})
                except DragomanError as error:
                    result.code, result.message = _INVALID_ARGUMENT, error.message
            case "prefetch_prefix":
                self._part.prefetch(command.prefetch_prefix, partial(self._hint_ended, command.command_id))
                return None
            case "undrain":
                if problem := self._part.undrain():
                    result.code, result.message = _FAILED_PRECONDITION, problem
            case _:
                result.code, result.message = _UNIMPLEMENTED, "this agent does not know the command; update it"
        return result

    async def _publish(self, stub: Any) -> None:
        call = stub.PublishKvEvents()
        reader = asyncio.create_task(self._read_kv_wishes(call))
        self._kv_feed.want_snapshot()
        try:
            while not reader.done():
                message = self._kv_feed.next_message(self._lease_id, self._part.epoch)
                if message is not None:
                    await call.write(message)
                await asyncio.sleep(_KV_INTERVAL_SECONDS)
            await reader
        finally:
            reader.cancel()
            call.cancel()

    async def _read_kv_wishes(self, call: Any) -> None:
        async for response in call:
            if response.snapshot_wanted:
                self._kv_feed.want_snapshot()


def _stub(channel: grpc.aio.Channel) -> Any:
    return Stub(channel)


def _grace_of(drain: agent_registry_service_pb2.Drain) -> float | None:
    if not drain.HasField("grace_period"):
        return None
    return max(seconds_of(drain.grace_period), 0.0)


def _problem(error: grpc.RpcError) -> DragomanError:
    """Why a controller could not be reached, or what it said; a failed handshake in plain words."""
    problem = from_rpc_error(error)
    if plain := handshake_problem(problem.message):
        problem.message = plain
    return problem
