"""A trace of the engine: what the host does and when the device runs each step, for Perfetto.

The file is an array of Chrome's JSON trace events. Readers take it without its closing bracket, so it is whole up to the last
write whenever the process ends.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dragoman_agent.engine.core import InFlight

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20  # two files: the newest, and the one before
_WRITE_BYTES = 64 << 10
_WRITE_SECONDS = 0.5
_HOST, _DEVICE = 1, 2


class TraceError(RuntimeError):
    """The directory cannot be written to. One line: what happened, why, what to do."""


@runtime_checkable
class TimedStep(Protocol):
    """A StepHandle that knows when its step ended."""

    def ended(self) -> float:
        """`time.perf_counter` when the device was done with the step. Call it right after `result`."""


class TraceWriter:
    """Implements StepTrace. Owns the files `dragoman-engine-PID.json` and, before it, `dragoman-engine-PID.1.json`.

    When the newest is full it becomes the one before, so that the last minutes are always there: a step takes about 1 KB.
    When the disk fails, tracing ends and the engine goes on; `problem` then says why.
    """

    def __init__(self, directory: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Raises TraceError."""
        self.path = directory / f"dragoman-engine-{os.getpid()}.json"
        self.problem = ""
        self._max_file_bytes = max_file_bytes
        self._file = -1
        self._num_bytes = 0
        self._lines: list[str] = []
        self._num_pending = 0
        self._last_write = time.perf_counter()
        self._last_end = 0.0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise TraceError(
                f"--trace-dir {directory}: cannot write there ({error.strerror or error}); give a directory that this user "
                "may write to, or leave the option out"
            ) from None

    def host(self, part: str, begun: float, ended: float) -> None:
        """See HostTrace."""
        times = f'"ts":{begun * 1e6:.1f},"dur":{(ended - begun) * 1e6:.1f}'
        self._add(f'{{"pid":1,"ph":"X","tid":{_HOST},"name":"{part}",{times}}}')

    def step(self, flight: InFlight, seconds: float, waited: float, ended: float) -> None:
        """See StepTrace. Where the device does not tell when the step ended, that is when the host had its result."""
        end = flight.handle.ended() if isinstance(flight.handle, TimedStep) else ended
        # One step at a time: clocks that differ by some microseconds must not make two overlap.
        begin = max(end - seconds, self._last_end)
        self._last_end = end = max(end, begin)
        self._event(
            ph="X", tid=_DEVICE, name=f"step {flight.built.batch.step}", ts=begin * 1e6, dur=(end - begin) * 1e6,
            args={
                "step": flight.built.batch.step,
                "sequences": len(flight.built.batch.context_lens),
                "prefill_tokens": flight.num_prefill_tokens,
                "decode_tokens": flight.num_decode_tokens,
                "handed_over": flight.handed_over * 1e6,
                "waited_for": (ended - waited) * 1e6,
            },
        )  # fmt: skip
        if self._num_pending >= _WRITE_BYTES or ended - self._last_write >= _WRITE_SECONDS:
            self._write()

    def close(self) -> None:
        """Write what is left and the closing bracket."""
        self._write()
        if self._file >= 0:
            os.write(self._file, b"\n]\n")
            os.close(self._file)
            self._file = -1

    def _event(self, **fields: Any) -> None:
        self._add(json.dumps({"pid": 1, **fields}, separators=(",", ":")))

    def _add(self, line: str) -> None:
        if self._file >= 0:
            self._lines.append(line)
            self._num_pending += len(line) + 2

    def _write(self) -> None:
        """Whole events in one call: what is in the file can be read, wherever the process ends."""
        lines, self._lines, self._num_pending = self._lines, [], 0
        self._last_write = time.perf_counter()
        if self._file < 0 or not lines:
            return
        data = "".join(f",\n{line}" for line in lines).encode()
        try:
            self._num_bytes += os.write(self._file, data)
            if self._num_bytes >= self._max_file_bytes:
                os.close(self._file)
                self.path.replace(self.path.with_suffix(".1.json"))
                self._open()
        except OSError as error:
            os.close(self._file)
            self._file = -1
            self.problem = f"the trace {self.path} ends here: {error.strerror or error}"
            logger.error("%s", self.problem)

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        names = [
            ("process_name", 0, "Dragoman engine"),
            ("thread_name", _HOST, "host"),
            ("thread_name", _DEVICE, "device"),
        ]
        events = [{"ph": "M", "pid": 1, "tid": tid, "name": kind, "args": {"name": name}} for kind, tid, name in names]
        self._num_bytes = os.write(self._file, ("[\n" + ",\n".join(map(json.dumps, events))).encode())
