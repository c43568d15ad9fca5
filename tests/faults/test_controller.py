"""F4: the controller is killed under many streams and comes back; then everybody asks at once.

Two cores read NUM_STREAMS of them through the gateway and the client without falling behind; the 5,000 that the design names are
opened by the client alone, and short.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from benchmarks.cell import Cell, running_cell
from benchmarks.streams import Stream, until_flowing
from tests.faults.checks import check_streams, num_duplicated, num_lost, settle, stalls
from tests.faults.conftest import Figures
from tests.faults.drive import readers_of, undisturbed

from dragoman import AsyncClient

NUM_STREAMS = 400
NUM_TOKENS = 60
NUM_HERD, HERD_TOKENS = 5000, 8
SPEED = ("--null-speed", "60")
PROMPTS = [f"stream {index}" for index in range(NUM_STREAMS)]
TWO_HEARTBEATS_SECONDS = 2.0
RECONNECT_SECONDS = 3.0  # the longest pause between two attempts of an agent or the gateway, and a start


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with running_cell(SPEED, SPEED) as made:
        yield made


async def test_f4_streams_do_not_notice_and_the_view_is_rebuilt(cell: Cell, figures: Figures, num_runs: int) -> None:
    for _ in range(num_runs):
        before = cell.footprint()
        async with readers_of(cell) as readers:
            expected = await undisturbed(readers, "both", PROMPTS, NUM_TOKENS)
            streams = [Stream(prompt) for prompt in PROMPTS]
            reading = asyncio.create_task(readers.follow("both", streams, NUM_TOKENS))
            await until_flowing(streams, 3)
            in_flight = sum(len(stream.token_ids) < NUM_TOKENS for stream in streams)
            assert in_flight > NUM_STREAMS / 2, "the streams had ended before the controller was killed"
            killed = cell.controller
            killed.signal(9)
            assert killed.popen.wait(5) == -9
            killed.close()
            await asyncio.sleep(1)
            await asyncio.to_thread(cell.start_controller)
            back = time.monotonic()
            await asyncio.to_thread(wait_registered, cell)
            rebuilt = time.monotonic() - back
            await reading
            check_streams(streams, expected)
            assert not any(stream.num_resumes for stream in streams), "a stream was moved for nothing"
            herd = [Stream(prompt) for prompt in PROMPTS]
            await readers.follow("both", herd, NUM_TOKENS)
        check_streams(herd, expected)
        figures.add(
            "F4", f"both-{NUM_STREAMS}", in_flight=in_flight, lost=num_lost(streams, expected),
            duplicated=num_duplicated(streams, expected), resumed=0, **stalls(streams), detect_seconds=rebuilt,
        )  # fmt: skip
        assert rebuilt <= TWO_HEARTBEATS_SECONDS + RECONNECT_SECONDS
        settle(cell, before)


async def test_f4_thousands_that_ask_at_once_after_a_restart_are_all_served(
    cell: Cell, figures: Figures, num_runs: int
) -> None:
    """Each through Acquire and Generate; what they get is what each prompt gets alone."""
    for _ in range(num_runs):
        before = cell.footprint()
        killed = cell.controller
        killed.signal(9)
        killed.popen.wait(5)
        killed.close()
        await asyncio.to_thread(cell.start_controller)
        await asyncio.to_thread(wait_registered, cell)
        async with AsyncClient(cell.controller_address) as client:

            async def answer(index: int, client: AsyncClient = client) -> list[int]:
                cursor, ids = 0, list[int]()
                stream = client.generate(
                    f"herd {index}", max_output_tokens=HERD_TOKENS, ignore_eos=True, temperature=0.0
                )
                async for token in stream:
                    assert token.cursor == cursor, "a token is missing or came twice"
                    cursor += len(token.token_ids)
                    ids += token.token_ids
                return ids

            alone = {index: await answer(index) for index in range(0, NUM_HERD, NUM_HERD // 20)}
            begun = time.monotonic()
            answers = await asyncio.gather(*map(answer, range(NUM_HERD)))
            seconds = time.monotonic() - begun
        lost = sum(len(ids) < HERD_TOKENS for ids in answers)
        wrong = sum(answers[index] != ids for index, ids in alone.items())
        figures.add("F4", f"client-{NUM_HERD}-at-once", lost=lost, differing=wrong, served_seconds=seconds)
        assert lost == wrong == 0
        settle(cell, before)


def wait_registered(cell: Cell) -> None:
    """Until the new controller counts every agent as serving."""
    deadline = time.monotonic() + 30
    while cell.controller_metric("dragoman_agents", state="serving") < len(cell.agents):
        assert time.monotonic() < deadline, "the agents did not come back"
        time.sleep(0.02)
