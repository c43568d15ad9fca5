"""One gRPC channel an address, shared by everything that talks to it."""

from __future__ import annotations

import asyncio

import grpc

from dragoman.channel import channel_options


class Channels:
    """The channels of this process. A channel reconnects by itself; it is closed at exit or when dropped."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `address` (host:port), opened at the first call."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=channel_options())
        return channel

    def drop(self, address: str) -> None:
        """Close the channel to an agent that has left; a later `get` opens a new one."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels; their calls end with CANCELLED."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)
