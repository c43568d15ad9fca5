"""The tier on disk: files written and read by one thread, in order; off, with a reason, once the disk fails. Torch-free."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt

from dragoman_agent.cache.disk_store import DiskStore
from dragoman_agent.cache.tier_index import TierEntry, TierIndex

logger = logging.getLogger(__name__)

UInt8Array = npt.NDArray[np.uint8]

MAX_NUM_WRITES = 2  # under way: what is wanted back waits for them
Outcome = tuple[int, float, str]  # blocks done, seconds, what failed


class DiskTier:
    """Owns the index of the directory and its thread. All but the thread's work is called from one thread; see `poll`."""

    def __init__(self, store: DiskStore, max_bytes: int) -> None:
        """Take the directory and what it holds for this model. Raises DiskTierError when it cannot be used."""
        self.index = TierIndex(max_bytes // store.file_bytes)
        self.problem = ""
        self.bytes_written = self.bytes_read = 0
        self.seconds_written = self.seconds_read = 0.0
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-disk")
        self._jobs: deque[tuple[Future[Outcome], Callable[[Outcome], None]]] = deque()
        self._num_writes = 0
        entries = []
        for block in store.open(self.index.capacity):
            entry = self.index.reserve(block.page, block.parent)
            if entry is not None:
                self.index.commit(entry)
                entries.append((block.used, entry))
        for _, entry in sorted(entries, key=lambda one: one[0]):
            self.index.touch(entry)

    @property
    def is_busy(self) -> bool:
        """Whether the thread has work, or has done some that `poll` has not seen."""
        return bool(self._jobs)

    @property
    def can_write(self) -> bool:
        """Whether another block may be written now."""
        return not self.problem and self._num_writes < MAX_NUM_WRITES

    def write(self, entry: TierEntry, row: UInt8Array, ended: Callable[[], None]) -> None:
        """Write a reserved entry from `row`, which stays as it is until `ended`; what went to make room is removed first."""
        gone = [page.digest for page in self.index.take_evicted()]
        self._num_writes += 1
        self._submit(partial(self._write, gone, entry, row), partial(self._written, entry, row.nbytes, ended))

    def read(
        self, entries: Sequence[TierEntry], rows: Sequence[UInt8Array], ended: Callable[[int, float], None]
    ) -> None:
        """Read pinned entries into `rows`; `ended` hears how many are good from the first on, and the seconds."""
        self._submit(partial(self._read, entries, rows), partial(self._was_read, entries, ended))

    def discard(self, digest: bytes) -> None:
        """Forget a block and what continues it."""
        gone = [page.digest for page in self.index.discard(digest)]
        if gone and not self.problem:
            self._submit(partial(self._remove, gone), self._failed_if_so)

    def poll(self) -> None:
        """Take in what the thread has done."""
        while self._jobs and self._jobs[0][0].done():
            future, ended = self._jobs.popleft()
            ended(future.result())

    def close(self) -> None:
        """Wait for what is under way, and let go of the directory."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    def _submit(self, work: Callable[[], Outcome], ended: Callable[[Outcome], None]) -> None:
        self._jobs.append((self._thread.submit(work), ended))

    # On the thread. The store warns of files that are no blocks; what the disk itself refuses comes back as words.

    def _write(self, gone: Sequence[bytes], entry: TierEntry, row: UInt8Array) -> Outcome:
        begun = time.perf_counter()
        try:
            for digest in gone:
                self._store.remove(digest)
            self._store.write(entry.page, entry.parent, row)
        except OSError as error:
            return 0, 0.0, f"a block cannot be written ({error.strerror or error})"
        return 1, time.perf_counter() - begun, ""

    def _read(self, entries: Sequence[TierEntry], rows: Sequence[UInt8Array]) -> Outcome:
        begun = time.perf_counter()
        done = 0
        try:
            for entry, row in zip(entries, rows, strict=True):
                if not self._store.read(entry.page, entry.parent, row):
                    break
                done += 1
        except OSError as error:
            return done, time.perf_counter() - begun, f"a block cannot be read ({error.strerror or error})"
        return done, time.perf_counter() - begun, ""

    def _remove(self, gone: Sequence[bytes]) -> Outcome:
        try:
            for digest in gone:
                self._store.remove(digest)
        except OSError as error:
            return 0, 0.0, f"a block cannot be removed ({error.strerror or error})"
        return len(gone), 0.0, ""

    # In `poll`.

    def _written(self, entry: TierEntry, num_bytes: int, ended: Callable[[], None], outcome: Outcome) -> None:
        done, seconds, _ = outcome
        self._num_writes -= 1
        if done and not self.problem:
            self.bytes_written += num_bytes
            self.seconds_written += seconds
            self.index.commit(entry)
        else:
            self.index.abandon(entry)
        self._failed_if_so(outcome)
        ended()

    def _was_read(self, entries: Sequence[TierEntry], ended: Callable[[int, float], None], outcome: Outcome) -> None:
        done, seconds, problem = outcome
        if not problem and done < len(entries) and not entries[done].is_gone:
            self.discard(entries[done].page.digest)
        for entry in entries:
            self.index.unpin(entry)
        self.bytes_read += done * self._store.block_bytes
        self.seconds_read += seconds if done else 0.0
        self._failed_if_so(outcome)
        ended(done, seconds)

    def _failed_if_so(self, outcome: Outcome) -> None:
        if outcome[2] and not self.problem:
            self.problem = f"the disk tier of KV blocks is off until the agent starts again: {outcome[2]}"
            logger.warning("%s; blocks that are evicted are computed again", self.problem)
            self.index.clear()
            self.index.take_evicted()
