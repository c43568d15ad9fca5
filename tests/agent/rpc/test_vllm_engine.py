"""vLLM's gRPC interface on a real agent, driven by the stubs of its proto."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.channel import channel_options
from dragoman.compat import vllm_engine_pb2 as vllm
from dragoman.compat import vllm_engine_pb2_grpc
from dragoman.errors import DragomanError, from_rpc_error
from dragoman.v1 import generation_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import (
    GenerateRequest,
    SamplingParameters,
    StopCriteria,
)
from dragoman.v1.tokens_pb2 import TokenIds
from dragoman_agent.engine.messages import Load
from dragoman_agent.rpc.vllm_engine import TokenRate, VllmFacts, scheduler_load
from dragoman_agent.rpc.vllm_request import generate_request

Stub = vllm_engine_pb2_grpc.VllmEngineStub
GREEDY = {"temperature": 0.0, "max_tokens": 8}


def make(prompt: bytes = b"hello", *, stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=str(uuid.uuid4()),
        tokenized=vllm.TokenizedInput(original_text="not read", input_ids=prompt),
        sampling_params=vllm.SamplingParams(**{**GREEDY, **params}),
        stream=stream,
    )


async def collect(
    channel: grpc.aio.Channel, request: vllm.GenerateRequest
) -> tuple[list[vllm.GenerateStreamChunk], list[vllm.GenerateComplete]]:
    messages = [message async for message in Stub(channel).Generate(request)]
    kinds = [message.WhichOneof("response") for message in messages]
    assert kinds == sorted(kinds), "chunks first, then the ends"
    chunks = [message.chunk for message in messages if message.HasField("chunk")]
    return chunks, [message.complete for message in messages if message.HasField("complete")]


async def ours(
    channel: grpc.aio.Channel, prompt: bytes, sampling: SamplingParameters, max_tokens: int
) -> list[list[int]]:
    """Tokens of each choice by our own Generate."""
    request = GenerateRequest(
        request_id=str(uuid.uuid4()),
        token_ids=TokenIds(ids=prompt),
        sampling=sampling,
        stop=StopCriteria(max_output_tokens=max_tokens),
    )
    found: list[list[int]] = [[] for _ in range(sampling.num_choices or 1)]
    async for message in generation_service_pb2_grpc.GenerationServiceStub(channel).Generate(request):
        found[message.delta.choice_index].extend(message.delta.token_ids)
    return found


async def refusal(call: Any) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    assert "Traceback" not in str(caught.value.details())
    error = from_rpc_error(caught.value)
    assert caught.value.code() == error.grpc_code
    return error


async def test_streamed_and_whole_tokens_are_those_of_generate(channel: grpc.aio.Channel) -> None:
    (expected,) = await ours(channel, b"hello", SamplingParameters(temperature=0), 40)
    chunks, (end,) = await collect(channel, make(max_tokens=40))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected == list(end.output_ids)
    assert len(chunks) > 1
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 and chunk.prompt_tokens == 5 for chunk in chunks)
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 5, len(expected))
    no_chunks, (whole,) = await collect(channel, make(max_tokens=40, stream=False))
    assert not no_chunks
    assert whole.output_ids == end.output_ids


async def test_sampled_choices_are_those_of_generate(channel: grpc.aio.Channel) -> None:
    sampling = SamplingParameters(
        temperature=0.8, top_p=0.9, top_k=40, seed=11, num_choices=3, frequency_penalty=0.5, presence_penalty=0.25,
        min_p=0.01, repetition_penalty=1.1, logit_bias={100: 2.0},
    )  # fmt: skip
    expected = await ours(channel, b"choices", sampling, 30)
    assert len({tuple(ids) for ids in expected}) == 3
    request = make(
        b"choices", temperature=0.8, top_p=0.9, top_k=40, seed=11, n=3, frequency_penalty=0.5, presence_penalty=0.25,
        min_p=0.01, repetition_penalty=1.1, logit_bias={100: 2.0}, max_tokens=30,
    )  # fmt: skip
    chunks, ends = await collect(channel, request)
    assert [end.index for end in ends] == [0, 1, 2]
    assert [list(end.output_ids) for end in ends] == expected
    for index, ids in enumerate(expected):
        assert [token for chunk in chunks if chunk.index == index for token in chunk.token_ids] == ids


async def test_text_is_tokenized_and_the_cache_counted(channel: grpc.aio.Channel) -> None:
    text = str(uuid.uuid4()) * 10
    _, (first,) = await collect(channel, make(text.encode(), stream=False))
    request = make(stream=False)
    request.text = text
    _, (second,) = await collect(channel, request)
    assert second.output_ids == first.output_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 320)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_output_and_prompt(channel: grpc.aio.Channel, stream: bool) -> None:
    chunks, ends = await collect(
        channel, make(logprobs=2, prompt_logprobs=1, n=2, stream=stream, seed=1, temperature=1.0)
    )
    for end in ends:
        parts = [chunk for chunk in chunks if chunk.index == end.index] if stream else [end]
        assert [token for part in parts for token in part.output_logprobs.token_ids] == list(end.output_ids)
        tops = [top for part in parts for top in part.output_logprobs.top_logprobs]
        assert all(list(top.values) == sorted(top.values, reverse=True) for top in tops)
        assert [len(top.token_ids) for top in tops] == [2] * len(end.output_ids)
        assert all(value <= 0 for part in parts for value in part.output_logprobs.token_logprobs)
        given = [part.input_logprobs for part in parts]
        assert list(given[0].token_ids) == list(b"hello")
        assert [entry.HasField("value") for entry in given[0].token_logprobs] == [False, True, True, True, True]
        assert [len(top.token_ids) for top in given[0].top_logprobs] == [0, 1, 1, 1, 1]
        assert all(not later.token_ids for later in given[1:])
        assert end.HasField("input_logprobs") is not stream
    _, (plain,) = await collect(channel, make(logprobs=0, stream=False))
    assert len(plain.output_logprobs.token_logprobs) == 8
    assert not plain.output_logprobs.top_logprobs and not plain.HasField("input_logprobs")


async def test_what_stopped_it_is_named(start_agent: Callable[..., Any]) -> None:
    agent = start_agent("--null-oracle", "alphabet")
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        for stop, kind, value in (
            ({"stop": ["EFG"]}, "matched_stop_str", "EFG"),
            ({"stop_token_ids": [ord("G")]}, "matched_token_id", ord("G")),
        ):
            _, (end,) = await collect(channel, make(b"A", max_tokens=20, **stop))
            assert bytes(end.output_ids) == b"BCDEFG"
            assert (end.finish_reason, end.WhichOneof("matched_stop")) == ("stop", kind)
            assert getattr(end, kind) == value
        _, (cut,) = await collect(channel, make(b"xyzA", max_tokens=3, truncate_prompt_tokens=1))
        assert (cut.prompt_tokens, bytes(cut.output_ids)) == (1, b"BCD")
        _, (chosen,) = await collect(channel, make(b"A", choice=vllm.ChoiceConstraint(choices=["yes", "no"])))
        assert bytes(chosen.output_ids[: chosen.completion_tokens]).rstrip(b"\x00").startswith((b"yes", b"no"))


def unset(request: vllm.GenerateRequest, name: str) -> None:
    request.ClearField(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "reason", "param"),
    [
        (lambda r: unset(r, "request_id"), "invalid_request", "request_id"),
        (lambda r: unset(r, "tokenized"), "invalid_request", "input"),
        (lambda r: r.tokenized.ClearField("input_ids"), "invalid_request", "tokenized.input_ids"),
        (lambda r: r.tokenized.input_ids.append(999_999), "invalid_request", "tokenized.input_ids[5]"),
        (lambda r: r.tokenized.input_ids.extend([97] * 40_000), "context_exceeded", "prompt"),
        (lambda r: r.mm_inputs.SetInParent(), "unsupported_parameter", "mm_inputs"),
        (lambda r: r.kv_transfer_params.SetInParent(), "unsupported_parameter", "kv_transfer_params"),
        (lambda r: setattr(r, "kv_transfer_params_json", "{}"), "unsupported_parameter", "kv_transfer_params_json"),
        (lambda r: setattr(r, "data_parallel_rank", 1), "invalid_request", "data_parallel_rank"),
        (lambda r: setattr(r.sampling_params, "structural_tag", "x"), "unsupported_parameter", "structural_tag"),
        (lambda r: setattr(r.sampling_params, "temperature", float("nan")), "invalid_request", "temperature"),
        (lambda r: setattr(r.sampling_params, "temperature", -1.0), "invalid_request", "temperature"),
        (lambda r: setattr(r.sampling_params, "top_p", 1.5), "invalid_request", "top_p"),
        (lambda r: setattr(r.sampling_params, "n", 5_000_000), "invalid_request", "n"),
        (lambda r: setattr(r.sampling_params, "max_tokens", 0), "invalid_request", "max_tokens"),
        (lambda r: setattr(r.sampling_params, "min_tokens", 9), "invalid_request", "min_tokens"),
        (lambda r: r.sampling_params.stop.append(""), "invalid_request", "stop"),
        (lambda r: r.sampling_params.stop_token_ids.append(999_999), "invalid_request", "stop_token_ids[0]"),
        (lambda r: setattr(r.sampling_params, "logprobs", -1), "invalid_request", "logprobs"),
        (lambda r: setattr(r.sampling_params, "logprobs", 21), "invalid_request", "logprobs"),
        (lambda r: setattr(r.sampling_params, "prompt_logprobs", -1), "invalid_request", "prompt_logprobs"),
        (lambda r: r.sampling_params.logit_bias.update({-1: 1.0}), "invalid_request", "logit_bias[-1]"),
        (lambda r: r.sampling_params.logit_bias.update({9_999_999: 1.0}), "invalid_request", "logit_bias[9999999]"),
        (lambda r: setattr(r.sampling_params, "truncate_prompt_tokens", -1), "invalid_request", "truncate_prompt_tokens"),
        (lambda r: setattr(r.sampling_params, "regex", "("), "invalid_request", "regex"),
        (lambda r: setattr(r.sampling_params, "grammar", "start: ("), "invalid_request", "grammar"),
        (lambda r: r.sampling_params.choice.SetInParent(), "invalid_request", "choice"),
    ],
)  # fmt: skip
async def test_odd_requests_name_the_field_as_the_caller_knows_it(
    channel: grpc.aio.Channel, change: Callable[[vllm.GenerateRequest], Any], reason: str, param: str
) -> None:
    request = make()
    change(request)
    error = await refusal(Stub(channel).Generate(request))
    named = error.metadata["param"].removeprefix("sampling_params.")
    assert (error.reason_name, named) == (reason, param)
    assert error.grpc_code == grpc.StatusCode.INVALID_ARGUMENT
    if reason != "context_exceeded":
        assert error.message.startswith(error.metadata["param"])


numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, 0.5, 1.0]))
tokens = st.integers(0, 2**32 - 1)
small = st.integers(-(2**31), 2**31 - 1)
odd_params = st.builds(
    vllm.SamplingParams,
    temperature=st.none() | numbers, top_p=numbers, top_k=tokens, min_p=numbers, frequency_penalty=numbers,
    presence_penalty=numbers, repetition_penalty=numbers, max_tokens=st.none() | tokens, min_tokens=tokens,
    stop=st.lists(st.text(max_size=3), max_size=2), stop_token_ids=st.lists(tokens, max_size=2), n=tokens,
    logprobs=st.none() | small, prompt_logprobs=st.none() | small, seed=st.none() | small, ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(small, numbers, max_size=2), truncate_prompt_tokens=st.none() | small,
)  # fmt: skip
odd_requests = st.one_of(
    st.builds(
        vllm.GenerateRequest,
        request_id=st.text(max_size=5),
        tokenized=st.builds(vllm.TokenizedInput, input_ids=st.lists(tokens, max_size=3)),
        sampling_params=odd_params,
        stream=st.booleans(),
        data_parallel_rank=st.none() | small,
    ),
    st.builds(
        vllm.GenerateRequest, request_id=st.text(max_size=5), text=st.text(max_size=20), sampling_params=odd_params
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(odd_requests)
def test_any_request_is_mapped_or_refused_in_words(request: vllm.GenerateRequest) -> None:
    try:
        made = generate_request(request)
    except DragomanError as error:
        assert error.grpc_code == grpc.StatusCode.INVALID_ARGUMENT
        assert error.message.startswith(error.metadata["param"])
        return
    assert made.request_id == request.request_id
    assert made.sampling.num_choices == (request.sampling_params.n or 1)


async def test_fuzzed_bytes_get_an_answer_and_disturb_nothing(channel: grpc.aio.Channel) -> None:
    import random

    random_bytes = random.Random(7)
    whole = make(logprobs=1, n=2, stop=["a"], logit_bias={5: 1.0}).SerializeToString()
    call = channel.unary_stream(
        "/vllm.grpc.engine.VllmEngine/Generate", response_deserializer=vllm.GenerateResponse.FromString
    )
    codes = set()
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(3):
            broken[random_bytes.randrange(38, len(broken))] = random_bytes.randrange(256)
        try:
            async for _ in call(bytes(broken), timeout=10):
                pass
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
    assert codes <= {
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN,
    }  # fmt: skip
    assert grpc.StatusCode.INVALID_ARGUMENT in codes
    chunks, ends = await collect(channel, make())
    assert chunks and ends


async def idle(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(5):
        while True:
            info = await Stub(channel).GetServerInfo(vllm.GetServerInfoRequest())
            load = (await Stub(channel).GetLoads(vllm.GetLoadsRequest())).loads[0]
            if not info.active_requests and not load.num_total_reqs and not load.num_used_tokens:
                return
            await asyncio.sleep(0.02)


async def test_abort_ends_the_stream_and_frees(paced_agent: Any) -> None:
    async with grpc.aio.insecure_channel(paced_agent.address, options=channel_options()) as channel:
        for stream in (True, False):
            request = make(max_tokens=30_000, n=2, stream=stream)
            reading = asyncio.create_task(collect(channel, request))
            while True:
                load = (await Stub(channel).GetLoads(vllm.GetLoadsRequest(dp_rank=0))).loads[0]
                if load.num_running_reqs == 2:
                    break
                await asyncio.sleep(0.01)
            assert (await Stub(channel).GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 1
            assert 0 < load.num_used_tokens <= load.max_total_num_tokens
            await Stub(channel).Abort(vllm.AbortRequest(request_ids=["nobody", request.request_id]))
            async with asyncio.timeout(5):
                chunks, ends = await reading
            assert [end.finish_reason for end in ends] == ["abort", "abort"]
            assert sum(chunk.completion_tokens for chunk in chunks) == sum(
                end.completion_tokens for end in ends if stream
            )
            await idle(channel)


async def test_closing_the_stream_frees(paced_agent: Any) -> None:
    async with grpc.aio.insecure_channel(paced_agent.address, options=channel_options()) as channel:
        calls = [Stub(channel).Generate(make(b"%d" % i, max_tokens=30_000)) for i in range(8)]
        for call in calls:
            assert (await call.read()).chunk.token_ids
            call.cancel()
        waiting = [Stub(channel).Generate(make(b"%d" % i, max_tokens=30_000, stream=False)) for i in range(8)]
        await asyncio.sleep(0.2)
        for call in waiting:
            call.cancel()
        await idle(channel)


async def test_a_deadline_ends_it(paced_agent: Any) -> None:
    async with grpc.aio.insecure_channel(paced_agent.address, options=channel_options()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in Stub(channel).Generate(make(max_tokens=30_000), timeout=0.15):
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await idle(channel)


async def test_sixty_four_at_once_get_what_each_gets_alone(channel: grpc.aio.Channel) -> None:
    prompts = [b"prompt %d " % i * (1 + i % 7) for i in range(64)]
    together = await asyncio.gather(
        *(collect(channel, make(prompt, max_tokens=5 + i % 30, stream=bool(i % 2))) for i, prompt in enumerate(prompts))
    )
    for i in range(0, 64, 9):
        (alone,) = await ours(channel, prompts[i], SamplingParameters(temperature=0), 5 + i % 30)
        assert list(together[i][1][0].output_ids) == alone


async def test_a_long_answer_flows_past_the_first_credit(channel: grpc.aio.Channel) -> None:
    for stream in (True, False):
        _, (end,) = await collect(channel, make(max_tokens=600, ignore_eos=True, stream=stream))
        assert end.completion_tokens == 600


async def test_an_id_under_way_is_refused(paced_agent: Any) -> None:
    async with grpc.aio.insecure_channel(paced_agent.address, options=channel_options()) as channel:
        request = make(max_tokens=30_000)
        call = Stub(channel).Generate(request)
        await call.read()
        error = await refusal(Stub(channel).Generate(request))
        assert error.reason_name == "duplicate_request"
        call.cancel()


async def test_information(channel: grpc.aio.Channel) -> None:
    stub = Stub(channel)
    health = await stub.HealthCheck(vllm.HealthCheckRequest())
    assert (health.healthy, health.message) == (True, "serving")
    model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.model_path, model.is_generation) == ("null", "null", True)
    assert (model.vocab_size, model.max_context_length, model.max_req_input_len) == (259, 32_768, 32_767)
    assert model.architectures and model.model_type and not model.supports_vision
    json.loads(model.default_sampling_params_json or "{}")
    await collect(channel, make())
    server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert server.uptime_seconds > 0 and server.last_receive_timestamp > 1.7e9
    assert (server.server_type, server.is_paused, server.data_parallel_size) == ("vllm-grpc", False, 1)
    loads = await stub.GetLoads(vllm.GetLoadsRequest(include=["core"]))
    assert loads.dp_rank_count == len(loads.loads) == 1
    load = loads.loads[0]
    assert load.max_total_num_tokens > 0 and load.max_running_requests > 0
    assert load.gen_throughput > 0
    assert 0 <= load.cache_hit_rate <= 1
    assert (await refusal(stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)))).metadata["param"] == "dp_rank"


async def test_embed_is_a_unit_vector(channel: grpc.aio.Channel) -> None:
    request = vllm.EmbedRequest(request_id="e", tokenized=vllm.TokenizedInput(input_ids=b"hello"))
    answer = await Stub(channel).Embed(request)
    assert sum(value * value for value in answer.embedding) == pytest.approx(1.0, abs=1e-5)
    assert (answer.prompt_tokens, answer.embedding_dim) == (5, len(answer.embedding))
    for odd, param in (
        (vllm.EmbedRequest(), "tokenized"),
        (vllm.EmbedRequest(tokenized=vllm.TokenizedInput()), "tokenized.input_ids"),
        (vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[1, 999_999])), "tokenized.input_ids[1]"),
    ):
        error = await refusal(Stub(channel).Embed(odd))
        assert (error.reason_name, error.metadata["param"]) == ("invalid_request", param)


async def test_an_agent_with_tickets_says_where_to_go(start_agent: Callable[..., Any]) -> None:
    agent = start_agent("--controllers", "127.0.0.1:9", open=False)
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        stub = Stub(channel)
        calls = [
            stub.Generate(make()), stub.Embed(vllm.EmbedRequest()), stub.Abort(vllm.AbortRequest(request_ids=["x"])),
            stub.HealthCheck(vllm.HealthCheckRequest()), stub.GetModelInfo(vllm.GetModelInfoRequest()),
            stub.GetServerInfo(vllm.GetServerInfoRequest()), stub.GetLoads(vllm.GetLoadsRequest()),
        ]  # fmt: skip
        for call in calls:
            error = await refusal(call)
            assert error.grpc_code == grpc.StatusCode.UNAUTHENTICATED
            assert "--open" in error.message and "gateway" in error.message


async def test_it_can_be_switched_off(start_agent: Callable[..., Any]) -> None:
    agent = start_agent("--vllm-grpc", "off")
    async with grpc.aio.insecure_channel(agent.address, options=channel_options()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).HealthCheck(vllm.HealthCheckRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


FACTS = VllmFacts("m", "", "llama", page_size=16, num_blocks=100, max_num_seqs=4, is_open=True)


def test_load_in_tokens_and_shares() -> None:
    load = Load(
        running=3, waiting=2, free_blocks=75, cached_blocks=10, total_blocks=100, pending_prefill_tokens=0,
        running_context_tokens=0, preemptions=0, step_count=1,
    )  # fmt: skip
    told = scheduler_load(load, FACTS, 12.0, 0.5)
    assert (told.num_total_reqs, told.num_used_tokens, told.max_total_num_tokens) == (5, 400, 1600)
    assert (told.token_usage, told.utilization, told.gen_throughput) == (0.25, 0.75, 12.0)
    before = scheduler_load(None, FACTS, 0.0, 0.0)
    assert (before.num_used_tokens, before.max_total_num_tokens, before.max_running_requests) == (0, 1600, 4)


def test_token_rate_forgets_after_a_second() -> None:
    now = 10.0
    rate = TokenRate(lambda: now)
    for _ in range(4):
        rate.add(5)
        now += 0.25
    assert rate.per_second() == 20
    now += 0.3
    assert rate.per_second() == 10
    now += 5
    assert rate.per_second() == 0
