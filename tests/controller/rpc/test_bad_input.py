"""What nobody should send: forged, oversized and absurd messages are refused in words, and hurt nobody else."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.controller.conftest import agent_message, eventually

from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import admission_service_pb2 as pb
from dragoman.v1 import agent_pb2, agent_registry_service_pb2, error_pb2
from dragoman_controller.server import ControllerServer

INVALID = error_pb2.ERROR_REASON_INVALID_REQUEST


def ask(**fields: Any) -> pb.AcquireTicketRequest:
    defaults: dict[str, Any] = {
        "request_id": secrets.token_hex(8),
        "model": "tiny",
        "prompt_tokens": 100,
        "prompt_digest": b"p" * 32,
        "max_output_tokens": 10,
    }
    return pb.AcquireTicketRequest(**{**defaults, **fields})


async def refused(call: Any) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert "Traceback" not in str(raised.value.details())
    return from_rpc_error(raised.value)


async def test_random_bytes_to_every_method_leave_the_controller_serving(server: ControllerServer, join: Any) -> None:
    await join("agent-a")
    rng = Random(8)
    methods = [
        *(f"AdmissionService/{name}" for name in ("AcquireTicket", "ReleaseTicket", "Quote", "Admit")),
        *(
            f"AgentRegistryService/{name}"
            for name in ("RegisterAgent", "Heartbeat", "PublishKvEvents", "DeregisterAgent")
        ),
        *(f"FleetService/{name}" for name in ("ExplainPlacement", "DrainAgent")),
        "PrefetchService/HintPrefix",
        "PolicyService/UpdatePolicy",
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for method in methods:
            for _ in range(8):
                call = channel.unary_unary(f"/dragoman.v1.{method}")
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(rng.randbytes(rng.randrange(1, 200)), timeout=5)
        admission = channel.unary_unary("/dragoman.v1.AdmissionService/AcquireTicket")
        answer = pb.AcquireTicketResponse.FromString(await admission(ask().SerializeToString(), timeout=5))
    assert answer.ticket.agent_id == "agent-a"


async def test_a_message_over_the_limit_is_refused_by_its_size(clients: Any, join: Any) -> None:
    await join("agent-a")
    error = await refused(clients.admission.AcquireTicket(ask(request_id="x" * (17 << 20)), timeout=10))
    assert error.reason == error_pb2.ERROR_REASON_REQUEST_TOO_LARGE
    await clients.admission.AcquireTicket(ask(), timeout=5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"deadline": Duration()}, "deadline"),
        ({"deadline": Duration(seconds=-1)}, "deadline"),
        ({"deadline": Duration(nanos=2_000_000_000)}, "deadline"),
        ({"max_queue_wait": Duration(seconds=-(1 << 60))}, "max_queue_wait"),
        ({"num_choices": 1 << 31}, "num_choices"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_digest": b"short"}, "prompt_digest"),
        ({"block_hashes": range(9)}, "block_hashes"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"tenant": "t" * 129}, "tenant"),
        ({"priority": 77}, "priority"),
        ({"resume": pb.ResumeRequest(attempt=0)}, "resume.attempt"),
    ],
)
async def test_absurd_requests_are_refused_with_the_name_of_the_field(
    fields: dict[str, Any], param: str, clients: Any, join: Any
) -> None:
    await join("agent-a")
    error = await refused(clients.admission.AcquireTicket(ask(**fields), timeout=5))
    assert error.reason == INVALID and error.metadata["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": None, "prompt_bytes": (1 << 64) - 1},
        {"max_output_tokens": (1 << 32) - 1},
        {"deadline": Duration(seconds=1 << 60)},
        {"resume": pb.ResumeRequest(attempt=1, from_cursor=(1 << 64) - 1)},
    ],
)
async def test_a_huge_claim_is_granted_for_what_it_can_be_and_weighs_on_nobody(
    fields: dict[str, Any], server: ControllerServer, clients: Any, join: Any
) -> None:
    await join("agent-a", max_running=8)
    before = await clients.admission.Quote(pb.QuoteRequest(request=ask()), timeout=5)
    await clients.admission.AcquireTicket(ask(**fields), timeout=5)
    after = await clients.admission.Quote(pb.QuoteRequest(request=ask()), timeout=5)
    first, second = (one.quote.time_to_first_token.expected.ToTimedelta().total_seconds() for one in (before, after))
    longest = 4096 / 20_000  # a whole context at the agent's prefill rate
    assert second - first <= 2 * longest


def spoilt(change: Callable[[agent_pb2.ServedModel], object]) -> agent_pb2.Agent:
    message = agent_message("liar")
    change(message.models[0])
    return message


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.step_model.decode_seconds.__setitem__(0, math.nan),
        lambda model: model.step_model.decode_seconds.__setitem__(0, math.inf),
        lambda model: model.step_model.decode_seconds.__setitem__(0, -1.0),
        lambda model: model.step_model.decode_seconds.append(1.0),
        lambda model: setattr(model.step_model, "prefill_tokens_per_second", math.nan),
        lambda model: setattr(model.step_model, "prefill_tokens_per_second", math.inf),
        lambda model: setattr(model.step_model, "prefill_base_seconds", -5.0),
        lambda model: setattr(model, "max_running_requests", (1 << 32) - 1),
        lambda model: (setattr(model, "kv_block_count", 0), setattr(model, "max_context_tokens", (1 << 32) - 1)),
    ],
)
async def test_an_agent_with_numbers_no_device_has_does_not_become_a_member(
    change: Callable[[agent_pb2.ServedModel], object], server: ControllerServer, clients: Any
) -> None:
    request = agent_registry_service_pb2.RegisterAgentRequest(agent=spoilt(change), epoch=5)
    error = await refused(clients.registry.RegisterAgent(request, timeout=5))
    assert error.reason == INVALID and error.metadata["param"].startswith("agent.models")
    assert len(server.cell.fleet) == 0


async def test_an_agent_of_too_many_models_or_out_of_time_is_refused(clients: Any) -> None:
    message = agent_message("many")
    message.models.extend([message.models[0]] * 64)
    request = agent_registry_service_pb2.RegisterAgentRequest(agent=message, epoch=5)
    assert (await refused(clients.registry.RegisterAgent(request, timeout=5))).metadata["param"] == "agent.models"
    request = agent_registry_service_pb2.RegisterAgentRequest(
        agent=agent_message(), epoch=5, agent_monotonic_ms=(1 << 64) - 1
    )
    assert (await refused(clients.registry.RegisterAgent(request, timeout=5))).metadata["param"] == "agent_monotonic_ms"


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0])
async def test_a_beat_with_a_number_that_is_none_ends_its_stream_and_no_other(
    number: float, server: ControllerServer, clients: Any, join: Any
) -> None:
    await join("good")
    bad = await join("bad")
    bad.load = agent_pb2.AgentLoad(step_seconds=number)
    await eventually(lambda: bad._task.done())
    assert from_rpc_error(bad._task.exception()).reason == INVALID
    answers = [await clients.admission.AcquireTicket(ask(), timeout=5) for _ in range(5)]
    assert {answer.ticket.agent_id for answer in answers} == {"good"}


async def test_a_message_of_many_requests_does_not_keep_others_waiting_and_unread_answers_stop_the_reading(
    server: ControllerServer, clients: Any, join: Any
) -> None:
    await join("agent-a", max_running=4096, max_waiting=4096)
    call = clients.admission.Admit()
    await call.write(pb.AdmitRequest(requests=[ask(model="absent") for _ in range(4000)]))
    answered = 0
    while answered < 4000:
        answered += len((await call.read()).admissions)
    # Asks that are not wanted any more, by the thousand, each a look-up.
    await call.write(pb.AdmitRequest(abandoned_request_ids=[f"{number}" for number in range(50_000)]))
    await clients.admission.AcquireTicket(ask(), timeout=5)
    call.cancel()


async def test_an_agent_that_promises_too_much_loses_its_advantage_and_one_that_hides_its_load_is_bounded(
    bench: Any,
) -> None:
    from dragoman.step_model import StepModel
    from dragoman_controller.cell import Outcome

    slow = StepModel((1, 64), (0, 4096), (0.01, 0.02, 0.02, 0.04), 10_000.0, 0.005)
    fast = StepModel((1, 64), (0, 4096), (0.001, 0.002, 0.002, 0.004), 100_000.0, 0.0005)
    bench.join("honest", steps=slow, max_running=64)
    bench.join("liar", steps=fast, max_running=64)

    def placed() -> str:
        (answer,) = bench.ask()
        agent_id = answer.ticket.agent_id
        bench.now += 0.05
        step = {"honest": 0.011, "liar": 0.02}[agent_id]
        bench.beat(agent_id, outcomes=[Outcome(answer.ticket.jti, 0.02, 0.02 + 49 * step, 50, False)])
        return str(agent_id)

    assert {placed() for _ in range(5)} == {"liar"}
    for _ in range(500):
        placed()
    late = [placed() for _ in range(100)]
    assert late.count("honest") > 90
    errors = [one.error for one in bench.judgements if one.quantity == "finish"]
    assert max(errors[:5]) > 2 and sorted(errors[-100:])[50] < 0.1
    assert 1 / 32 <= bench.cell.quotes.of("liar").pace <= 32
    # Whatever load it reports, no more is given to it than it said it takes.
    for _ in range(200):
        bench.ask()
        bench.beat("liar")
    assert bench.cell.ledger.num_open("liar", 1) <= 66
