"""The thread that looks at a device once a second: samples, counters and faults, handed over one look at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dragoman_agent.pal.counters import Counters, CountersError, Reading
from dragoman_agent.pal.live import Sample
from dragoman_agent.pal.live_source import DeviceLostError, LiveSource, SourceGoneError

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 1.0
REOPEN_SECONDS = 10.0
_SLICE_SECONDS = 0.2  # how soon a stop is noticed


@dataclass(frozen=True, slots=True)
class Look:
    """What one look brought; usually one field."""

    sample: Sample | None = None
    reading: Reading | None = None
    xids: tuple[int, ...] = ()
    gone: str = ""  # the source cannot be read: why. Said once.
    lost: str = ""  # the device is gone: how the source says it


class LiveThread:
    """Owns the source and its counters. `deliver` is called from the thread."""

    def __init__(
        self,
        source: LiveSource,
        open_counters: Callable[[], Sequence[Counters]],
        deliver: Callable[[Look], None],
        sample_seconds: float = SAMPLE_SECONDS,
        reopen_seconds: float = REOPEN_SECONDS,
    ) -> None:
        """`open_counters` is called whenever the source was opened; the first counters that answer are used."""
        self._source = source
        self._open_counters = open_counters
        self._deliver = deliver
        self._sample_seconds = sample_seconds
        self._reopen_seconds = reopen_seconds
        self._counters: list[Counters] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, patience_seconds: float = 1.0) -> None:
        """End, and wait so long for it: a burst of counters may take longer. Blocks; safe to call twice, and before start."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(patience_seconds)

    def _run(self) -> None:
        was_gone = False
        while not self._stop.is_set():
            try:
                self._source.open()
                self._counters = list(self._open_counters())
                was_gone = False
                self._watch()
            except SourceGoneError as error:
                if not was_gone:
                    self._deliver(Look(gone=str(error)))
                was_gone = True
            except DeviceLostError as error:
                self._deliver(Look(lost=str(error)))
                return
            finally:
                self._let_go()
            self._stop.wait(self._reopen_seconds)

    def _watch(self) -> None:
        """Until stopped. Raises what the source raises."""
        while not self._stop.is_set():
            due = time.monotonic() + self._sample_seconds
            sample = self._source.sample()
            self._deliver(Look(sample, self._read_counters()))
            while not self._stop.is_set() and (left := due - time.monotonic()) > 0:
                if xids := self._source.wait(min(left, _SLICE_SECONDS)):
                    self._deliver(Look(xids=tuple(xids)))

    def _read_counters(self) -> Reading | None:
        """The first reading there is. A source that cannot be read is left out from then on."""
        for counters in list(self._counters):
            try:
                reading = counters.read()
            except CountersError as error:
                logger.info("%s; the next source of counters is used, or the model", error)
                counters.close()
                self._counters.remove(counters)
                continue
            if reading is not None:
                return reading
        return None

    def _let_go(self) -> None:
        for counters in self._counters:
            counters.close()
        self._counters = []
        self._source.close()
