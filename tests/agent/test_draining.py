"""The drain by itself: one at a time, only ever hurried, taken back while that is possible."""

from __future__ import annotations

import asyncio

import pytest

from dragoman_agent.draining import Drainer


class Host:
    """Records what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.idle = asyncio.Event()
        self.num_live = 3

    async def announce_drain(self) -> None:
        self.calls.append("announce")

    def close_door(self) -> None:
        self.calls.append("close")

    async def wait_idle(self) -> None:
        await self.idle.wait()

    async def reopen(self) -> None:
        self.calls.append("reopen")

    def leave(self) -> None:
        self.calls.append("leave")

    async def until(self, *calls: str) -> None:
        for _ in range(2000):
            if self.calls == list(calls):
                return
            await asyncio.sleep(0.001)
        raise AssertionError(self.calls)


@pytest.fixture
async def host() -> Host:
    return Host()


async def test_it_ends_when_nothing_runs(host: Host) -> None:
    drainer = Drainer(host, notice_seconds=0.0, limit_seconds=60)
    drainer.drain(None)
    await host.until("announce", "close")
    host.idle.set()
    await host.until("announce", "close", "leave")
    assert "it is leaving" in drainer.undrain()


async def test_what_runs_at_the_end_of_the_budget_is_handed_over(host: Host) -> None:
    drainer = Drainer(host, notice_seconds=5.0, limit_seconds=60)
    drainer.drain(0.05)
    await host.until("announce", "close", "leave")


async def test_a_second_drain_changes_nothing_but_may_hurry(host: Host) -> None:
    drainer = Drainer(host, notice_seconds=0.0, limit_seconds=60)
    drainer.drain(None)
    await host.until("announce", "close")
    drainer.drain(120)
    await asyncio.sleep(0.05)
    assert host.calls == ["announce", "close"]
    drainer.drain(0.0)
    await host.until("announce", "close", "leave")


async def test_it_is_taken_back_and_can_begin_again(host: Host) -> None:
    drainer = Drainer(host, notice_seconds=0.0, limit_seconds=60)
    assert drainer.undrain() == "", "where none is under way there is nothing to do"
    drainer.drain(0.2)
    await host.until("announce", "close")
    assert drainer.undrain() == ""
    await host.until("announce", "close", "reopen")
    await asyncio.sleep(0.3)
    assert host.calls[-1] == "reopen", "the old budget is forgotten"
    drainer.drain(None)
    await host.until("announce", "close", "reopen", "announce", "close")
    drainer.cancel()


async def test_a_signal_is_not_taken_back(host: Host) -> None:
    drainer = Drainer(host, notice_seconds=0.0, limit_seconds=60)
    drainer.drain(None, final=True)
    await host.until("announce", "close")
    assert "signal" in drainer.undrain()
    drainer.cancel()
