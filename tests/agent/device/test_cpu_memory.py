"""A step on the CPU that finds no memory: the same answers in smaller steps, one request failed at most, an engine that lives."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.agent.device.conformance.subjects import plan_of
from tests.agent.device.conformance.tiny_model import CONFIG, TinyModel

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import DeviceError, DeviceMemoryError
from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import KV_DTYPES, NATIVE_FLOAT32, TORCH_FLOAT32
from dragoman_agent.device.warm_up import warm_up_batch
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Delta, Embedded, Failed, Sampling, Start, StartEmbed, Stop
from dragoman_text import TextTokenizer
from dragoman_text.tokenizer import byte_tokenizer_files

ROADS = [
    TORCH_FLOAT32,
    pytest.param(
        NATIVE_FLOAT32,
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which is not installed"),
    ),
]
HEAVY = 66  # a token that no prompt below has
TORCH_ERROR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
Refuse = Callable[[Any, int], Exception | None]  # by the batch and the number of the call


@pytest.fixture(params=ROADS)
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    opened = CpuDevice()
    model: Any = TinyModel()
    opened.load(model, plan_of("cpu", request.param, KV_DTYPES[request.param]), lambda _: None)
    assert opened.info["road"] == request.param
    yield opened
    opened.close()


def inject(device: CpuDevice, refuse: Refuse, *, after: bool = False) -> list[int]:
    """Let steps find no memory, before the model runs or after it; the steps refused."""
    road: Any = device._loaded.road
    whole, refused, calls = road.run, [], [0]

    def run(batch: Any) -> Any:
        error = refuse(batch, calls[0])
        calls[0] += 1
        if error is not None:
            refused.append(batch.step)
            if after:
                whole(batch)
            raise error
        return whole(batch)

    road.run = run
    return refused


def core_of(device: CpuDevice) -> EngineCore:
    plan = plan_of("cpu", device.info["road"], KV_DTYPES[device.info["road"]])
    tokenizer = TextTokenizer.from_files(byte_tokenizer_files())
    return EngineCore(device, tokenizer, b"0" * 32, plan, vocab_size=CONFIG.vocab_size)


def commands() -> list[Any]:
    """Streams drawn in several ways, one of them by the text so far, and two embeddings; more tokens than a step has."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 60, count).tolist() for count in (5, 20, 23, 9, 30)]
    stop = Stop(max_output_tokens=8)
    samplings = (
        Sampling(temperature=0.0),
        Sampling(temperature=0.9, top_p=0.8, seed=3, num_logprobs=2),
        Sampling(temperature=0.9, seed=4, repetition_penalty=1.3),
    )
    starts = [Start(f"stream{i}", prompts[i], one, stop, credit=1000) for i, one in enumerate(samplings)]
    return [*starts, *(StartEmbed(f"vector{i}", ids) for i, ids in enumerate(prompts[3:]))]


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Tokens are equal, vectors nearly: a library sums in another order for another batch."""
    return found.keys() == expected.keys() and all(
        np.allclose(found[name], wanted, atol=1e-4) for name, wanted in expected.items()
    )


def answers(core: EngineCore, *more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for event in run_all(core, [*commands(), *more]):
        if isinstance(event, Delta):
            found.setdefault(event.request_id, []).extend(event.token_ids)
        elif isinstance(event, Embedded):
            found[event.request_id] = np.frombuffer(event.values, "<f4").tolist()
        elif isinstance(event, Failed):
            found[event.request_id] = event
    scheduler = core.scheduler
    assert not core.requests and not scheduler.running and not core._in_flight
    assert scheduler.pool.num_free == core._plan.num_blocks - 1
    return found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [MemoryError("numpy had none"), RuntimeError(TORCH_ERROR)])
def test_one_step_that_fails_costs_no_token(device: CpuDevice, error: Exception, after: bool) -> None:
    """Whichever it is: prompts or decode, with another step behind or not, that one's sampling supplied or not."""
    expected = answers(core_of(device))
    assert all(len(expected[f"stream{i}"]) == 8 for i in range(3)) and len(expected) == 5
    chosen, calls = [0], [0]

    def refuse(*_: Any) -> Exception | None:
        calls[0] += 1
        return error if calls[0] == chosen[0] else None

    refused = inject(device, refuse, after=after)
    for number in range(1, 11):
        chosen[0], calls[0] = number, 0
        assert same(answers(core_of(device)), expected), f"step {number}"
        assert len(refused) == number


def test_large_steps_are_cut_and_what_does_not_fit_at_all_fails_alone(device: CpuDevice) -> None:
    expected = answers(core_of(device))
    refused = inject(
        device,
        lambda batch, _: MemoryError() if len(batch.token_ids) > 12 or HEAVY in batch.token_ids else None,
    )
    core = core_of(device)
    heavy = Start("heavy", [HEAVY] * 3, Sampling(temperature=0.0), Stop(max_output_tokens=4), credit=1000)
    found = answers(core, heavy)
    failed = found.pop("heavy")
    assert same(found, expected)
    assert failed.reason == error_pb2.ERROR_REASON_DEVICE_MEMORY and "no memory" in failed.message
    assert refused and core.scheduler.memory_limit.max_step_tokens <= 12


def test_a_device_without_any_memory_fails_all_and_serves_again(device: CpuDevice) -> None:
    expected = answers(core_of(device))
    is_full = [True]
    inject(device, lambda *_: MemoryError() if is_full[0] else None)
    core = core_of(device)
    found = answers(core)
    assert {event.reason for event in found.values()} == {error_pb2.ERROR_REASON_DEVICE_MEMORY} and len(found) == 5
    is_full[0] = False
    assert same(answers(core), expected)


def test_what_is_raised(device: CpuDevice) -> None:
    batch = warm_up_batch(16, 0, 8)
    inject(
        device, lambda _, call: (MemoryError("none"), MemoryError(), RuntimeError("other"))[call] if call < 3 else None
    )
    for words in ("a step of 8 tokens does not fit: none", "a step of 8 tokens does not fit: MemoryError"):
        with pytest.raises(DeviceMemoryError, match=words):
            device.submit(batch).result()
    with pytest.raises(DeviceError, match="failed on the CPU: other") as caught:
        device.submit(batch).result()
    assert not isinstance(caught.value, DeviceMemoryError)
    road: Any = device._loaded.road

    def full(_: Any) -> Any:
        raise MemoryError("none")

    road.read_blocks = full
    with pytest.raises(DeviceMemoryError, match="there is no room to move KV blocks: none"):
        device.read_blocks(np.array([1], np.int32))
