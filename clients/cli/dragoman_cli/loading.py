"""Shows how far things are: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dragoman_cli.ready import human_bytes

_PHASES = {
    "open": "opening the model",
    "weights": "loading weights",
    "kv": "allocating KV blocks",
    "warmup": "warming up",
    "download": "downloading",
    "copy": "checking and storing",
    "hash": "hashing files",
    "values": "checking values",
}
# On a pipe, a phase is worth a line at its beginning, at its end, and this often between.
_LINE_SECONDS = 2.0


class Loading:
    """A `with` block in which reports become bars or lines on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Loading:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.fields[amount]}"))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def report(self, phase: str, done: int, total: int, unit: str) -> None:
        """One report; `total` 0 is unknown."""
        name = _PHASES.get(phase, phase)
        amount = _amount(done, total, unit)
        if self._bars is not None:
            if phase not in self._tasks:
                self._finish_earlier()
                self._tasks[phase] = self._bars.add_task(name, total=total or None, amount=amount, unit=unit)
            self._bars.update(self._tasks[phase], completed=done, total=total or None, amount=amount)
            return
        now = time.monotonic()
        last_time, last_done = self._last.get(phase, (float("-inf"), -1))
        finished = total > 0 and done >= total and last_done < total
        if finished or now - last_time >= _LINE_SECONDS:
            self._last[phase] = (now, done)
            self.line(f"{name}: {amount}")

    def _finish_earlier(self) -> None:
        """A phase that gave way to the next is over, although nobody said so."""
        assert self._bars is not None
        for task in self._bars.tasks:
            if task.total and task.completed < task.total:
                amount = _amount(int(task.total), int(task.total), str(task.fields["unit"]))
                self._bars.update(task.id, completed=task.total, amount=amount)

    def event(self, event: Mapping[str, Any]) -> None:
        """A "progress" event of an agent."""
        self.report(
            str(event.get("phase", "loading")),
            int(event.get("done", 0)),
            int(event.get("total", 0)),
            str(event.get("unit", "")),
        )

    def line(self, text: str) -> None:
        """A line above the bars."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{human_bytes(done)} of {human_bytes(total)}" if total else human_bytes(done)
    return f"{done} of {total} {unit}".strip() if total else f"{done} {unit}".strip()
