"""Membership at a real controller process: tickets, commands, KV events, restarts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest

from dragoman.channel import channel_options
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.prefix_hash import prefix_hashes, root_hash, wire_hash
from dragoman.v1 import (
    admission_service_pb2_grpc,
    agent_pb2,
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    generation_service_pb2_grpc,
    ticket_pb2,
)
from dragoman.v1.admission_service_pb2 import AcquireTicketRequest, AcquireTicketResponse
from dragoman.v1.agent_registry_service_pb2 import (
    HINT_OUTCOME_REFUSED,
    Command,
    Drain,
    PrefetchPrefix,
    PublishKvEventsRequest,
    RequestOutcome,
    RevokeRequest,
    RotateKeys,
    TicketKey,
    Undrain,
)
from dragoman.v1.generation_service_pb2 import GenerateRequest, GenerateResponse, StopCriteria
from dragoman_agent.kv_journal import KvFeed, KvJournal
from dragoman_agent.registration import AgentPart, ControllerLink, HintEnd

StartAgent = Callable[..., Any]
PREFIX = "cache me " * 40
COMMAND = (sys.executable, "-P", "-m", "dragoman_controller.main")


class Controller:
    """One `dragoman-controller` under test."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--announce", "--port", str(port), "--metrics-port", "0", "--log-level", "error"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["grpc"]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.kill()


@pytest.fixture
async def to_controller(controller: Controller) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(controller.address, options=channel_options()) as channel:
        yield channel


def member(start_agent: StartAgent, *controllers: Controller, flags: tuple[str, ...] = ()) -> Any:
    addresses = ",".join(controller.address for controller in controllers)
    return start_agent("--controllers", addresses, *flags, open=False)


async def agents(channel: grpc.aio.Channel) -> list[fleet_service_pb2.FleetMember]:
    response = await fleet_service_pb2_grpc.FleetServiceStub(channel).ListAgents(fleet_service_pb2.ListAgentsRequest())
    return list(response.members)


async def until(channel: grpc.aio.Channel, condition: Callable[[list[Any]], bool], within: float = 8.0) -> list[Any]:
    deadline = time.monotonic() + within
    while True:
        try:
            now = await agents(channel)
            if condition(now):
                return now
        except grpc.aio.AioRpcError:
            now = []
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.05)


def serving(count: int) -> Callable[[list[Any]], bool]:
    return lambda now: [agent.state for agent in now] == [agent_pb2.AGENT_STATE_SERVING] * count


async def acquire(channel: grpc.aio.Channel, text: str, max_tokens: int = 5) -> tuple[str, AcquireTicketResponse]:
    request_id = str(uuid.uuid4())
    response = await admission_service_pb2_grpc.AdmissionServiceStub(channel).AcquireTicket(
        AcquireTicketRequest(
            request_id=request_id,
            model="null",
            prompt_bytes=len(text.encode()),
            max_output_tokens=max_tokens,
            prompt_digest=hashlib.sha256(text.encode()).digest(),
        )
    )
    return request_id, response


async def generate(agent: Any, request_id: str, token: bytes, text: str, max_tokens: int = 5) -> list[GenerateResponse]:
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        request = GenerateRequest(
            request_id=request_id, ticket_token=token, text=text, stop=StopCriteria(max_output_tokens=max_tokens)
        )
        return [m async for m in generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request)]


async def refusal(agent: Any, request_id: str, token: bytes, text: str) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(agent, request_id, token, text)
    error = from_rpc_error(caught.value)
    assert caught.value.code() == error.grpc_code
    return error


async def test_ticket_opens_one_stream(
    start_agent: StartAgent, controller: Controller, to_controller: grpc.aio.Channel
) -> None:
    agent = member(start_agent, controller)
    (status,) = await until(to_controller, serving(1))
    assert status.agent.agent_id == agent.info["agent_id"]
    assert status.agent.models[0].max_context_tokens == 32768
    request_id, granted = await acquire(to_controller, "hello")
    assert granted.ticket.data_address == agent.address
    with pytest.raises(grpc.RpcError) as caught:
        await generate(agent, request_id, granted.ticket.token, "hello", max_tokens=9)
    assert from_rpc_error(caught.value).reason_name == "ticket_mismatch", "more than the ticket allows"
    messages = await generate(agent, request_id, granted.ticket.token, "hello", max_tokens=5)
    assert messages[0].started.epoch == granted.ticket.epoch
    assert messages[-1].finished.usage.output_tokens == 5
    again = await refusal(agent, str(uuid.uuid4()), granted.ticket.token, "hello")
    assert again.reason_name == "ticket_replayed"


async def test_f16_tickets_in_every_wrong_way(
    start_agent: StartAgent, controller: Controller, to_controller: grpc.aio.Channel
) -> None:
    agent = member(start_agent, controller)
    await until(to_controller, serving(1))
    request_id, granted = await acquire(to_controller, "hello")
    token = granted.ticket.token
    assert (await refusal(agent, request_id, b"", "hello")).reason_name == "ticket_required"
    assert (await refusal(agent, request_id, b"junk", "hello")).reason_name == "ticket_invalid"
    forged = ticket_pb2.SignedTicket.FromString(token)
    body = ticket_pb2.TicketClaims.FromString(forged.claims)
    body.max_output_tokens += 1
    forged.claims = body.SerializeToString()
    assert (await refusal(agent, request_id, forged.SerializeToString(), "hello")).reason_name == "ticket_invalid"
    assert (await refusal(agent, request_id, token, "other")).reason_name == "ticket_mismatch"
    assert (await generate(agent, request_id, token, "hello"))[-1].HasField("finished"), "a refusal uses nothing up"
    other_id, other = await acquire(to_controller, "hello")
    agent.signal(signal.SIGINT)
    agent.wait_exit(5)
    reborn = member(start_agent, controller)
    assert (await refusal(reborn, other_id, other.ticket.token, "hello")).reason_name in (
        "ticket_wrong_agent",
        "ticket_invalid",
    )


async def test_drain_command_ends_the_agent(
    start_agent: StartAgent, controller: Controller, to_controller: grpc.aio.Channel
) -> None:
    agent = member(start_agent, controller, flags=("--drain-notice", "0.2"))
    await until(to_controller, serving(1))
    request = fleet_service_pb2.DrainAgentRequest(agent_id=agent.info["agent_id"])
    request.grace_period.seconds = 2
    call = fleet_service_pb2_grpc.FleetServiceStub(to_controller).DrainAgent(request)
    assert await call.read() is not grpc.aio.EOF
    assert await asyncio.to_thread(agent.wait_exit, 8) == 0
    await until(to_controller, lambda now: not now)
    call.cancel()


async def test_stopped_agent_leaves_at_once(
    start_agent: StartAgent, controller: Controller, to_controller: grpc.aio.Channel
) -> None:
    agent = member(start_agent, controller)
    await until(to_controller, serving(1))
    agent.signal(signal.SIGINT)
    await until(to_controller, lambda now: not now, within=3.0)


async def test_controller_restart_hurts_no_stream_and_is_rejoined(start_agent: StartAgent) -> None:
    first = Controller()
    port = int(first.address.rpartition(":")[2])
    agent = member(start_agent, first, flags=("--null-speed", "1"))
    async with grpc.aio.insecure_channel(first.address, options=channel_options()) as channel:
        await until(channel, serving(1))
        request_id, granted = await acquire(channel, PREFIX, max_tokens=1500)
        model_digest = (await agents(channel))[0].agent.models[0].model_digest
    running = asyncio.create_task(generate(agent, request_id, granted.ticket.token, PREFIX, max_tokens=1500))
    await asyncio.sleep(0.2)
    first.kill()
    second = Controller(port)
    try:
        assert (await running)[-1].finished.usage.output_tokens == 1500
        async with grpc.aio.insecure_channel(second.address, options=channel_options()) as channel:
            await until(channel, serving(1))
            await until_cached(channel, model_digest)
            request_id, granted = await acquire(channel, "again")
        assert (await generate(agent, request_id, granted.ticket.token, "again"))[-1].HasField("finished")
    finally:
        second.kill()


async def test_agent_serves_with_its_controller_away(start_agent: StartAgent) -> None:
    agent = start_agent("--controllers", "127.0.0.1:1", open=True)
    messages = await generate(agent, "alone", b"", "hello")
    assert messages[-1].HasField("finished")


async def test_two_controllers_both_mint(start_agent: StartAgent, controller: Controller) -> None:
    second = Controller()
    try:
        agent = member(start_agent, controller, second)
        for each in (controller, second):
            async with grpc.aio.insecure_channel(each.address, options=channel_options()) as channel:
                await until(channel, serving(1))
                request_id, granted = await acquire(channel, "hello")
            assert (await generate(agent, request_id, granted.ticket.token, "hello"))[-1].HasField("finished")
    finally:
        second.kill()


async def test_cached_prefix_reaches_the_controller(
    start_agent: StartAgent, controller: Controller, to_controller: grpc.aio.Channel
) -> None:
    agent = member(start_agent, controller)
    (status,) = await until(to_controller, serving(1))
    request_id, granted = await acquire(to_controller, PREFIX)
    await generate(agent, request_id, granted.ticket.token, PREFIX)
    await until_cached(to_controller, status.agent.models[0].model_digest)


async def until_cached(channel: grpc.aio.Channel, model_digest: bytes) -> None:
    """Until the controller expects the five units of PREFIX at the agent."""
    units = [wire_hash(full) for full in prefix_hashes(root_hash(model_digest), list(PREFIX.encode()))]
    assert len(units) == 5
    for _ in range(100):
        response = await admission_service_pb2_grpc.AdmissionServiceStub(channel).AcquireTicket(
            AcquireTicketRequest(
                request_id=str(uuid.uuid4()),
                model="null",
                prompt_tokens=len(PREFIX),
                block_hashes=units,
                max_output_tokens=1,
                prompt_digest=hashlib.sha256(PREFIX.encode()).digest(),
            )
        )
        if response.ticket.expected_cached_tokens == 320:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(response)


class Recorder:
    """The agent's side of a link, as it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def prefetch(self, wanted: PrefetchPrefix, ended: Callable[[HintEnd], None]) -> None:
        self.calls.append(("hint", list(wanted.block_hashes)))
        self.end_hint = ended

    def part(self) -> AgentPart:
        def record(name: str, answer: Any = None) -> Callable[..., Any]:
            return lambda *values: self.calls.append((name, *values)) or answer

        return AgentPart(
            describe=agent_pb2.Agent,
            epoch=5,
            monotonic_ms=lambda: 77,
            state=lambda: agent_pb2.AGENT_STATE_SERVING,
            load=agent_pb2.AgentLoad,
            set_keys=record("keys"),
            drain=record("drain"),
            undrain=record("undrain", ""),
            revoke=record("revoke", True),
            prefetch=self.prefetch,
            journal=KvJournal(),
        )


def test_commands_are_obeyed_once_and_answered_each_time() -> None:
    recorder = Recorder()
    link = ControllerLink("here", recorder.part())
    drain = Command(command_id="1", drain=Drain())
    drain.drain.grace_period.FromMilliseconds(1500)
    commands = [
        drain,
        Command(command_id="2", revoke_request=RevokeRequest(jti=b"j")),
        Command(command_id="3", rotate_keys=RotateKeys(keys=[TicketKey(key_id=4, key=b"k" * 32)])),
        Command(command_id="4", prefetch_prefix=PrefetchPrefix(model="null", block_hashes=[1])),
        Command(command_id="5"),
        Command(command_id="6", undrain=Undrain()),
    ]
    for command in [*commands, *commands]:
        link._obey(command)
    assert recorder.calls == [
        ("drain", 1.5), ("revoke", b"j"), ("keys", "here", {4: b"k" * 32}), ("hint", [1]), ("undrain",),
    ]  # fmt: skip
    beat = link._beat()
    answers = [("1", 0), ("2", 0), ("3", 0), ("5", 12), ("6", 0)]
    assert [(result.command_id, result.code) for result in beat.command_results] == [*answers, *answers]
    recorder.end_hint(HintEnd(HINT_OUTCOME_REFUSED, "why"))
    link._obey(commands[3])
    results = link._beat().command_results
    assert [(one.command_id, one.hint_outcome, one.message) for one in results] == [
        ("4", HINT_OUTCOME_REFUSED, "why")
    ] * 2
    assert (beat.epoch, beat.agent_monotonic_ms, beat.state) == (5, 77, agent_pb2.AGENT_STATE_SERVING)
    assert not link._beat().command_results


def test_outcomes_leave_with_the_next_beat_once() -> None:
    link = ControllerLink("here", Recorder().part())
    link.outcomes.append(RequestOutcome(jti=b"a", output_tokens=3))
    assert [outcome.jti for outcome in link._beat().outcomes] == [b"a"]
    assert not link._beat().outcomes


def hashes(*units: int) -> list[bytes]:
    return [unit.to_bytes(8, "little") for unit in units]


def test_feed_starts_with_a_snapshot_and_numbers_by_one() -> None:
    journal = KvJournal()
    journal.take(hashes(1, 2), [])
    feed = KvFeed(journal)
    messages: list[PublishKvEventsRequest] = []
    for stored, removed in (((), ()), ((3,), (1,)), ((), ()), ((4,), (4,))):
        journal.take(hashes(*stored), hashes(*removed))
        message = feed.next_message("lease", 9)
        if message is not None:
            messages.append(message)
    assert [message.sequence for message in messages] == [1, 2, 3]
    assert messages[0].snapshot and sorted(messages[0].stored_block_hashes) == [1, 2]
    assert (list(messages[1].stored_block_hashes), list(messages[1].removed_block_hashes)) == ([3], [1])
    assert list(messages[2].removed_block_hashes) == [4]
    feed.want_snapshot()
    again = feed.next_message("lease", 9)
    assert again is not None and again.snapshot and again.sequence == 4
    assert sorted(again.stored_block_hashes) == sorted(journal.held) == [2, 3]
    feed.close()
    journal.take(hashes(5), [])
    assert feed.next_message("lease", 9) is None
