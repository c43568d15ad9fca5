"""The shared state in etcd, over the v3 API's stubs of aetcd.

Its client class is left aside: that one knows a single server and no TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from aetcd import rpc

from dragoman_controller.state import Entry, RevisionConflict, StoreUnavailable

CALL_SECONDS = 2.0
# A server without a quorum ends a watch instead of keeping it silently.
_HAS_LEADER = (("hasleader", "true"),)
_OPTIONS = [
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_STUBS = {"KV": rpc.KVStub, "Lease": rpc.LeaseStub, "Watch": rpc.WatchStub}


class EtcdStore:
    """Asks one server until it fails, then the next. Owner of the lease that what is held is bound to."""

    def __init__(self, endpoints: Sequence[str], credentials: grpc.ChannelCredentials | None = None) -> None:
        """`endpoints`: host:port each, of one etcd cluster."""
        self._endpoints = list(endpoints)
        self._channels = [
            grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
            for endpoint in endpoints
        ]
        self._current = 0
        self._lease = 0
        self._held: tuple[str, bytes] | None = None

    async def read(self, prefix: str) -> dict[str, Entry]:
        """See StateStore. The read is linearizable: a server cut off from the others does not answer."""
        return _entries(await self._ask("KV", "Range", _range(prefix)))

    async def write(self, key: str, value: bytes, expected_revision: int | None = None) -> int:
        """See StateStore."""
        request = rpc.TxnRequest(
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value))],
            compare=[]
            if expected_revision is None
            else [
                rpc.Compare(
                    key=key.encode(),
                    target=rpc.Compare.MOD,
                    result=rpc.Compare.EQUAL,
                    mod_revision=expected_revision,
                )
            ],
        )
        response = await self._ask("KV", "Txn", request)
        if not response.succeeded:
            raise RevisionConflict(key)
        return int(response.header.revision)

    async def hold(self, key: str, value: bytes, ttl_seconds: int) -> None:
        """See StateStore."""
        if self._lease and await self._renew() and self._held == (key, value):
            return
        if not self._lease:
            self._lease = (await self._ask("Lease", "LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_seconds))).ID
        await self._ask("KV", "Put", rpc.PutRequest(key=key.encode(), value=value, lease=self._lease))
        self._held = key, value

    async def release(self) -> None:
        """See StateStore."""
        lease, self._lease, self._held = self._lease, 0, None
        if lease:
            await self._ask("Lease", "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease))

    async def watch(self, prefix: str) -> AsyncIterator[dict[str, Entry]]:
        """See StateStore. Everything is read again after a change, so that no order of events can mislead."""
        response = await self._ask("KV", "Range", _range(prefix))
        yield _entries(response)
        call = rpc.WatchStub(self._channels[self._current]).Watch(metadata=_HAS_LEADER)
        span = _range(prefix)
        create = rpc.WatchCreateRequest(
            key=span.key, range_end=span.range_end, start_revision=response.header.revision + 1
        )
        try:
            await call.write(rpc.WatchRequest(create_request=create))
            while (event := await call.read()) is not grpc.aio.EOF and not event.canceled:
                if event.events:
                    yield await self.read(prefix)
            raise StoreUnavailable(f"etcd at {self._endpoints[self._current]} ended the watch")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StoreUnavailable(f"etcd at {self._endpoints[self._current]}: {_why(error)}") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """See StateStore."""
        for channel in self._channels:
            await channel.close()

    async def _renew(self) -> bool:
        """Keeps the lease alive; False, forgetting it, when it has run out."""
        call = rpc.LeaseStub(self._channels[self._current]).LeaseKeepAlive(timeout=CALL_SECONDS)
        try:
            await call.write(rpc.LeaseKeepAliveRequest(ID=self._lease))
            answer = await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._current = (self._current + 1) % len(self._channels)
            raise StoreUnavailable(f"etcd at {', '.join(self._endpoints)}: {_why(error)}") from None
        finally:
            call.cancel()
        if answer is grpc.aio.EOF or not answer.TTL:
            self._lease, self._held = 0, None
        return bool(self._lease)

    async def _ask(self, service: str, method: str, request: Any) -> Any:
        """The answer of the first server that gives one, the one asked last being asked first."""
        problem = ""
        for _ in self._channels:
            try:
                stub = _STUBS[service](self._channels[self._current])
                return await getattr(stub, method)(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                problem = _why(error)
                self._current = (self._current + 1) % len(self._channels)
        raise StoreUnavailable(f"etcd at {', '.join(self._endpoints)}: {problem}")


def _range(prefix: str) -> Any:
    key = prefix.encode()
    return rpc.RangeRequest(key=key, range_end=key[:-1] + bytes([key[-1] + 1]))


def _entries(response: Any) -> dict[str, Entry]:
    return {pair.key.decode(): Entry(pair.value, pair.mod_revision) for pair in response.kvs}


def _why(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return "the connection broke"
