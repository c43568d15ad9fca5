"""A model whose three files name different end tokens, served on the CPU: what ends its answers, and what is shown (B25)."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.agent.conftest import AgentProcess
from tests.agent.model.checkpoints import save_checkpoint

from dragoman.channel import channel_options
from dragoman.v1 import generation_service_pb2, generation_service_pb2_grpc
from dragoman.v1.generation_service_pb2 import GenerateRequest, SamplingParameters, StopCriteria, TextOptions

CONFIG, GENERATION, TOKENIZER = 5, 7, 3  # end tokens, each named by one file only; 3 is <|stop|>, 2 is <|end|>
LETTER = 100
NAMES = {
    generation_service_pb2.FINISH_REASON_STOP: "stop",
    generation_service_pb2.FINISH_REASON_LENGTH: "length",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An agent that serves such a model."""
    directory = tmp_path_factory.mktemp("three-ends")
    save_checkpoint(directory, "llama", eos_token_id=CONFIG)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [GENERATION]}))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|stop|>"}))
    agent = AgentProcess("--model", str(directory), device="cpu").wait_ready()
    yield agent.address
    agent.close()


def answer(address: str, allowed: list[int], *, shown: bool = False, **stop: Any) -> tuple[str, str, int | None, int]:
    """Text, how it ended, the token that ended it, and how many there were; the model may write `allowed` only."""
    request = GenerateRequest(
        request_id=str(uuid.uuid4()),
        text="hello",
        sampling=SamplingParameters(temperature=0, allowed_token_ids=allowed, logit_bias={allowed[0]: 100.0}),
        stop=StopCriteria(**{"max_output_tokens": 6, **stop}),
        text_options=TextOptions(skip_special_tokens=not shown),
    )

    async def ask() -> list[Any]:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            return [message.delta async for message in stub.Generate(request) if message.HasField("delta")]

    deltas = asyncio.run(ask())
    finish = deltas[-1].finish
    stopped_by = finish.stop_token_id if finish.HasField("stop_token_id") else None
    text = "".join(delta.text for delta in deltas)
    return text, NAMES[finish.reason], stopped_by, sum(len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("end", [CONFIG, GENERATION, TOKENIZER])
@pytest.mark.parametrize("shown", [False, True])
def test_the_end_token_of_each_file_ends_an_answer_and_is_not_shown(address: str, end: int, shown: bool) -> None:
    assert answer(address, [end], shown=shown) == ("", "stop", end, 1)


@pytest.mark.parametrize("end", [CONFIG, GENERATION, TOKENIZER])
def test_ignored_ends_go_on(address: str, end: int) -> None:
    text, finish, stopped_by, count = answer(address, [end], ignore_eos=True)
    assert (finish, stopped_by, count) == ("length", None, 6)
    assert "<|stop|>" not in text
    if end == TOKENIZER:
        assert answer(address, [end], ignore_eos=True, shown=True)[0] == "<|stop|>" * 6


def test_the_callers_own_stop_tokens_are_not_ignored(address: str) -> None:
    assert answer(address, [GENERATION], ignore_eos=True, token_ids=[GENERATION]) == ("", "stop", GENERATION, 1)
    assert answer(address, [LETTER], token_ids=[LETTER])[1:] == ("stop", LETTER, 1)


@pytest.mark.parametrize("end", [CONFIG, GENERATION, TOKENIZER, LETTER])
def test_none_comes_before_the_least_number_of_tokens(address: str, end: int) -> None:
    ids = [LETTER + 1]
    text, finish, stopped_by, count = answer(address, [end, *ids], min_output_tokens=4, token_ids=[LETTER])
    assert (finish, stopped_by, count) == ("stop", end, 5)
    assert text and "<|stop|>" not in text
