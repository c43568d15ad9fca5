"""F10, F11 and F12: no room for KV, no memory for a step, faults a GPU reports, and logits that are not finite."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from benchmarks.cell import Cell, CellProcess, metric_sum, wait_until
from benchmarks.streams import Stream, read_client, until_flowing
from tests.faults.checks import check_streams, num_duplicated, num_lost, settle, stalls
from tests.faults.conftest import FULL, Figures
from tests.faults.drive import disturb, figures_of, readers_of, undisturbed
from tests.faults.injection import Injection

from dragoman import AsyncClient

NUM_STREAMS = 32 if FULL else 8
NUM_TOKENS = 300
SPEED = ("--null-speed", "10")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
POISONED = "~ a prompt whose logits are not finite, and that is longer than a page so that its blocks would be cached"
VIAS = ("gateway", "client") if FULL else ("client",)
NUM_SICK = 8  # enough for both agents to get some
# 25 prompts of 320 pages leave 191 of 8,191 blocks, and each of the streams grows by 16.
NUM_LONG, LONG_CHARACTERS, LONG_TOKENS = 25, 20_480, 1000

Injected = tuple[Cell, dict[str, Injection]]


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Injected]:
    cell = Cell()
    injections = {f"agent-{index}": Injection(tmp_path_factory.mktemp("agent")) for index in range(2)}
    try:
        for agent_id in injections:
            start(cell, injections, agent_id, wait=False)
        for agent_id in injections:
            cell.wait_agent(agent_id)
        cell.start_gateway()
        yield cell, injections
    finally:
        cell.close()


def start(cell: Cell, injections: dict[str, Injection], agent_id: str, *, wait: bool = True) -> None:
    cell.start_agent(agent_id, *SPEED, wait=wait, environ=injections[agent_id].environ)


def replace(injected: Injected, agent_id: str) -> None:
    """The agent has ended by itself: another one takes its place."""
    cell, injections = injected
    injections[agent_id].report_xids()
    cell.remove_agent(agent_id)
    start(cell, injections, agent_id)
    cell.wait_serving(2)


async def test_f12_logits_that_are_not_finite_end_that_request_alone(
    injected: Injected, figures: Figures, num_runs: int
) -> None:
    cell, injections = injected
    for _ in range(num_runs):
        before = cell.footprint()
        async with readers_of(cell) as readers:
            expected = await undisturbed(readers, "both", PROMPTS, NUM_TOKENS)
            for injection in injections.values():
                injection.spoil(ord("~"))
            streams = [Stream(prompt) for prompt in PROMPTS]
            reading = asyncio.create_task(readers.follow("both", streams, NUM_TOKENS))
            await until_flowing(streams, 5)
            sick = [read_client(readers.client, Stream(POISONED), NUM_TOKENS) for _ in range(NUM_SICK)]
            for ended in await asyncio.gather(*sick):
                assert ended.error.startswith("non_finite_logits"), "the fault was not made"
                assert ended.ends == 1 and ended.num_resumes == 0, (
                    "it was tried elsewhere, where it can only fail again"
                )
            await reading
            for injection in injections.values():
                injection.heal()
            again = await readers.client.complete(POISONED, max_output_tokens=5)
            assert again.usage.output_tokens == 5
            assert again.usage.cached_tokens == 0, "blocks of the spoilt request were found again"
            warm = [await readers.client.complete(POISONED, max_output_tokens=5) for _ in range(5)]
            assert any(each.usage.cached_tokens for each in warm), "this prompt is too short to be cached at all"
        figures.add(
            "F12", f"both-{NUM_STREAMS}", in_flight=NUM_STREAMS, lost=num_lost(streams, expected),
            duplicated=num_duplicated(streams, expected), resumed=0, **stalls(streams),
        )  # fmt: skip
        check_streams(streams, expected)
        settle(cell, before)


@pytest.fixture
def open_agent() -> Iterator[tuple[str, str]]:
    """Address and metrics address of an agent without a controller, which would not grant more than there is room for."""
    agent = CellProcess(
        "dragoman_agent.main", "--device", "null", "--open", "--port", "0", "--metrics-port", "0",
        "--log-level", "warning",
    )  # fmt: skip
    try:
        serving = agent.wait_for("serving")
        agent.wait_for("ready")
        yield serving["grpc"], serving["metrics"]
    finally:
        agent.close()


@pytest.mark.skipif(not FULL, reason="takes long: make faults")
async def test_f10_no_room_for_kv_preempts_and_nobody_notices(
    open_agent: tuple[str, str], figures: Figures, num_runs: int
) -> None:
    address, metrics = open_agent
    prompts = [f"{index:04d}" * (LONG_CHARACTERS // 4) for index in range(NUM_LONG)]

    async def follow(client: AsyncClient, prompts: list[str]) -> list[Stream]:
        return await asyncio.gather(*(read_client(client, Stream(prompt), LONG_TOKENS) for prompt in prompts))

    def preempted() -> float:
        return metric_sum(metrics, "dragoman_preemptions_total")

    async with AsyncClient(agent=address) as client:
        half = NUM_LONG // 2
        calm = await follow(client, prompts[:half]) + await follow(client, prompts[half:])
        expected = {stream.prompt: stream.token_ids for stream in calm}
        assert all(len(token_ids) == LONG_TOKENS for token_ids in expected.values()) and preempted() == 0
        for _ in range(num_runs):
            before = preempted()
            streams = await follow(client, prompts)
            num_preempted = preempted() - before
            assert num_preempted > 0, "there was room for all"
            figures.add(
                "F10", f"client-{NUM_LONG}", in_flight=NUM_LONG, lost=num_lost(streams, expected),
                duplicated=num_duplicated(streams, expected), resumed=0, preempted=num_preempted, **stalls(streams),
            )  # fmt: skip
            check_streams(streams, expected)
            free = metric_sum(metrics, "dragoman_kv_blocks", state="free")
            assert free == metric_sum(metrics, "dragoman_kv_blocks", state="total")


@pytest.mark.parametrize("via", VIAS)
async def test_f10_a_step_without_memory_loses_no_stream(
    injected: Injected, via: str, figures: Figures, num_runs: int
) -> None:
    cell, injections = injected
    for _ in range(num_runs):
        before = cell.footprint()

        async def run_out(agent_id: str) -> None:
            injections[agent_id].run_out_of_memory()

        run = await disturb(cell, via, PROMPTS, NUM_TOKENS, run_out)
        agent = cell.agents[run.agent_id]
        assert await asyncio.to_thread(agent.popen.wait, 10) == 1, "the agent went on without its engine"
        assert "no memory for the workspace" in agent.log_text(), "the fault was not made"
        assert not injections[run.agent_id].trigger.exists()
        figures.add("F10", f"allocation-{via}-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0
        replace(injected, run.agent_id)
        settle(cell, before)


@pytest.mark.skipif(not FULL, reason="takes long: make faults")
@pytest.mark.parametrize("via", VIAS)
async def test_f11_a_gpu_off_the_bus_ends_its_agent_and_loses_no_stream(
    injected: Injected, via: str, figures: Figures, num_runs: int
) -> None:
    cell, injections = injected
    exits: list[float] = []

    async def fall_off(agent_id: str) -> None:
        injections[agent_id].report_xids(79)
        begun = time.monotonic()
        agent = cell.agents[agent_id]
        await asyncio.to_thread(wait_until, lambda: agent.popen.poll() is not None, "the agent ends", 10)
        exits.append(time.monotonic() - begun)

    for _ in range(num_runs):
        before = cell.footprint()
        run = await disturb(cell, via, PROMPTS, NUM_TOKENS, fall_off)
        agent = cell.agents[run.agent_id]
        assert agent.popen.returncode == 1 and "Xid 79" in agent.log_text(), "the fault was not made"
        figures.add("F11", f"xid79-{via}-{NUM_STREAMS}", exit_seconds=exits[-1], **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed >= len(run.victims) > 0
        replace(injected, run.agent_id)
        settle(cell, before)


@pytest.mark.skipif(not FULL, reason="takes long: make faults")
async def test_f11_a_double_bit_error_cordons_the_agent_and_moves_no_stream(
    injected: Injected, figures: Figures, num_runs: int
) -> None:
    cell, injections = injected
    for _ in range(num_runs):
        before = cell.footprint()

        async def flip(agent_id: str) -> None:
            injections[agent_id].report_xids(48)

        run = await disturb(cell, "both", PROMPTS, NUM_TOKENS, flip)
        assert cell.agent_metric(run.agent_id, "dragoman_device_faults_total", xid="48") == 1
        figures.add("F11", f"xid48-both-{NUM_STREAMS}", **figures_of(run))
        check_streams(run.streams, run.expected)
        assert run.num_resumed == 0, "what ran on a cordoned agent ends there"
        async with readers_of(cell) as readers:
            after = [Stream(prompt) for prompt in PROMPTS]
            await readers.follow("client", after, NUM_TOKENS)
        check_streams(after, run.expected)
        assert run.agent_id not in {stream.agent_id for stream in after}, "a cordoned agent got new requests"
        replace(injected, run.agent_id)
        settle(cell, before)
