"""Which of several controllers is asked."""

from __future__ import annotations

import pytest

from dragoman.controllers import TRANSPORT, Controllers
from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2

AWAY = DragomanError(error_pb2.ERROR_REASON_NO_AGENT, "cannot reach it", metadata={TRANSPORT: "connection refused"})
LEAVING = DragomanError(error_pb2.ERROR_REASON_AGENT_DRAINING, "shutting down")
FULL = DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, "full")


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("a:1", ("a:1",)),
        (" a:1 , b:2,", ("a:1", "b:2")),
        (["a:1", "b:2", "a:1"], ("a:1", "b:2")),
    ],
)
def test_lists_in_every_form(given: str | list[str], addresses: tuple[str, ...]) -> None:
    controllers = Controllers(given)
    assert controllers.addresses == addresses and controllers.current == addresses[0]
    assert str(controllers) == ", ".join(addresses)


@pytest.mark.parametrize("given", ["", " , ", []])
def test_none_is_refused(given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address of a controller is empty"):
        Controllers(given)


@pytest.mark.parametrize("given", ["a:99999", "a:1,b:0", "dns:a:65536"])
def test_a_port_that_cannot_be_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="no port from 1 to 65535"):
        Controllers(given)


@pytest.mark.parametrize("given", ["localhost", "a:1,b", "127.0.0.1:", "http://a:1", "::1"])
def test_one_without_a_port_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"^the address of a controller, '[^,]+', (has no|is a)"):
        Controllers(given)


def test_only_news_of_the_one_that_is_asked_moves_on() -> None:
    controllers = Controllers("a:1,b:1,c:1")
    controllers.failed("b:1")
    assert controllers.current == "a:1"
    controllers.failed("a:1")
    controllers.failed("a:1")
    assert controllers.current == "b:1"
    controllers.failed("b:1")
    controllers.failed("c:1")
    assert controllers.current == "a:1"


@pytest.mark.parametrize("error", [AWAY, LEAVING])
async def test_the_next_is_asked_where_one_is_away_or_leaving(error: DragomanError) -> None:
    controllers, asked = Controllers("a:1,b:1,c:1"), []

    async def call(address: str) -> str:
        asked.append(address)
        if address != "c:1":
            raise error
        return "yes"

    assert await controllers.ask(call) == "yes" and asked == ["a:1", "b:1", "c:1"]
    assert await controllers.ask(call) == "yes" and asked == ["a:1", "b:1", "c:1", "c:1"]


async def test_an_answer_is_an_answer_and_each_is_asked_once() -> None:
    controllers, asked = Controllers("a:1,b:1"), []

    async def refused(address: str) -> str:
        asked.append(address)
        raise FULL

    with pytest.raises(DragomanError, match="full"):
        await controllers.ask(refused)

    async def away(address: str) -> str:
        asked.append(address)
        raise AWAY

    with pytest.raises(DragomanError, match="cannot reach"):
        await controllers.ask(away)
    assert asked == ["a:1", "a:1", "b:1"]
