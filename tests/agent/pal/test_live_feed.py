"""What a watcher of the live limits sees, and when."""

from __future__ import annotations

import asyncio

from dragoman_agent.pal.live import Sample
from dragoman_agent.pal.live_feed import LiveFeed


async def test_limits_come_at_once_then_at_each_event_and_interval() -> None:
    feed = LiveFeed()
    feed.publish(Sample(temperature_celsius=50, link_width=16, free_memory_bytes=7))
    watch = feed.watch(30.0)
    first = await asyncio.wait_for(anext(watch), 5)
    assert (first.temperature_celsius, first.link_width, first.free_memory_bytes, first.event) == (50, 16, 7, "")
    assert first.HasField("age") and not first.HasField("power_watts"), "what cannot be read is unset"
    feed.announce("one")
    feed.announce("two")
    events = [(await asyncio.wait_for(anext(watch), 5)).event for _ in range(2)]
    assert events == ["one", "two"]
    await watch.aclose()
    assert not feed._watchers


async def test_without_events_it_goes_by_the_interval() -> None:
    feed = LiveFeed()
    watch = feed.watch(0.01)
    assert not (await anext(watch)).HasField("age"), "there is no sample yet"
    feed.publish(Sample(power_watts=300))
    limits = await asyncio.wait_for(anext(watch), 5)
    assert limits.power_watts == 300 and limits.event == ""
    await watch.aclose()


async def test_a_watcher_that_does_not_read_holds_a_bounded_number_of_events() -> None:
    feed = LiveFeed()
    watch = feed.watch(30.0)
    await anext(watch)
    for number in range(1000):
        feed.announce(str(number))
    assert (await anext(watch)).event == str(1000 - 64)
    await watch.aclose()
