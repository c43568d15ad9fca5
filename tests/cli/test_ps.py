"""`dragoman ps`: what is asked for and what is not, and agents whose figures cannot be had."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from tests.cli.command import Dragoman, assert_error

from dragoman_cli import ps


class EnoughError(Exception):
    """Ends a watch."""


def test_json_is_printed_once(dragoman: Dragoman) -> None:
    done = dragoman("ps", "--json", "--watch", "--controller", "127.0.0.1:1")
    assert_error(done, "--json and --watch are both given", "ask for one of the two", code=2)


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe"])
def test_another_server_at_the_address_of_the_figures_gives_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        replying = threading.Thread(target=reply)
        replying.start()
        assert ps._read_counter(f"127.0.0.1:{server.getsockname()[1]}") is None
        replying.join(5)


async def test_a_cell_without_agents_is_not_asked_without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slept = 0, []
    sleep = asyncio.sleep

    async def rows(controller: str) -> list[dict[str, Any]]:
        nonlocal asked
        asked += 1
        return []

    async def rest(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise EnoughError
        await sleep(0)

    monkeypatch.setattr(ps, "_rows", rows)
    monkeypatch.setattr(asyncio, "sleep", rest)
    with pytest.raises(EnoughError):
        await ps._watch("127.0.0.1:1")
    assert asked == 4 and all(0.4 < seconds <= 0.5 for seconds in slept)
