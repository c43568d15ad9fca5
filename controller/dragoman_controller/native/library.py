"""The native code as Python calls it: one table of agents in memory that C++ reads, a call a request, a call a quote."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dragoman_controller.native.build import NativeUnavailable, build, cache_dir

if TYPE_CHECKING:
    from dragoman_controller.quote import Quote
    from dragoman_controller.steps import DecodeRow

_CLOSED = -1.0
BARRED = -1.0
"""In place of cached tokens, for an agent that may not be chosen."""
# As struct Lane, Request and Found of search.cpp.
_LANE = struct.Struct("<7dQ")
_REQUEST = struct.Struct("<7d")
_FOUND = struct.Struct("<3q5d")
_QUOTE = struct.Struct("<12d")
# Three estimates of three durations, each of two numbers.
_MAX_QUOTE_BYTES = 3 * (2 + 3 * (2 + 2 * 11))
_LEAST_CAPACITY = 16

logger = logging.getLogger(__name__)


class _Table(ctypes.Structure):
    _fields_ = (
        ("lanes", ctypes.c_void_p),
        ("num_agents", ctypes.c_int64),
        ("request", ctypes.c_double * 7),
        ("num_special", ctypes.c_int64),
        ("special", ctypes.c_void_p),
        ("seconds", ctypes.c_void_p),
        ("cached", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("found", ctypes.c_char * _FOUND.size),
    )


Found: TypeAlias = tuple[int, int, int, float, float, float, float, float]
"""What a search found: number of ties, the chosen agent and the fallback (-1: none) by index, and of the chosen one the
seconds of queue, prefill, step, and step by the model alone, and the cached tokens."""


class Library:
    """The functions of a compiled library. Raises NativeUnavailable where it is not the one this code is for."""

    def __init__(self, path: Path) -> None:
        try:
            handle = ctypes.PyDLL(
                str(path)
            )  # a search is shorter than handing the interpreter to another thread and back
            layout: Any = handle.dragoman_search_layout
            self.search: Any = handle.dragoman_search
            self.draw: Any = handle.dragoman_draw
            self.write_quote: Any = handle.dragoman_write_quote
            self.begin_learning: Any = handle.dragoman_begin_learning
            self.judge: Any = handle.dragoman_judge
            self.learn: Any = handle.dragoman_learn
            learnt_bytes: Any = handle.dragoman_learnt_bytes
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{path} cannot be loaded: {error}") from None
        layout.restype, layout.argtypes = ctypes.c_int64, ()
        if layout() != ctypes.sizeof(_Table) * 1000 + _LANE.size:
            raise NativeUnavailable(f"{path} lays its numbers out otherwise than this version of Dragoman")
        self.search.restype, self.search.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
        self.draw.restype, self.draw.argtypes = None, (ctypes.c_void_p, ctypes.c_double, ctypes.c_double)
        self.write_quote.restype, self.write_quote.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p)
        self.begin_learning.restype = self.judge.restype = None
        self.begin_learning.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
        self.judge.argtypes = self.learn.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        self.learn.restype = learnt_bytes.restype = ctypes.c_int64
        learnt_bytes.argtypes = ()
        self.learnt_bytes: int = learnt_bytes()


def load(environ: Mapping[str, str] = os.environ) -> Library | None:
    """The library, compiled if need be; None, said in the log, where it cannot be had: then Python searches, more slowly."""
    return _load(cache_dir(environ))


@functools.cache
def _load(cache: Path) -> Library | None:
    try:
        return Library(build(cache))
    except NativeUnavailable as error:
        logger.warning(
            "agents are searched, and quotes written, by Python code, which takes more time and does the same: %s",
            error,
        )
        return None


class QuoteWriter:
    """Writes the message of a quote."""

    def __init__(self, library: Library) -> None:
        self._write = library.write_quote
        self._numbers, self._message = bytearray(_QUOTE.size), bytearray(_MAX_QUOTE_BYTES)
        self._addresses = tuple(
            ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (self._numbers, self._message)
        )

    def write(self, quote: Quote) -> bytes:
        """A serialized LatencyQuote."""
        ttft, tpot, finish, ratios = quote
        _QUOTE.pack_into(self._numbers, 0, ttft, tpot, finish, *ratios[0], *ratios[1], *ratios[2])
        num_bytes: int = self._write(*self._addresses)
        return bytes(self._message[:num_bytes])


class SearchTable:
    """The agents of one model, by index, where C++ reads them. Owner of that memory."""

    def __init__(self, library: Library) -> None:
        self._search, self._draw = library.search, library.draw
        self._rows: list[DecodeRow | None] = []  # keeps what the lanes point at
        self._table = _Table()
        self._address = ctypes.addressof(self._table)
        self._request = memoryview(self._table).cast("B")[_Table.request.offset :]
        self._found = memoryview(self._table).cast("B")[_Table.found.offset :]
        self._special = array("d")
        self._lanes = bytearray()
        self.resize(0)

    def resize(self, num_agents: int) -> None:
        """Room for so many agents: those of lower index stay as they are, new ones are closed."""
        before, capacity = len(self._rows), max(num_agents, _LEAST_CAPACITY)
        table = self._table
        if capacity * _LANE.size > len(self._lanes):
            capacity *= 2
            lanes = bytearray(capacity * _LANE.size)
            lanes[: len(self._lanes)] = self._lanes
            self._lanes = lanes
            self._seconds, self._cached = array("d", bytes(8 * capacity)), array("d", bytes(8 * capacity))
            self._ties = array("q", bytes(8 * capacity))
            table.lanes = ctypes.addressof(ctypes.c_char.from_buffer(lanes))
            table.seconds, table.cached = self._seconds.buffer_info()[0], self._cached.buffer_info()[0]
            table.ties = self._ties.buffer_info()[0]
        table.num_agents = num_agents
        del self._rows[num_agents:]
        self._rows += [None] * (num_agents - before)
        for index in range(before, num_agents):
            self.close(index)

    def put(
        self,
        index: int,
        queue: float,
        base: float,
        per_token: float,
        others: float,
        share: float,
        pace: float,
        max_context: int,
        row: DecodeRow,
    ) -> None:
        """The terms of an agent, see candidates.Terms."""
        self._rows[index] = row
        _LANE.pack_into(
            self._lanes, index * _LANE.size, queue, base, per_token, others, share, pace, max_context, row.address
        )

    def close(self, index: int) -> None:
        """An agent that may not be chosen."""
        self._rows[index] = None
        _LANE.pack_into(self._lanes, index * _LANE.size, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, _CLOSED, 0)

    def search(
        self,
        prompt_tokens: int,
        output_tokens: int,
        mean_context: float,
        wanted_context: int,
        min_context: int,
        tie_ratio: float,
        first_token_ratio: float,
        special: list[float],
    ) -> int:
        """Number of agents that tie for the best; 0: none may be chosen. `special`: pairs of index and cached tokens."""
        table = self._table
        _REQUEST.pack_into(
            self._request, 0, prompt_tokens, output_tokens, mean_context, wanted_context, min_context, tie_ratio,
            first_token_ratio,
        )  # fmt: skip
        if special:
            self._special = array("d", special)
            table.special = self._special.buffer_info()[0]
            table.num_special = len(special) // 2
            num_ties: int = self._search(self._address)
            return num_ties
        table.num_special = 0
        found: int = self._search(self._address)
        return found

    def draw(self, first: float, second: float) -> None:
        """Chooses among ties by two numbers of [0, 1)."""
        self._draw(self._address, first, second)

    def found(self) -> Found:
        """What the last search found."""
        found: Found = _FOUND.unpack_from(self._found)
        return found
