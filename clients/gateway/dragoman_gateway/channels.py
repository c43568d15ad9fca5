"""One gRPC channel an address, shared by everything that talks to it."""

from __future__ import annotations

import asyncio

import grpc

from dragoman.tls import open_channel


class Channels:
    """The channels of this process. A channel reconnects by itself; it is closed at exit or when dropped."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        """Without credentials nothing is encrypted: for loopback."""
        self._credentials = credentials
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, address: str, agent_id: str = "") -> grpc.aio.Channel:
        """The channel to `address` (host:port), opened at the first call. An agent's certificate must name its id."""
        key = address, agent_id if self._credentials else ""
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = open_channel(address, self._credentials, agent_id)
        return channel

    def drop(self, address: str) -> None:
        """Close the channel to an agent that has left; a later `get` opens a new one."""
        for key in [key for key in self._channels if key[0] == address]:
            task = asyncio.ensure_future(self._channels.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels; their calls end with CANCELLED."""
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)
