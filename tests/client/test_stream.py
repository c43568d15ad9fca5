"""Every way a stream can be cut, and that no token is lost or doubled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import pytest
from tests.client.scripted import (
    QUICK,
    Script,
    Scripted,
    assert_whole,
    delta,
    failed,
    finished,
    go_on,
    read_all,
    refuse,
    script,
    started,
)

from dragoman import AsyncClient, RetryPolicy
from dragoman.errors import DragomanError
from dragoman.v1 import (
    error_pb2,
)
from dragoman.v1 import generation_service_pb2 as pb


async def test_an_undisturbed_stream(scripted: Scripted) -> None:
    controller = await scripted([go_on])
    async with AsyncClient(controller.address, tenant="t") as client:
        tokens, result = await read_all(client, max_output_tokens=6, n=2)
    assert_whole(tokens, 2)
    assert result.choices[1].text == "11 12 13 14 15 16 "
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.output_tokens) == (3, 2, 12)
    assert (result.finish_reason, result.num_resumes, result.agent_id) == ("length", 0, "agent-0")
    asked = controller.asked[0]
    assert (asked.tenant, asked.max_output_tokens, asked.num_choices, asked.prompt_bytes) == ("t", 6, 2, 2)
    assert asked.request_id == controller.agents[0].requests[0].request_id == result.request_id
    assert controller.agents[0].requests[0].ticket_token == b"agent-0-1"


@pytest.mark.parametrize(
    "cut",
    [
        script(started(100), delta(0, 1), delta(1, 2), then="lose"),
        script(started(100), delta(0, 1), delta(1, 2), failed(error_pb2.ERROR_REASON_AGENT_LOST)),
        script(started(100), delta(0, 1), delta(1, 2), failed(error_pb2.ERROR_REASON_DEVICE_FAULT)),
        script(started(100), delta(0, 1), delta(1, 2), failed(error_pb2.ERROR_REASON_AGENT_DRAINING)),
        script(started(100), delta(0, 1), delta(1, 2)),
        script(started(100), delta(0, 1), delta(1, 2), delta(3, 4), then="hang"),
        script(started(100), delta(0, 1), delta(1, 2), started(555), delta(2, 99), then="hang"),
        script(started(100), delta(0, 1), delta(1, 2), delta(1, 2, 99), then="hang"),
        script(started(100), delta(0, 1), delta(1, 2), delta(0, 77, choice=5), then="hang"),
        script(started(100), delta(0, 1), delta(1, 2), finished(2)),
    ],
    ids=[
        "connection lost",
        "agent lost",
        "device fault",
        "drained",
        "no terminal event",
        "cursor gap",
        "another life on the same stream",
        "partly doubled",
        "choice that was not asked for",
        "finished too soon",
    ],
)
async def test_a_cut_stream_goes_on_elsewhere_at_the_next_token(scripted: Scripted, cut: Script) -> None:
    controller = await scripted([cut], [go_on])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        tokens, result = await asyncio.wait_for(read_all(client), 10)
    assert_whole(tokens)
    assert (result.num_resumes, result.agent_id, result.usage.output_tokens) == (1, "agent-1", 6)
    resume = controller.asked[1].resume
    assert (resume.origin_epoch, resume.origin_agent_id, resume.attempt, resume.from_cursor) == (100, "agent-0", 1, 2)
    sent = controller.agents[1].requests[0]
    assert (sent.resume.attempt, sent.resume.origin_epoch, sent.resume.seed) == (1, 100, 7)
    assert list(sent.resume.choices[0].token_ids.ids) == [1, 2]
    assert sent.text == "hi", "a resume sends the original prompt"
    assert sent.request_id == controller.agents[0].requests[0].request_id
    assert sent.ticket_token != controller.agents[0].requests[0].ticket_token


async def test_resume_keeps_a_cursor_for_each_choice(scripted: Scripted) -> None:
    cut = script(
        started(100),
        *[
            delta(cursor, 11 + cursor, choice=1, end=pb.FINISH_REASON_LENGTH if cursor == 5 else None)
            for cursor in range(6)
        ],
        delta(0, 1),
        delta(0, 21, choice=2),
        delta(1, 22, choice=2),
        then="lose",
    )
    controller = await scripted([cut], [go_on])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        tokens, result = await read_all(client, n=3)
    assert_whole(tokens, 3)
    progress = controller.agents[1].requests[0].resume.choices
    assert [len(choice.token_ids.ids) for choice in progress] == [1, 6, 2]
    assert [choice.HasField("finish") for choice in progress] == [False, True, False]
    assert controller.asked[1].resume.from_cursor == 9
    assert result.usage.output_tokens == 18


async def test_doubled_frames_are_dropped(scripted: Scripted) -> None:
    end = pb.FINISH_REASON_STOP
    controller = await scripted(
        [script(started(100), delta(0, 1), delta(0, 1), delta(1, 2), delta(0, 1, 2), delta(2, 3, end=end), finished(3))]
    )
    async with AsyncClient(controller.address) as client:
        tokens, result = await read_all(client)
    assert [token.token_ids for token in tokens] == [(1,), (2,), (3,)]
    assert result.num_resumes == 0


async def test_an_agent_in_another_life_than_the_ticket_is_refused(scripted: Scripted) -> None:
    zombie = script(started(99), delta(0, 66), then="hang")
    controller = await scripted([zombie], [go_on])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        tokens, _ = await asyncio.wait_for(read_all(client), 10)
    assert_whole(tokens)


async def test_at_most_three_resumes(scripted: Scripted) -> None:
    async def one_more(request, context):
        done = len(request.resume.choices[0].token_ids.ids) if request.HasField("resume") else 0
        yield started(100)
        yield delta(done, done + 1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    controller = await scripted([one_more])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        stream = client.generate("hi", model="m")
        got = []
        with pytest.raises(DragomanError) as failure:
            async for token in stream:
                got.extend(token.token_ids)
        assert failure.value.reason == error_pb2.ERROR_REASON_AGENT_LOST
        assert got == [1, 2, 3, 4], "what was delivered stays delivered, each once"
        assert [asked.resume.attempt for asked in controller.asked] == [0, 1, 2, 3]
        with pytest.raises(DragomanError, match="gone"):
            await stream.result()


@pytest.mark.parametrize("reason", ["INTERNAL", "NON_FINITE_LOGITS", "DEADLINE_EXCEEDED"])
async def test_no_resume_after_an_end_that_is_final(scripted: Scripted, reason: str) -> None:
    value = error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    controller = await scripted([script(started(100), delta(0, 1), failed(value))], [go_on])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        with pytest.raises(DragomanError) as failure:
            await read_all(client)
    assert failure.value.reason == value
    assert len(controller.asked) == 1


async def test_an_agent_lost_after_the_last_token_costs_only_its_figures(scripted: Scripted) -> None:
    cut = script(started(100), delta(0, 1, 2, end=pb.FINISH_REASON_STOP), then="lose")
    controller = await scripted([cut], [go_on])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        _, result = await read_all(client)
    assert (result.token_ids, result.num_resumes, result.usage.output_tokens) == ((1, 2), 0, 2)
    assert result.timings.total_seconds is None
    assert len(controller.asked) == 1


async def test_the_fallback_ticket_is_used_when_the_first_agent_refuses(scripted: Scripted) -> None:
    controller = await scripted([refuse(error_pb2.ERROR_REASON_QUEUE_FULL)], [go_on])
    controller.plan = [(controller.agents[0], controller.agents[1])]
    async with AsyncClient(controller.address, retry=QUICK) as client:
        tokens, result = await read_all(client)
    assert_whole(tokens)
    assert (result.agent_id, result.num_resumes, len(controller.asked)) == ("agent-1", 0, 1)
    assert controller.released == [b"agent-0-1"], "a refused ticket is given back"


async def test_a_refusal_that_is_final_uses_no_fallback(scripted: Scripted) -> None:
    controller = await scripted([refuse(error_pb2.ERROR_REASON_CONTEXT_EXCEEDED)], [go_on])
    controller.plan = [(controller.agents[0], controller.agents[1])]
    async with AsyncClient(controller.address, retry=QUICK) as client:
        with pytest.raises(DragomanError) as failure:
            await read_all(client)
    assert failure.value.reason == error_pb2.ERROR_REASON_CONTEXT_EXCEEDED
    assert controller.agents[1].requests == []


async def test_a_full_queue_is_asked_again_after_its_delay(scripted: Scripted) -> None:
    controller = await scripted([go_on])
    full = DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, "full", retry_delay=0.3)
    controller.plan = [full, controller.agents[0]]
    began = time.monotonic()
    async with AsyncClient(controller.address, retry=QUICK) as client:
        tokens, _ = await read_all(client)
    assert_whole(tokens)
    assert time.monotonic() - began >= 0.3
    assert len({asked.request_id for asked in controller.asked}) == 1
    assert not controller.asked[1].HasField("resume")


async def test_attempts_are_bounded(scripted: Scripted) -> None:
    controller = await scripted([refuse(error_pb2.ERROR_REASON_MODEL_LOADING)])
    async with AsyncClient(controller.address, retry=QUICK) as client:
        with pytest.raises(DragomanError) as failure:
            await read_all(client)
    assert failure.value.reason == error_pb2.ERROR_REASON_MODEL_LOADING
    assert len(controller.asked) == QUICK.max_attempts


async def test_the_budget_ends_a_retry_storm(scripted: Scripted) -> None:
    controller = await scripted([refuse(error_pb2.ERROR_REASON_MODEL_LOADING)])
    policy = RetryPolicy(max_attempts=4, base_seconds=0.001, budget=5)
    async with AsyncClient(controller.address, retry=policy) as client:
        for _ in range(6):
            with pytest.raises(DragomanError):
                await read_all(client)
    assert len(controller.asked) == 6 + 5, "six requests and the five retries of the budget"


async def test_leaving_the_loop_cancels_at_the_agent(scripted: Scripted) -> None:
    controller = await scripted([script(started(100), delta(0, 1), delta(1, 2), then="hang")])
    agent = controller.agents[0]
    async with AsyncClient(controller.address) as client:
        async for _ in client.generate("hi", model="m"):
            break
        await wait_until(lambda: agent.num_cancelled == 1)
        async with client.generate("hi", model="m") as stream:
            await anext(aiter(stream))
        await wait_until(lambda: agent.num_cancelled == 2)
        with pytest.raises(DragomanError) as failure:
            await stream.result()
        assert failure.value.reason == error_pb2.ERROR_REASON_CANCELLED
        task = asyncio.create_task(read_all(client))
        await wait_until(lambda: len(agent.requests) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: agent.num_cancelled == 3)


async def test_the_deadline_ends_a_stream_that_hangs(scripted: Scripted) -> None:
    controller = await scripted([script(started(100), delta(0, 1), then="hang")])
    began = time.monotonic()
    async with AsyncClient(controller.address, retry=QUICK) as client:
        with pytest.raises(DragomanError) as failure:
            await read_all(client, deadline=0.3)
    assert failure.value.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert time.monotonic() - began < 2.0
    assert 0 < controller.agents[0].requests[0].deadline.ToTimedelta().total_seconds() <= 0.3
    assert 0 < controller.asked[0].deadline.ToTimedelta().total_seconds() <= 0.3


async def test_the_deadline_ends_a_wait_in_the_queue(scripted: Scripted) -> None:
    controller = await scripted([go_on])
    controller.plan = [30.0]
    async with AsyncClient(controller.address, retry=QUICK) as client:
        with pytest.raises(DragomanError) as failure:
            await asyncio.wait_for(read_all(client, deadline=0.2), 5)
    assert failure.value.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED


async def test_a_controller_that_is_not_there() -> None:
    async with AsyncClient("127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(
            DragomanError, match=r"cannot reach the controller at 127\.0\.0\.1:1.*dragoman up"
        ) as failure:
            await read_all(client)
        assert failure.value.reason == error_pb2.ERROR_REASON_NO_AGENT


async def test_an_agent_that_is_not_there() -> None:
    async with AsyncClient(agent="127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(DragomanError, match=r"the agent at 127\.0\.0\.1:1 cannot be reached"):
            await read_all(client)


async def test_one_reader() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        stream = client.generate("hi", model="m")
        stream._reading = True
        with pytest.raises(RuntimeError, match="one reader"):
            await stream.result()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
