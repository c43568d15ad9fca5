"""The command line run in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


Dragoman = Callable[..., Done]


def assert_error(done: Done, *parts: str, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
