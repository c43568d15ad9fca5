"""One debug line at the start and one at the end of each step of a probe, so that a failed one shows where it stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("dragoman.probe")


@dataclass(slots=True)
class Step:
    """A step in progress; whoever runs it writes down how it ended."""

    outcome: str = "ok"


@contextmanager
def probe_step(name: str) -> Iterator[Step]:
    """`with probe_step("nvml") as step:` logs start, then seconds and `step.outcome`, or the error that ended it."""
    step = Step()
    logger.debug("step %s: start", name)
    start = time.perf_counter()
    try:
        yield step
    except BaseException as error:
        logger.debug(
            "step %s: failed after %.3f s: %s: %s", name, time.perf_counter() - start, type(error).__name__, error
        )
        raise
    logger.debug("step %s: end, %.3f s, %s", name, time.perf_counter() - start, step.outcome)
