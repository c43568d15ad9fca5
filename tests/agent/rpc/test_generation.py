"""Generate and CancelGeneration against a real agent and engine process."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from dragoman.channel import channel_options
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
)
from dragoman.v1.generation_service_pb2 import (
    ChoiceProgress,
    GenerateRequest,
    GenerateResponse,
    ResumeState,
    SamplingParameters,
    StopCriteria,
)
from dragoman.v1.tokens_pb2 import TokenIds

Stub = generation_service_pb2_grpc.GenerationServiceStub


def make(text: str = "hello", max_tokens: int = 8, **fields: object) -> GenerateRequest:
    request = GenerateRequest(request_id=str(uuid.uuid4()), text=text, stop=StopCriteria(max_output_tokens=max_tokens))
    request.MergeFrom(GenerateRequest(**fields))  # type: ignore[arg-type]
    return request


async def collect(channel: grpc.aio.Channel, request: GenerateRequest, **options: object) -> list[GenerateResponse]:
    return [message async for message in Stub(channel).Generate(request, **options)]


async def refusal(channel: grpc.aio.Channel, request: GenerateRequest) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(channel, request)
    error = from_rpc_error(caught.value)
    assert caught.value.code() == error.grpc_code
    assert "Traceback" not in str(caught.value.details())
    return error


async def load(channel: grpc.aio.Channel) -> telemetry_service_pb2.AgentLoadSample:
    call = telemetry_service_pb2_grpc.TelemetryServiceStub(channel).WatchLoad(telemetry_service_pb2.WatchLoadRequest())
    async for response in call:
        call.cancel()
        return response.agents[0]
    raise AssertionError("no load")


async def settle(channel: grpc.aio.Channel, free_blocks: int, within: float = 3.0) -> None:
    """Until nothing runs and all blocks are free again."""
    deadline = time.monotonic() + within
    while True:
        now = (await load(channel)).load
        if not now.running_requests and not now.waiting_requests and now.free_kv_blocks == free_blocks:
            return
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.02)


def text_of(messages: list[GenerateResponse], choice: int = 0) -> str:
    return "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.choice_index == choice)


def check_shape(messages: list[GenerateResponse]) -> None:
    """A start, deltas with contiguous cursors, one end."""
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds[0] == "started"
    assert kinds[-1] in ("finished", "failed")
    assert set(kinds[1:-1]) <= {"delta"}
    cursors: dict[int, int] = {}
    for message in messages[1:-1]:
        delta = message.delta
        assert delta.cursor == cursors.get(delta.choice_index, 0)
        cursors[delta.choice_index] = delta.cursor + len(delta.token_ids)


async def test_a_start_then_deltas_then_one_end(channel: grpc.aio.Channel) -> None:
    messages = await collect(channel, make(max_tokens=8))
    check_shape(messages)
    assert messages[0].started.prompt_tokens == 5
    assert messages[0].started.epoch and messages[0].started.seed
    finished = messages[-1].finished
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (5, 8)
    assert finished.total_time.ToNanoseconds() >= finished.time_to_first_token.ToNanoseconds() > 0
    assert messages[-2].delta.finish.reason == generation_service_pb2.FINISH_REASON_LENGTH


async def test_same_prompt_same_text_and_cached_the_second_time(channel: grpc.aio.Channel) -> None:
    request = make(text="s15 " * 100, sampling=SamplingParameters(temperature=0))
    first = await collect(channel, request)
    request.request_id = str(uuid.uuid4())
    second = await collect(channel, request)
    assert text_of(first) == text_of(second)
    assert first[-1].finished.usage.prompt_tokens == second[-1].finished.usage.prompt_tokens == 400
    assert second[-1].finished.usage.cached_tokens == 384


async def test_ids_and_text_are_one_prompt(channel: grpc.aio.Channel) -> None:
    greedy = SamplingParameters(temperature=0)
    by_text = await collect(channel, make(sampling=greedy))
    by_ids = make(sampling=greedy)
    by_ids.token_ids.ids.extend(b"hello")
    assert text_of(await collect(channel, by_ids)) == text_of(by_text)


async def test_choices_have_their_own_cursors(channel: grpc.aio.Channel) -> None:
    messages = await collect(channel, make(max_tokens=6, sampling=SamplingParameters(num_choices=4, seed=7)))
    check_shape(messages)
    assert messages[-1].finished.usage.output_tokens == 24
    assert {m.delta.choice_index for m in messages if m.HasField("delta")} == {0, 1, 2, 3}


async def test_credit_follows_what_the_client_has_taken(channel: grpc.aio.Channel) -> None:
    messages = await collect(channel, make(max_tokens=1000, sampling=SamplingParameters(num_choices=2)))
    check_shape(messages)
    assert messages[-1].finished.usage.output_tokens == 2000, "far past the first window of 256"


async def test_logprobs_carry_token_bytes(channel: grpc.aio.Channel) -> None:
    messages = await collect(channel, make(max_tokens=3, sampling=SamplingParameters(num_logprobs=2)))
    entries = [entry for m in messages if m.HasField("delta") for entry in m.delta.logprobs]
    assert len(entries) == 3
    for entry in entries:
        assert entry.token_bytes == bytes([entry.token_id])
        assert len(entry.top) == 2
        assert entry.logprob <= 0


async def test_stop_string_ends_and_is_named(start_agent: Callable[..., Any]) -> None:
    agent = start_agent("--null-oracle", "alphabet")
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        messages = await collect(channel, make(text="A", max_tokens=20, stop=StopCriteria(strings=["EFG"])))
    assert text_of(messages) == "BCD"
    finish = messages[-2].delta.finish
    assert (finish.reason, finish.stop_string) == (generation_service_pb2.FINISH_REASON_STOP, "EFG")


async def test_resume_gives_the_same_remainder(channel: grpc.aio.Channel) -> None:
    request = make(max_tokens=12, sampling=SamplingParameters(seed=5, temperature=1))
    whole = await collect(channel, request)
    ids = [token for m in whole if m.HasField("delta") for token in m.delta.token_ids]
    request.request_id = str(uuid.uuid4())
    request.resume.CopyFrom(
        ResumeState(
            attempt=1,
            origin_epoch=whole[0].started.epoch,
            seed=5,
            choices=[ChoiceProgress(choice_index=0, token_ids=TokenIds(ids=ids[:7]))],
        )
    )
    rest = await collect(channel, request)
    deltas = [m.delta for m in rest if m.HasField("delta")]
    assert deltas[0].cursor == 7
    assert [token for delta in deltas for token in delta.token_ids] == ids[7:]
    assert text_of(whole) == text_of(whole)[:7] + text_of(rest)


@pytest.mark.parametrize(
    ("change", "reason", "param"),
    [
        (lambda r: setattr(r, "request_id", ""), "invalid_request", "request_id"),
        (lambda r: setattr(r, "model", "gpt-9"), "model_not_served", "model"),
        (lambda r: r.ClearField("text"), "invalid_request", "prompt"),
        (lambda r: setattr(r, "text", ""), "invalid_request", "text"),
        (lambda r: r.token_ids.ids.extend([1, 999_999]), "invalid_request", "token_ids.ids[1]"),
        (lambda r: r.token_ids.CopyFrom(TokenIds()), "invalid_request", "token_ids.ids"),
        (lambda r: setattr(r, "text", "x" * 32_768), "context_exceeded", "prompt"),
        (lambda r: setattr(r, "text", "x" * 5_000_000), "context_exceeded", "prompt"),
        (lambda r: setattr(r.sampling, "temperature", float("nan")), "invalid_request", "sampling.temperature"),
        (lambda r: r.sampling.logit_bias.update({9_999_999: 5.0}), "invalid_request", "sampling.logit_bias[9999999]"),
        (lambda r: setattr(r.sampling, "num_choices", 5_000_000), "invalid_request", "sampling.num_choices"),
        (lambda r: r.sampling.bad_words.append(" "), "invalid_request", "sampling.bad_words[0]"),
        (lambda r: setattr(r.sampling.grammar, "regex", "("), "invalid_request", "sampling.grammar.regex"),
        (lambda r: r.stop.strings.append(""), "invalid_request", "stop.strings"),
    ],
)
async def test_bad_input_names_the_field_and_disturbs_nothing(
    channel: grpc.aio.Channel, change: Callable[[GenerateRequest], None], reason: str, param: str
) -> None:
    request = make()
    change(request)
    error = await refusal(channel, request)
    assert (error.reason_name, error.metadata["param"]) == (reason, param)
    assert len(error.message) < 500
    check_shape(await collect(channel, make()))


async def test_b14_prompt_that_fits_exactly(channel: grpc.aio.Channel) -> None:
    messages = await collect(channel, make(text="x" * 32_767, max_tokens=10))
    assert messages[0].started.prompt_tokens == 32_767
    assert messages[-1].finished.usage.output_tokens == 1
    error = await refusal(channel, make(text="x" * 32_768, max_tokens=10))
    assert (error.metadata["prompt_tokens"], error.metadata["limit"]) == ("32768", "32768")
    assert "10 were asked for" in error.message


async def test_duplicate_request_id_is_refused_while_it_runs(channel: grpc.aio.Channel) -> None:
    request = make(max_tokens=30_000)
    call = Stub(channel).Generate(request)
    assert (await call.read()).HasField("started")
    error = await refusal(channel, request)
    assert error.reason_name == "duplicate_request"
    call.cancel()


async def test_unknown_fields_are_ignored(channel: grpc.aio.Channel) -> None:
    extra = b"\xfa\x3e\x05later"  # field 1007, length-delimited
    call = channel.unary_stream(
        "/dragoman.v1.GenerationService/Generate",
        request_serializer=lambda message: message.SerializeToString() + extra,
        response_deserializer=GenerateResponse.FromString,
    )
    check_shape([message async for message in call(make())])


async def test_s14_oversize_message_names_the_limit(channel: grpc.aio.Channel) -> None:
    big = channel.unary_stream(
        "/dragoman.v1.GenerationService/Generate",
        request_serializer=lambda text: GenerateRequest(request_id="big", text=text).SerializeToString(),
        response_deserializer=GenerateResponse.FromString,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in big("x" * (17 << 20)):
            pass
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    check_shape(await collect(channel, make()))


async def test_s14_five_mebibytes_of_prompt_are_read(channel: grpc.aio.Channel) -> None:
    request = make()
    request.token_ids.ids.extend([97] * (5 << 20))
    assert (await refusal(channel, request)).reason_name == "context_exceeded"


async def test_sixty_four_streams_give_each_what_it_gives_alone(channel: grpc.aio.Channel) -> None:
    greedy = SamplingParameters(temperature=0)
    requests = [make(text=f"prompt {i} " * (1 + i % 9), max_tokens=5 + i % 40, sampling=greedy) for i in range(64)]
    together = await asyncio.gather(*(collect(channel, request) for request in requests))
    for request, messages in zip(requests[::16], together[::16], strict=True):
        check_shape(messages)
        request.request_id = str(uuid.uuid4())
        assert text_of(await collect(channel, request)) == text_of(messages)


Leave = Callable[[grpc.aio.Channel, GenerateRequest], Awaitable[None]]


async def leave_before_reading(channel: grpc.aio.Channel, request: GenerateRequest) -> None:
    call = Stub(channel).Generate(request)
    await asyncio.sleep(0)
    call.cancel()


async def leave_after_start(channel: grpc.aio.Channel, request: GenerateRequest) -> None:
    call = Stub(channel).Generate(request)
    await call.read()
    call.cancel()


async def leave_in_decode(channel: grpc.aio.Channel, request: GenerateRequest) -> None:
    call = Stub(channel).Generate(request)
    for _ in range(4):
        await call.read()
    call.cancel()


async def leave_by_deadline(channel: grpc.aio.Channel, request: GenerateRequest) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(channel, request, timeout=0.15)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def leave_by_cancel_rpc(channel: grpc.aio.Channel, request: GenerateRequest) -> None:
    messages = []
    async for message in Stub(channel).Generate(request):
        messages.append(message)
        if message.HasField("started"):
            cancel = generation_service_pb2.CancelGenerationRequest(request_id=request.request_id)
            await Stub(channel).CancelGeneration(cancel)
    assert messages[-1].HasField("finished")
    assert messages[-2].delta.finish.reason == generation_service_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    "leave",
    [leave_before_reading, leave_after_start, leave_in_decode, leave_by_deadline, leave_by_cancel_rpc],
    ids=lambda leave: leave.__name__,
)
@pytest.mark.parametrize("prompt_tokens", [10, 30_000], ids=["short", "long-prefill"])
async def test_b22_leaving_frees_blocks(paced_agent: Any, leave: Leave, prompt_tokens: int) -> None:
    async with grpc.aio.insecure_channel(paced_agent.address, options=channel_options()) as channel:
        baseline = (await load(channel)).load.free_kv_blocks
        requests = [make(text="b22 " * (prompt_tokens // 4) + str(i), max_tokens=2000) for i in range(5)]
        await asyncio.gather(*(leave(channel, request) for request in requests))
        await settle(channel, baseline)
        check_shape(await collect(channel, make()))


async def test_cancelling_an_unknown_request_succeeds(channel: grpc.aio.Channel) -> None:
    stub = Stub(channel)
    await stub.CancelGeneration(generation_service_pb2.CancelGenerationRequest(request_id="nobody"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.CancelGeneration(generation_service_pb2.CancelGenerationRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
