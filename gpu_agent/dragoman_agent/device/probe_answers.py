"""How a measuring process answers: a line of JSON a step on a stdout of its own, everything else on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

from dragoman_agent.pal.profile import Value


@contextmanager
def own_stdout() -> Iterator[TextIO]:
    """The real stdout, for answers alone; what libraries print meanwhile goes to stderr."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(real, "w", encoding="utf-8", closefd=False) as answers:
            yield answers
    finally:
        os.dup2(real, 1)
        os.close(real)


def answer(
    answers: TextIO, step: str, seconds: float, *, values: Mapping[str, Value] | None = None, error: str = ""
) -> None:
    """One step's values, or its error where there are none."""
    body: dict[str, object] = {"step": step, "seconds": round(seconds, 3)}
    if values is None:
        body["error"] = error
    else:
        body["values"] = {name: asdict(value) for name, value in values.items()}
    answers.write(json.dumps(body) + "\n")
    answers.flush()


def say(text: str) -> None:
    """A line for the log of whoever started the process."""
    print(text, file=sys.stderr, flush=True)
