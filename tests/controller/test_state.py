"""One contract for every state store: in memory, and in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.controller.authority import Authority
from tests.controller.etcd_server import EtcdServer

from dragoman_controller.etcd_store import EtcdStore
from dragoman_controller.state import Entry, MemoryStore, RevisionConflict, StateStore, StoreUnavailable

OpenStore = Callable[[], StateStore]


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(params=["memory", "etcd"])
async def open_store(request: pytest.FixtureRequest) -> AsyncIterator[OpenStore]:
    """Opens the store as one more controller would; what is in it is the same for all."""
    opened: list[StateStore] = []
    server = request.getfixturevalue("etcd") if request.param == "etcd" else None

    def open_one() -> StateStore:
        if server is not None or not opened:
            opened.append(EtcdStore([server.address]) if server is not None else MemoryStore())
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


async def next_of(watch: AsyncIterator[dict[str, Entry]]) -> dict[str, Entry]:
    return await asyncio.wait_for(anext(watch), 5)


async def test_what_is_written_is_read_by_prefix(open_store: OpenStore) -> None:
    store = open_store()
    first = await store.write("read/a", b"1")
    second = await store.write("read/b", b"2")
    await store.write("readings", b"other")
    assert await open_store().read("read/") == {"read/a": Entry(b"1", first), "read/b": Entry(b"2", second)}
    assert second > first and await store.read("nothing/") == {}


async def test_a_write_for_another_revision_changes_nothing(open_store: OpenStore) -> None:
    store = open_store()
    first = await store.write("cas/k", b"1", expected_revision=0)
    for expected in (0, first + 100):
        with pytest.raises(RevisionConflict):
            await store.write("cas/k", b"2", expected_revision=expected)
    assert (await store.read("cas/k"))["cas/k"] == Entry(b"1", first)
    second = await store.write("cas/k", b"2", expected_revision=first)
    assert (await store.read("cas/k"))["cas/k"] == Entry(b"2", second)


async def test_of_two_who_write_at_once_one_wins(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(4)]
    done = await asyncio.gather(
        *(store.write("race/k", bytes([n]), expected_revision=0) for n, store in enumerate(stores)),
        return_exceptions=True,
    )
    assert sum(isinstance(one, int) for one in done) == 1
    assert sum(isinstance(one, RevisionConflict) for one in done) == 3


async def test_a_watch_begins_with_what_is_there_and_tells_each_change(open_store: OpenStore) -> None:
    store = open_store()
    await store.write("watch/a", b"1")
    watch = store.watch("watch/")
    assert {key: entry.value for key, entry in (await next_of(watch)).items()} == {"watch/a": b"1"}
    pending = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    await open_store().write("elsewhere", b"x")
    await open_store().write("watch/b", b"2")
    while len(seen := await asyncio.wait_for(pending, 5)) < 2:  # memory tells of other keys too
        pending = asyncio.ensure_future(anext(watch))
    assert {key: entry.value for key, entry in seen.items()} == {"watch/a": b"1", "watch/b": b"2"}
    await watch.aclose()  # type: ignore[attr-defined]


async def test_what_is_held_goes_with_its_holder(open_store: OpenStore) -> None:
    holder, other = open_store(), open_store()
    await holder.hold("hold/me", b"here", 60)
    first = (await other.read("hold/"))["hold/me"]
    await holder.hold("hold/me", b"here", 60)
    assert (await other.read("hold/"))["hold/me"] == first, "a renewal is no change"
    await holder.hold("hold/me", b"moved", 60)
    assert (await other.read("hold/"))["hold/me"].value == b"moved"
    await holder.release()
    assert await other.read("hold/") == {}
    await holder.hold("hold/me", b"back", 60)
    assert (await other.read("hold/"))["hold/me"].value == b"back"


async def test_what_nobody_keeps_alive_ends(open_store: OpenStore) -> None:
    holder = open_store()
    await holder.hold("ttl/me", b"here", 1)
    for _ in range(60):
        if not await holder.read("ttl/"):
            break
        await asyncio.sleep(0.1)
    assert await holder.read("ttl/") == {}
    await holder.hold("ttl/me", b"again", 60)
    assert (await holder.read("ttl/"))["ttl/me"].value == b"again"
    await holder.release()


async def test_a_lost_etcd_is_said_and_the_next_server_is_asked(etcd: EtcdServer) -> None:
    lost = EtcdServer()
    alone, both = EtcdStore([lost.address]), EtcdStore([lost.address, etcd.address])
    try:
        for call in (alone.read("a"), alone.write("a", b""), alone.hold("a", b"", 5), anext(alone.watch("a"))):
            with pytest.raises(StoreUnavailable, match=lost.address):
                await call
        await both.write("next/k", b"1")
        assert "next/k" in await both.read("next/")
    finally:
        await alone.close()
        await both.close()
        lost.close()


async def test_etcd_under_mutual_tls(tmp_path: Path) -> None:
    authority, stranger = Authority.named("etcd"), Authority.named("stranger")
    authority.write(tmp_path / "server", "127.0.0.1", "localhost")
    files = {name: str(tmp_path / "server" / name) for name in ("certificate", "key", "ca")}
    server = EtcdServer(
        "--cert-file", files["certificate"], "--key-file", files["key"], "--trusted-ca-file", files["ca"],
        "--client-cert-auth",
    )  # fmt: skip
    certificate, key = authority.issue("controller")
    known = grpc.ssl_channel_credentials(authority.certificate, key, certificate)
    nameless = grpc.ssl_channel_credentials(authority.certificate)
    elsewhere = grpc.ssl_channel_credentials(stranger.certificate, key, certificate)
    stores = [EtcdStore([server.address], credentials) for credentials in (known, nameless, elsewhere, None)]
    try:
        server.start()
        assert await stores[0].write("tls/k", b"1") and "tls/k" in await stores[0].read("tls/")
        for store in stores[1:]:
            with pytest.raises(StoreUnavailable, match=server.address):
                await store.read("tls/")
    finally:
        for store in stores:
            await store.close()
        server.close()
