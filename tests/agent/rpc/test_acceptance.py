"""When a request was received: before its prompt is tokenized, whatever that takes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from dragoman.v1.generation_service_pb2 import GenerateRequest
from dragoman_agent.engine.messages import Start
from dragoman_agent.rpc.acceptance import Acceptance
from dragoman_agent.rpc.validate import ModelLimits, cannot_encode
from dragoman_agent.tickets import OPEN_GRANT


async def test_a_request_is_received_before_it_is_tokenized() -> None:
    admitted: list[Start] = []

    async def tokenized(_: Any) -> list[int]:
        await asyncio.sleep(0.02)
        return [1, 2, 3]

    def ignore(*_: Any) -> None:
        """Everything is allowed."""

    gate: Any = SimpleNamespace(
        check_open=ignore, verify_ticket=lambda *_: OPEN_GRANT, check_new=ignore, count_refusal=ignore,
        admit=lambda start, *_: admitted.append(start),
    )  # fmt: skip
    model: Any = SimpleNamespace(
        check_name=ignore, prompt_now=ignore, prompt_later=tokenized, encode_word=cannot_encode,
        limits=ModelLimits(vocab_size=10, max_context_tokens=64, hidden_size=8),
    )  # fmt: skip
    acceptance = Acceptance(gate, model, 1)
    before = time.monotonic()
    attempt = acceptance.begin(GenerateRequest(request_id="r", text="x" * 9))
    begun = time.monotonic()
    await acceptance.tokenize(attempt)
    acceptance.accept(attempt, SimpleNamespace())  # type: ignore[arg-type]
    assert admitted[0].received is not None
    assert before <= admitted[0].received <= begun < time.monotonic() - 0.02
