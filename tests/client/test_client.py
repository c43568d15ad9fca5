"""The client against real processes: controller and null agents. One of them is killed."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import dragoman
from dragoman import AsyncClient, Client, DragomanError, RetryPolicy
from dragoman.v1 import agent_pb2


@pytest.fixture
async def client(controller: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(controller) as made:
        async with asyncio.timeout(10):  # an agent is listed before it serves
            while not any(agent.state == agent_pb2.AGENT_STATE_SERVING for agent in await made.agents()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield made


def reason(failure: pytest.ExceptionInfo[DragomanError]) -> str:
    assert "Traceback" not in failure.value.message
    return failure.value.reason_name


async def test_stream_then_result(client: AsyncClient) -> None:
    stream = client.generate("hello", max_output_tokens=12, seed=5)
    tokens = [token async for token in stream]
    result = await stream.result()
    assert [token_id for token in tokens for token_id in token.token_ids] == list(result.token_ids)
    assert "".join(token.text for token in tokens) == result.text
    assert [token.cursor for token in tokens] == [
        sum(len(earlier.token_ids) for earlier in tokens[:index]) for index in range(len(tokens))
    ]
    assert len(result.token_ids) == result.usage.output_tokens == 12
    assert (result.finish_reason, result.agent_id, result.num_resumes, result.seed) == ("length", "steady", 0, 5)
    assert result.usage.prompt_tokens > 0
    assert tokens[-1].finish_reason == "length"
    assert result.timings.total_seconds is not None
    assert 0 < result.timings.total_seconds <= result.timings.client_total_seconds
    assert result.quote is not None
    assert result.quote.finish.p10_seconds <= result.quote.finish.p90_seconds


async def test_the_same_seed_gives_the_same_and_ids_equal_text(client: AsyncClient) -> None:
    first = await client.complete("hello", max_output_tokens=8, seed=1)
    again = await client.complete("hello", max_output_tokens=8, seed=1)
    by_ids = await client.complete(await client.tokenize("hello"), max_output_tokens=8, seed=1)
    other = await client.complete("hallo", max_output_tokens=8, seed=1)
    assert first.token_ids == again.token_ids == by_ids.token_ids != other.token_ids


async def test_forms_and_prompt_logprobs(client: AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    result = await client.complete("hello", json_schema={**schema, "additionalProperties": False}, prompt_logprobs=2)
    assert (result.finish_reason, set(json.loads(result.text))) == ("stop", {"a"})
    assert [entry.token_id for entry in result.prompt_logprobs] == list(b"ello")
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in result.prompt_logprobs)
    assert (await client.complete("hello", choices=["yes", "no"])).text in ("yes", "no")
    with pytest.raises(DragomanError) as caught:
        await client.complete("hello", regex="(")
    assert (caught.value.reason_name, caught.value.metadata["param"]) == ("invalid_request", "sampling.grammar.regex")


async def test_choices_stop_strings_and_logprobs(client: AsyncClient) -> None:
    result = await client.complete("hello", max_output_tokens=6, n=3, logprobs=2)
    assert len(result.choices) == 3
    assert all(len(choice.token_ids) == len(choice.logprobs) == 6 for choice in result.choices)
    assert all(math.isfinite(entry.logprob) and len(entry.top) == 2 for entry in result.choices[0].logprobs)
    text = result.choices[0].text
    stopped = await client.complete("hello", max_output_tokens=6, stop=text[2:4], seed=result.seed)
    assert stopped.finish_reason == "stop"
    assert stopped.choices[0].stop_string == text[2:4]
    assert text[2:4] not in stopped.text


async def test_chat_is_generate_with_a_conversation(client: AsyncClient) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = await client.chat(messages, max_output_tokens=6, temperature=0).result()
    same = await client.complete(messages, max_output_tokens=6, temperature=0)
    assert chat.token_ids == same.token_ids
    assert chat.usage.prompt_tokens > 2


async def test_tokenize_and_back(client: AsyncClient) -> None:
    text = "Grüße, 世界 👋 and spaces  too"
    ids = await client.tokenize(text, add_special_tokens=False)
    assert len(ids) > 4
    assert await client.detokenize(ids) == text


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda client: client.tokenize(None), "text"),
        (lambda client: client.tokenize("\ud800"), "text"),
        (lambda client: client.detokenize([-1]), "token_ids"),
        (lambda client: client.detokenize(None), "token_ids"),
        (lambda client: client.detokenize("ab"), "token_ids"),
        (lambda client: client.detokenize(b"ab"), "token_ids"),
        (lambda client: client.embed(None), "texts"),
        (lambda client: client.embed(5), "texts"),
        (lambda client: client.embed(b"ab"), "texts"),
        (lambda client: client.embed(["a", "\ud800"]), "texts[1]"),
        (lambda client: client.embed([[1], [-1]]), "texts[1]"),
        (lambda client: client.embed([b"ab"]), "texts[0]"),
        (lambda client: client.cancel(5), "request_id"),
        (lambda client: client.complete("a", model=5), "model"),
    ],
)
async def test_a_bad_argument_of_any_call_is_named(client: AsyncClient, call: Any, param: str) -> None:
    with pytest.raises(DragomanError) as failure:
        await call(client)
    assert reason(failure) == "invalid_request" and failure.value.metadata["param"] == param
    assert failure.value.message.startswith(f"{param}: ")


async def test_embeddings_have_norm_one_and_keep_their_order(client: AsyncClient) -> None:
    both = await client.embed(["one text", "another"])
    alone = await client.embed("another")
    assert len(both.vectors) == 2
    assert both.vectors[1] == pytest.approx(alone.vectors[0], abs=1e-5)
    assert math.dist(both.vectors[0], [0.0] * len(both.vectors[0])) == pytest.approx(1.0, abs=1e-4)
    assert both.prompt_tokens > alone.prompt_tokens


async def test_what_the_fleet_tells(client: AsyncClient) -> None:
    (member,) = await client.agents()
    assert (member.agent.agent_id, member.state) == ("steady", agent_pb2.AGENT_STATE_SERVING)
    assert await client.models() == [member.agent.models[0].model]
    assert (await client.hardware()).candidates[0].chosen
    assert (await client.hardware("steady")).profile.device.kind == "null"
    assert [sample.agent_id for sample in await client.load()] == ["steady"]
    quote = await client.quote("hello", max_output_tokens=100)
    assert quote.agent_id == "steady"
    assert quote.finish.p10_seconds <= quote.finish.expected_seconds <= quote.finish.p90_seconds
    with pytest.raises(DragomanError, match=r"no agent 'x' \(agents: steady\)"):
        await client.hardware("x")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "stedy"}, "model_not_served"),
        ({"temperature": math.nan}, "invalid_request"),
        ({"temperature": 9}, "invalid_request"),
        ({"top_k": -1}, "invalid_request"),
    ],
)
async def test_bad_input_has_a_reason(client: AsyncClient, options: dict[str, object], expected: str) -> None:
    with pytest.raises(DragomanError) as failure:
        await client.complete("hello", **options)  # type: ignore[arg-type]
    assert reason(failure) == expected


async def test_a_prompt_longer_than_the_context(client: AsyncClient) -> None:
    with pytest.raises(DragomanError) as failure:
        await client.complete([1] * 200_000)
    assert reason(failure) == "context_exceeded"


async def test_leaving_the_loop_frees_the_agent(client: AsyncClient) -> None:
    async for _ in client.generate("hello", ignore_eos=True):
        break
    await until_idle(client)


async def test_an_id_that_is_under_way_is_told_to_be_taken(client: AsyncClient) -> None:
    async with client.generate("hello", ignore_eos=True, request_id="twice") as stream:
        await anext(aiter(stream))
        with pytest.raises(DragomanError, match="give each request an id of its own"):
            await client.complete("hello", request_id="twice", max_output_tokens=2)


async def test_cancel_from_another_client(client: AsyncClient, controller: str) -> None:
    stream = client.generate("hello", ignore_eos=True, request_id="to-be-cancelled")
    tokens = aiter(stream)
    await anext(tokens)
    async with AsyncClient(controller) as other:
        await other.cancel("to-be-cancelled")
        await other.cancel("never heard of")
    async for _ in tokens:
        pass
    assert (await stream.result()).finish_reason == "cancelled"
    await until_idle(client)


async def until_idle(client: AsyncClient) -> None:
    async with asyncio.timeout(5):
        while any(sample.load.running_requests for sample in await client.load()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_an_open_agent_needs_no_controller(open_agent: str) -> None:
    async with AsyncClient(agent=open_agent) as client:
        result = await client.complete("hello", max_output_tokens=4)
        assert len(result.token_ids) == 4
        assert await client.models() == [result.model]
        with pytest.raises(DragomanError, match="comes from a controller"):
            await client.agents()


async def test_an_agent_that_dies_costs_a_pause_and_no_token(own_fleet: Any) -> None:
    controller = own_fleet.controller()
    agents = {
        name: own_fleet.agent("--controllers", controller.address, "--agent-id", name, "--null-speed", "1")
        for name in ("a", "b")
    }
    async with AsyncClient(controller.address, retry=RetryPolicy(resume_patience_seconds=20)) as client:
        async with asyncio.timeout(10):
            while len(await client.agents()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        options = {"max_output_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": 11, "n": 2}
        whole = await client.complete("a story", **options)
        stream = client.generate("a story", **options)
        cursors: dict[int, list[int]] = {0: [], 1: []}
        killed = None
        async for token in stream:
            cursors[token.choice].extend(range(token.cursor, token.cursor + len(token.token_ids)))
            if killed is None and len(cursors[0]) >= 40:
                killed = stream.agent_id
                agents[str(killed)].process.kill()
        result = await stream.result()
    assert killed is not None
    assert (result.num_resumes, result.agent_id) == (1, "b" if killed == "a" else "a")
    assert cursors == {0: list(range(120)), 1: list(range(120))}, "none lost, none twice"
    assert [choice.token_ids for choice in result.choices] == [choice.token_ids for choice in whole.choices]
    assert [choice.text for choice in result.choices] == [choice.text for choice in whole.choices]


async def test_a_stream_fails_soon_when_nothing_answers_any_more(own_fleet: Any) -> None:
    controller = own_fleet.controller()
    own_fleet.agent("--controllers", controller.address, "--null-speed", "1")
    async with AsyncClient(controller.address) as client:
        async with asyncio.timeout(10):
            while not await client.models():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        stream = client.generate("a story", ignore_eos=True)
        stopped = 0.0
        with pytest.raises(DragomanError, match=r"the stream was cut \(.*could not be resumed: .*connection refused"):
            async for _ in stream:
                if not stopped:
                    for server in own_fleet.servers:
                        server.process.kill()
                    stopped = time.monotonic()
        assert time.monotonic() - stopped < 7


def test_an_empty_address_is_an_error() -> None:
    with pytest.raises(DragomanError, match="controller: the address is empty"):
        Client("")
    with pytest.raises(DragomanError, match="'a:99999', has no port"):
        Client("a:99999")
    with pytest.raises(DragomanError, match="agent: the address is empty"):
        Client(agent=" ")
    with pytest.raises(DragomanError, match="agent: the address 'localhost' has no port"):
        Client(agent="localhost")


def test_sync_client(controller: str) -> None:
    with Client(controller) as client:
        wait_for_agent(client)
        result = client.complete("hello", max_output_tokens=8, seed=1)
        stream = client.generate("hello", max_output_tokens=8, seed=1)
        assert "".join(token.text for token in stream) == result.text
        assert stream.result().token_ids == result.token_ids
        for _ in client.chat([{"role": "user", "content": "hi"}], ignore_eos=True):
            break
        with client.generate("hello", ignore_eos=True) as stopped:
            next(iter(stopped))
        with pytest.raises(DragomanError, match="closed before its end"):
            stopped.result()
        assert client.detokenize(client.tokenize("hello", add_special_tokens=False)) == "hello"
        assert client.models()
        assert len(client.embed("x").vectors) == 1
        assert client.agents() and client.load() and client.hardware().candidates
        assert client.quote("hello").agent_id == "steady"
        client.cancel("unknown")
        with pytest.raises(DragomanError):
            client.complete("hello", model="none")
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


def wait_for_agent(client: Client) -> None:
    deadline = time.monotonic() + 10
    while not any(agent.state == agent_pb2.AGENT_STATE_SERVING for agent in client.agents()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_public_surface_is_frozen() -> None:
    assert sorted(dragoman.__all__) == [
        "AsyncClient", "Choice", "Client", "DragomanError", "Embeddings", "Estimate", "GenerateOptions",
        "GenerationResult", "GenerationStream", "Quote", "RetryPolicy", "Stream", "Timings", "Token", "TokenLogprob",
        "Usage", "__version__",
    ]  # fmt: skip
    assert all(getattr(dragoman, name) is not None for name in dragoman.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = dragoman.Nope  # type: ignore[attr-defined]


def test_both_clients_have_one_surface() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {
            name.removeprefix("a") if name == "aclose" else name: list(inspect.signature(method).parameters)
            for name, method in methods
            if not name.startswith("_")
        }

    assert surface(AsyncClient) == surface(Client)
    assert list(inspect.signature(AsyncClient).parameters) == list(inspect.signature(Client).parameters)
    assert set(surface(AsyncClient)) == {
        "agents", "cancel", "chat", "close", "complete", "detokenize", "drain", "undrain", "embed", "generate", "hardware", "load", "models",
        "quote", "tokenize",
    }  # fmt: skip
