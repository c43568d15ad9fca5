"""When an engine that does not step is given up: only time that its agent looked on counts."""

from __future__ import annotations

GIVEN_UP_SECONDS = 60.0  # a driver call that has not returned by then never will: a supervisor can start the agent anew
_MAX_GAP_SECONDS = 1.0  # between two looks; what is over it was the agent's own standstill


class HangWatch:
    """Owns how long no step was seen to end. Who freezes a container freezes agent and engine: neither hangs when they go on."""

    def __init__(self) -> None:
        self._last_step = 0.0
        self._looked = 0.0
        self._seconds = 0.0

    def is_hung(self, last_step: float, now: float) -> bool:
        """Look at when the last step ended, by the clock of `now`, in seconds. Call it a few times a second."""
        if last_step != self._last_step:
            self._last_step, self._seconds = last_step, 0.0
        else:
            self._seconds += min(now - self._looked, _MAX_GAP_SECONDS)
        self._looked = now
        return self._seconds >= GIVEN_UP_SECONDS
