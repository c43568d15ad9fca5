"""Keeps a controller in step with the others of its cell: policy, cell keys and the list of controllers, through a store.

While the store does not answer everything stays as it was: requests are admitted, streams run, agents remain. Nothing that a
request waits for is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.cell import Cell, Controller
from dragoman_controller.policy import Policy, conflict
from dragoman_controller.policy_codec import parse_policy, write_policy
from dragoman_controller.state import Entry, RevisionConflict, StateStore, StoreUnavailable
from dragoman_controller.tickets import CellKey, parse_cell_keys, write_cell_keys

logger = logging.getLogger(__name__)

LEASE_SECONDS = 6
HOLD_SECONDS = 2.0
RETRY_SECONDS = 0.5
# At start the store gets this long; a controller that starts without it serves, and catches up later.
START_SECONDS = 3.0


@dataclass(slots=True)
class _Adopted:
    """What of the store is in force, by store revision; 0 is nothing yet."""

    policy: int = 0
    keys: int = 0


class Shared:
    """Owner of this controller's part in the store."""

    def __init__(
        self,
        store: StateStore,
        cell: Cell,
        controller_id: str,
        cell_name: str,
        keys_from_file: tuple[CellKey, ...] = (),
    ) -> None:
        self._store = store
        self._cell = cell
        self._me = Controller(controller_id, "")
        self._root = f"dragoman/{cell_name}/"
        self._file_keys = keys_from_file
        self._adopted = _Adopted()
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = asyncio.Event()
        self._frozen_since: float | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the store does not answer."""
        return self._frozen_since is not None

    async def start(self, address: str) -> None:
        """Joins the others under `address`. A store that does not answer is waited for shortly, then in the background."""
        self._me = replace(self._me, address=address)
        self._cell.take_controllers((self._me,))
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._stay_listed())]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._heard.wait()

    async def close(self) -> None:
        """Leaves the list."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._store.release()
        await self._store.close()

    async def update_policy(self, policy: Policy) -> Policy:
        """Puts a policy in force for all controllers; its revision must be the one it replaces.

        Raises POLICY_CONFLICT, INVALID_REQUEST, or STATE_UNAVAILABLE; then nothing has changed.
        """
        prepared = self._cell.policy.prepare(policy)
        try:
            revision = await self._store.write(self._root + "policy", write_policy(prepared), self._adopted.policy)
        except RevisionConflict:
            raise conflict(self._cell.policy.current.revision + 1, policy.revision) from None
        except StoreUnavailable as error:
            raise _unavailable("the policy stays as it is", error) from None
        if revision > self._adopted.policy:
            self._adopted.policy = revision
            self._cell.policy.adopt(prepared)
        return prepared

    async def replace_policy(self, policy: Policy) -> Policy | None:
        """As `update_policy`, whatever the revision in force; None when it says nothing new. For the policy file."""
        current = self._cell.policy.current
        wanted = replace(policy, revision=current.revision)
        return None if wanted == current else await self.update_policy(wanted)

    async def publish_keys(self, keys: tuple[CellKey, ...]) -> None:
        """Puts cell keys in force for all controllers. Raises STATE_UNAVAILABLE."""
        try:
            revision = await self._store.write(self._root + "keys", write_cell_keys(keys).encode())
        except StoreUnavailable as error:
            raise _unavailable("the cell keys stay as they are", error) from None
        if revision > self._adopted.keys:
            self._adopted.keys = revision
            self._cell.rotate_keys(keys)

    async def _follow(self) -> None:
        while True:
            try:
                async for entries in self._store.watch(self._root):
                    self._thawed()
                    await self._take(entries)
                    self._heard.set()
            except StoreUnavailable as error:
                self._froze(str(error))
            except Exception:
                logger.exception("fault while following the shared state; trying again")
            await asyncio.sleep(RETRY_SECONDS)

    async def _stay_listed(self) -> None:
        while True:
            try:
                await self._store.hold(
                    f"{self._root}controllers/{self._me.controller_id}", self._me.address.encode(), LEASE_SECONDS
                )
            except StoreUnavailable as error:
                self._froze(str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await asyncio.sleep(HOLD_SECONDS)

    async def _take(self, entries: dict[str, Entry]) -> None:
        prefix = self._root + "controllers/"
        listed = {key.removeprefix(prefix): e.value.decode() for key, e in entries.items() if key.startswith(prefix)}
        listed[self._me.controller_id] = self._me.address
        self._cell.take_controllers(tuple(Controller(*item) for item in sorted(listed.items())))
        await self._take_keys(entries.get(self._root + "keys"))
        await self._take_policy(entries.get(self._root + "policy"))

    async def _take_keys(self, entry: Entry | None) -> None:
        own = self._cell.minter.keys
        if entry is None:
            with contextlib.suppress(RevisionConflict):  # another controller was first: the watch brings its keys
                self._adopted.keys = await self._store.write(self._root + "keys", write_cell_keys(own).encode(), 0)
            return
        if entry.revision <= self._adopted.keys:
            return
        try:
            keys = parse_cell_keys(entry.value.decode(), "the store's cell keys")
        except ValueError as error:
            logger.error("the cell keys stay as they are: %s", error)
            return
        is_first, self._adopted.keys = not self._adopted.keys, entry.revision
        ids = {key.key_id for key in keys}
        if is_first and self._file_keys and self._file_keys[0].key_id not in ids:
            logger.info("the key file has a newer cell key than the store: it is put in force for all controllers")
            await self._store.write(self._root + "keys", write_cell_keys(self._file_keys).encode())
        elif keys != own:
            # Tickets under the keys of a start without the store are still on their way.
            kept = tuple(key for key in own if key.key_id not in ids) if is_first and len(self._cell.fleet) else ()
            self._cell.rotate_keys(keys + kept)

    async def _take_policy(self, entry: Entry | None) -> None:
        if entry is None:
            text = write_policy(self._cell.policy.current)
            with contextlib.suppress(RevisionConflict):
                self._adopted.policy = await self._store.write(self._root + "policy", text, 0)
            return
        if entry.revision <= self._adopted.policy:
            return
        try:
            policy = parse_policy(entry.value)
        except ValueError as error:
            logger.error("the policy stays as it is, the store's cannot be used: %s", error)
            return
        self._adopted.policy = entry.revision
        if policy != self._cell.policy.current:
            logger.info("policy revision %d is in force", policy.revision)
            self._cell.policy.adopt(policy)

    def _froze(self, why: str) -> None:
        if self._frozen_since is None:
            self._frozen_since = time.monotonic()
            logger.error("%s; controllers, keys and policy stay as they are, requests are served on", why)

    def _thawed(self) -> None:
        if self._frozen_since is not None:
            logger.info("the shared state is back after %.1f s", time.monotonic() - self._frozen_since)
            self._frozen_since = None


def _unavailable(what: str, error: StoreUnavailable) -> DragomanError:
    return DragomanError(
        error_pb2.ERROR_REASON_STATE_UNAVAILABLE, f"{error}: {what}, try again once it answers", retry_delay=2.0
    )
