"""Runs a GPU's measurement in processes of its own: a step that fails, crashes or hangs costs its own values and no others."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from dragoman_agent.pal.analysis import is_unresolved
from dragoman_agent.pal.profile import ProfileError, Value
from dragoman_agent.pal.profile_schema import check_labels, check_spread, check_value

logger = logging.getLogger(__name__)

STEP_TIMEOUT_SECONDS = 60.0  # the first step opens the device and compiles, a product may wait for torch
_MAX_STARTS = 6
_NOT_OPENED = 1  # the exit code of a process that could not start on the device
_BROKEN_CONTEXT = 3  # the exit code of a process whose failed step took the device's context with it


@dataclass(slots=True)
class ProbeRun:
    """What was measured, why the rest was not, and how long each step took."""

    values: dict[str, Value] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # by step
    seconds: dict[str, float] = field(default_factory=dict)  # by step


def run_probe(
    command: Callable[[Sequence[str]], Sequence[str]],
    steps: Sequence[str],
    *,
    step_timeout_seconds: float = STEP_TIMEOUT_SECONDS,
) -> ProbeRun:
    """Run `command(steps)` and take its answers; after a crash or a hang, again with the steps that are left.

    Raises ProfileError when the device cannot be opened at all.
    """
    run = ProbeRun()
    left = list(steps)
    for _ in range(_MAX_STARTS):
        if not left:
            return run
        process = _Process(command(left))
        answered, ended = process.follow(left, run, step_timeout_seconds)
        if process.returncode == _NOT_OPENED and not run.seconds:
            raise ProfileError(process.last_words() or ended)
        left = left[len(answered) :]
        if left and not (process.returncode == _BROKEN_CONTEXT and answered):
            run.problems[left[0]] = ended
            logger.warning("probe step %s was skipped: %s", left[0], ended)
            left = left[1:]
    for name in left:
        run.problems[name] = f"not tried: the device failed in {_MAX_STARTS} processes before"
        logger.warning("probe step %s was skipped: %s", name, run.problems[name])
    return run


class _Process:
    """One measuring process. Its answers come line by line; what it says on stderr goes to the debug log."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert self._child.stdout is not None and self._child.stderr is not None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said: deque[str] = deque(maxlen=20)
        self._threads = [
            threading.Thread(target=target, args=(stream,), daemon=True)
            for target, stream in ((self._read_answers, self._child.stdout), (self._read_log, self._child.stderr))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def returncode(self) -> int | None:
        """The exit code once it has ended."""
        return self._child.returncode

    def last_words(self) -> str:
        """The last line it wrote to stderr."""
        return self._said[-1] if self._said else ""

    def follow(self, steps: Sequence[str], run: ProbeRun, timeout_seconds: float) -> tuple[list[str], str]:
        """Take answers until it ends or is silent for `timeout_seconds`; the steps answered, and how it ended."""
        answered: list[str] = []
        try:
            while True:
                try:
                    line = self._lines.get(timeout=timeout_seconds)
                except queue.Empty:
                    return answered, f"it took over {timeout_seconds:g} s; is another process using the GPU?"
                if line is None:
                    break
                name = _take(line, run)
                if name in steps:
                    answered.append(name)
                if len(answered) == len(steps):
                    # It is ended: the driver takes back all at once what it would give piece by piece.
                    return answered, ""
            self._child.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return answered, f"its process did not end within {timeout_seconds:g} s"
        finally:
            self._end()
        return answered, f"its process ended with code {self.returncode} ({self.last_words() or 'no output'})"

    def _end(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        for thread in self._threads:
            thread.join(timeout=5)
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()

    def _read_answers(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _read_log(self, stream: IO[str]) -> None:
        for line in stream:
            text = line.rstrip()
            if text:
                self._said.append(text)
                logger.debug("probe: %s", text)


def _take(line: str, run: ProbeRun) -> str:
    """Note one answer; the step it is of, or nothing for a line that is no answer."""
    try:
        body: dict[str, Any] = json.loads(line)
        name, seconds = str(body["step"]), float(body["seconds"])
        values = {key: _value(value) for key, value in body.get("values", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        logger.warning("the measuring process wrote something else than an answer: %s", line.strip()[:200])
        return ""
    run.seconds[name] = seconds
    for key, value in values.items():
        if problem := _problem(key, value):
            run.problems[name] = problem
            logger.warning("probe step %s: %s; the value is left out", name, problem)
        else:
            run.values[key] = value
    if "error" in body:
        run.problems[name] = str(body["error"])
        logger.warning("probe step %s was skipped: %s", name, body["error"])
    else:
        logger.debug("probe step %s took %.2f s", name, seconds)
    return name


def _problem(name: str, value: Value) -> str:
    """Why a value cannot stand in a profile; 0 is no measurement either. Empty where it can."""
    try:
        check_value(name, value.value, value.unit, value.provenance)
        check_spread(name, value.spread)
        check_labels(name, value.labels, value.value)
    except ValueError as error:
        return str(error)
    return f"{name} is 0, which nothing measures: it was not resolved" if is_unresolved(value) else ""


def _value(body: dict[str, Any]) -> Value:
    value = tuple(body["value"]) if isinstance(body["value"], list) else body["value"]
    return Value(**{**body, "value": value, "labels": tuple(body["labels"])})
