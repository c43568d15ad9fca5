"""Cell keys rotate under load: no request is dropped, and at the end nothing of the old key is left."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dragoman import AsyncClient
from dragoman.v1 import admission_service_pb2, ticket_pb2
from dragoman_controller.config import ControllerSettings
from dragoman_controller.fleet import Member
from dragoman_controller.server import ControllerServer

NUM_USERS = 8


def write_keys(path: Path, *key_ids: int) -> None:
    """The newest first; a key has the same secret in every file."""
    path.write_text("".join(f"{key_id} {key_id:064x}\n" for key_id in key_ids))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControllerServer]:
    write_keys(tmp_path / "keys", 1)
    controller = ControllerServer(ControllerSettings(port=0, metrics_port=0, cell_key_file=tmp_path / "keys"))
    await controller.start()
    yield controller
    await controller.stop()


@pytest.fixture
async def agent(server: ControllerServer) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", "from dragoman_agent.main import main; main()",
        "--device", "null", "--port", "0", "--metrics-port", "0", "--announce", "--drain-notice", "0",
        "--controllers", f"127.0.0.1:{server.port}", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    while json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["event"] != "ready":
        pass
    yield process
    process.terminate()
    await asyncio.wait_for(process.wait(), 20)


async def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.01)


async def test_no_request_is_dropped_while_keys_rotate(
    server: ControllerServer, agent: asyncio.subprocess.Process, tmp_path: Path
) -> None:
    await until(lambda: any(member.state.label == "serving" for member in server.cell.fleet))
    (member,) = server.cell.fleet
    is_over = asyncio.Event()
    num_done = 0

    async def user(client: AsyncClient) -> None:
        nonlocal num_done
        while not is_over.is_set():
            result = await client.complete(secrets.token_hex(8), max_output_tokens=4, ignore_eos=True)
            assert result.num_resumes == 0 and result.usage.output_tokens == 4
            num_done += 1

    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        users = [asyncio.create_task(user(client)) for _ in range(NUM_USERS)]

        async def several_more() -> None:
            before = num_done
            await until(lambda: num_done > before + NUM_USERS)

        for newest in (2, 3, 4):
            await several_more()
            write_keys(tmp_path / "keys", newest, newest - 1)
            server.reload()
            await until(partial(has_confirmed, member, newest))
        await several_more()
        is_over.set()
        await asyncio.gather(*users)
    refused = [
        sample.value
        for family in server.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "dragoman_tickets_total" and sample.labels["result"] not in ("granted", "released")
    ]
    assert not any(refused) and num_done > 4 * NUM_USERS
    answer = await ask(server)
    signed = ticket_pb2.SignedTicket.FromString(answer)
    assert ticket_pb2.TicketClaims.FromString(signed.claims).key_id == 4
    assert server.cell.minter.key_ids == (4, 3) == member.confirmed_key_ids


def has_confirmed(member: Member, key_id: int) -> bool:
    return key_id in member.confirmed_key_ids


async def ask(server: ControllerServer) -> bytes:
    """A ticket's bytes, of a request that is not sent."""
    from dragoman_controller.rpc.convert import admission_request

    (member,) = server.cell.fleet
    message = admission_service_pb2.AcquireTicketRequest(
        request_id="last", model=member.spec.models[0].name, prompt_tokens=5, prompt_digest=bytes(32)
    )
    answers: list[Any] = []
    server.cell.admission.submit(admission_request(message), answers.append)
    return bytes(answers[0].ticket.token)
