"""KV blocks as files of a directory, one a block: written whole or not at all, checked when read. Torch-free.

A file that is damaged, cut short or of another model or format is never read as a block; it is removed, with one warning a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dragoman_agent.cache.hashing import PageHash

logger = logging.getLogger(__name__)

UInt8Array = npt.NDArray[np.uint8]

SUFFIX, UNFINISHED_SUFFIX, LOCK_NAME = ".kvblock", ".kvpart", "dragoman-kv.lock"
LOCK_SECONDS = 5.0  # an engine that is being killed still has the directory for a moment
_MAGIC = b"DRGKVB01"
_HASH_BYTES = 32
# magic, format key, digest, parent (zeros for none), number of units, bytes of the block, checksum of the block
_HEADER = struct.Struct("<8s32s32s32sIQ32s")
_CRC = struct.Struct("<I")  # of the header and the units, at the end of both
_NO_PARENT = bytes(_HASH_BYTES)


class DiskTierError(RuntimeError):
    """The directory cannot be used: what happened, why, what to do."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block found in the directory."""

    page: PageHash
    parent: bytes
    used: float  # seconds of the file system's clock


def format_key(model_digest: bytes, kv_type: str, layout: str, block_tokens: int, block_bytes: int) -> bytes:
    """Name of everything that must be equal for a block to mean the same, 32 bytes."""
    text = f"{model_digest.hex()} {kv_type} {layout} {block_tokens} {block_bytes}"
    return hashlib.sha256(text.encode()).digest()


class DiskStore:
    """The directory. Used by one thread at a time for each file; `open` first."""

    def __init__(self, folder: Path, key: bytes, block_bytes: int, max_num_units: int) -> None:
        """`key` of `format_key`; `max_num_units`: 64-token units that end in one block at most."""
        self._folder = folder
        self._key = key
        self.block_bytes = block_bytes
        self._max_num_units = max_num_units
        self._lock: int | None = None
        self.num_bad = 0  # files that were removed because they could not be read as a block of this model

    @property
    def file_bytes(self) -> int:
        """The most that one block takes."""
        return _HEADER.size + self._max_num_units * _HASH_BYTES + _CRC.size + self.block_bytes

    def open(self, max_num_blocks: int) -> list[StoredBlock]:
        """Take the directory and read what it holds: the newest used, parents before children; the rest is removed.

        Raises DiskTierError when another agent has the directory or it cannot be used.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # KV tells what prompts said
            self._take_lock()
            found = self._scan()
            kept = _whole_prefixes(found, max_num_blocks)
            names = {block.page.digest for block in kept}
            for block in found:
                if block.page.digest not in names:
                    self.remove(block.page.digest)
            self._warn_of_too_little(max_num_blocks - len(kept))
        except OSError as error:
            self.close()
            raise DiskTierError(
                f"{self._folder} cannot be used ({error.strerror or error}); give --kv-disk-dir a directory that this user "
                "can write to"
            ) from error
        return kept

    def close(self) -> None:
        """Let go of the directory; what it holds stays for the next run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, page: PageHash, parent: bytes, data: UInt8Array) -> None:
        """Store one block. Raises OSError, leaving no file, when the disk does not take it."""
        header = self._header(page, parent, data)
        unfinished = self._path(page.digest, UNFINISHED_SUFFIX)
        try:
            # The directory may be an older one that others may enter.
            with open(unfinished, "wb", buffering=0, opener=_open_private) as file:
                for part in (memoryview(header), data.data.cast("B")):
                    while part:  # a raw write may take less than it was given
                        part = part[file.write(part) :]
            unfinished.replace(self._path(page.digest))
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read(self, page: PageHash, parent: bytes, out: UInt8Array) -> bool:
        """Fill `out` [block_bytes] with a block; False where its file is gone or not this block. Raises OSError."""
        path = self._path(page.digest)
        try:
            with path.open("rb", buffering=0) as file:
                block, checksum, problem = self._read_header(file.read(self._header_bytes(len(page.units))))
                view = out.data.cast("B")
                done = 0
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
                is_longer = bool(file.read(1))
        except FileNotFoundError:
            self._warn(path, "it is gone")
            return False
        if not problem and (block is None or block.page != page or block.parent != parent):
            problem = "it is another block"
        if not problem and (done < len(view) or is_longer):
            problem = "it is of the wrong length"
        if not problem and self._checksum(out) != checksum:
            problem = "its checksum is wrong"
        if problem:
            self._warn(path, problem)
            self.remove(page.digest)
            return False
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    def remove(self, digest: bytes) -> None:
        """Delete a block's file, if there is one. Raises OSError."""
        self._path(digest).unlink(missing_ok=True)

    def _warn_of_too_little(self, num_wanted: int) -> None:
        free, wanted = shutil.disk_usage(self._folder).free, num_wanted * self.file_bytes
        if wanted > free:
            logger.warning(
                "%s: --kv-disk-bytes leaves %.0f MB to be filled and the disk has %.0f MB free: the tier ends when the disk is "
                "full; give less",
                self._folder, wanted / 1e6, free / 1e6,
            )  # fmt: skip

    def _take_lock(self) -> None:
        self._lock = os.open(self._folder / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.close()
                    raise DiskTierError(
                        f"another process keeps its KV blocks in {self._folder}; give each agent a --kv-disk-dir of its own"
                    ) from None
                time.sleep(0.05)

    def _scan(self) -> list[StoredBlock]:
        """What the headers say; contents are checked when they are read."""
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                path = Path(file.path)
                if file.name.endswith(UNFINISHED_SUFFIX):
                    path.unlink(missing_ok=True)
                elif file.name.endswith(SUFFIX):
                    block, problem = self._look_at(path)
                    if block is None:
                        self._warn(path, problem)
                        path.unlink(missing_ok=True)
                    else:
                        found.append(block)
        return found

    def _look_at(self, path: Path) -> tuple[StoredBlock | None, str]:
        try:
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                block, _, problem = self._read_header(file.read(self._header_bytes(self._max_num_units)))
        except OSError as error:
            return None, f"it cannot be read ({error.strerror or error})"
        if block is None:
            return None, problem
        if path.name != block.page.digest.hex() + SUFFIX:
            return None, "its name is not that of the block in it"
        if status.st_size != self._header_bytes(len(block.page.units)) + self.block_bytes:
            return None, "it is of the wrong length"
        return StoredBlock(block.page, block.parent, status.st_mtime), ""

    def _header_bytes(self, num_units: int) -> int:
        return _HEADER.size + num_units * _HASH_BYTES + _CRC.size

    def _header(self, page: PageHash, parent: bytes, data: UInt8Array) -> bytes:
        head = _HEADER.pack(
            _MAGIC, self._key, page.digest, parent or _NO_PARENT, len(page.units), data.nbytes, self._checksum(data)
        ) + b"".join(page.units)  # fmt: skip
        return head + _CRC.pack(zlib.crc32(head))

    def _read_header(self, data: bytes | None) -> tuple[StoredBlock | None, bytes, str]:
        """The block, its checksum, and what is wrong where there is no block."""
        if data is None or len(data) < self._header_bytes(0):
            return None, b"", "it is cut short"
        magic, key, digest, parent, num_units, num_bytes, checksum = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            return None, b"", "it is not a block of this version"
        if key != self._key:
            return None, b"", "it is of another model or KV format"
        end = self._header_bytes(num_units) - _CRC.size
        if num_units > self._max_num_units or num_bytes != self.block_bytes or len(data) < end + _CRC.size:
            return None, b"", "its header is damaged"
        if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
            return None, b"", "its header is damaged"
        units = tuple(data[at : at + _HASH_BYTES] for at in range(_HEADER.size, end, _HASH_BYTES))
        return StoredBlock(PageHash(digest, units), b"" if parent == _NO_PARENT else parent, 0.0), checksum, ""

    def _checksum(self, data: UInt8Array) -> bytes:
        """Keyed, so that a block of another model never passes."""
        return hashlib.blake2b(data.data, digest_size=32, key=self._key).digest()

    def _warn(self, path: Path, problem: str) -> None:
        """Once a run; the others at debug."""
        level = logging.DEBUG if self.num_bad else logging.WARNING
        self.num_bad += 1
        logger.log(
            level,
            "KV block %s is not used: %s; its prefix is computed again (further ones are told at --log-level debug)",
            path,
            problem,
        )

    def _path(self, digest: bytes, suffix: str = SUFFIX) -> Path:
        return self._folder / (digest.hex() + suffix)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _whole_prefixes(found: list[StoredBlock], max_num_blocks: int) -> list[StoredBlock]:
    """Those whose parents are all there, parents first, the newest used where there is no room for all."""
    by_digest = {block.page.digest: block for block in found}
    kept: dict[bytes, StoredBlock] = {}
    unusable: set[bytes] = set()
    for newest in sorted(found, key=lambda block: block.used, reverse=True):
        chain: dict[bytes, StoredBlock] = {}  # a block and those before it, up to one that is kept
        digest = newest.page.digest
        while digest and digest not in kept and digest in by_digest and digest not in unusable and digest not in chain:
            chain[digest] = by_digest[digest]
            digest = by_digest[digest].parent
        if digest and digest not in kept:
            unusable.update(chain)
        elif len(kept) + len(chain) <= max_num_blocks:
            kept.update(reversed(chain.items()))
    return list(kept.values())
