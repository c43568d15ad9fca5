"""What a device left for after the start: when a part of it is done, and what is said of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from dragoman_agent.device.base import Device, DeviceMemoryError, PreparingDevice
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.live_requests import Clock
from dragoman_agent.engine.messages import FromEngine, Warmed

logger = logging.getLogger(__name__)

# Between two parts while requests are live: of some milliseconds each, so a few percent of the steps.
LOADED_SECONDS = 0.25


class Moment(Enum):
    """What to do about the next part now."""

    WAIT = "wait"
    DRAIN = "drain"  # launch nothing, so that the steps under way end
    PREPARE = "prepare"


def moment(*, is_idle: bool, is_stepping: bool, seconds_since: float) -> Moment:
    """`is_idle`: nobody waits for anything. `is_stepping`: steps are under way. `seconds_since` the part before ended."""
    if not is_idle and seconds_since < LOADED_SECONDS:
        return Moment.WAIT
    return Moment.DRAIN if is_stepping else Moment.PREPARE


class Preparing:
    """Owns what is left to prepare. The engine's loop calls it once a turn until nothing is left.

    A part never runs beside a step: its kernels write to the buffers that hold the newest step's tokens, which a step that runs
    ahead refers to instead of knowing them. Under steady load one step is always under way, so a moment without one would never
    come by itself: nothing is launched until the steps under way were collected.
    """

    def __init__(self, device: PreparingDevice, core: EngineCore, clock: Clock = time.monotonic) -> None:
        self._device, self._core, self._clock = device, core, clock
        self._known = dict(device.info)  # as Ready told it
        self._begun = self._last = clock()
        self._num_parts = 0
        self._work_seconds = 0.0
        self.is_idle = False  # whether the next part may follow at once

    @classmethod
    def of(cls, device: Device, core: EngineCore) -> Preparing | None:
        """None where the device left nothing."""
        return cls(device, core) if isinstance(device, PreparingDevice) and device.prepares_later else None

    def turn(self, send: Callable[[FromEngine], None], *, is_busy: bool) -> bool:
        """Do a part if this is the moment; True while more is left. `is_busy`: there is work that the core does not know of.

        Raises DeviceError.
        """
        core = self._core
        self.is_idle = not (is_busy or core.requests or core.has_output or core.is_moving)
        seconds = self._clock() - self._last
        now = moment(is_idle=self.is_idle, is_stepping=core.is_stepping, seconds_since=seconds)
        core.holds_launches = now is Moment.DRAIN
        if now is not Moment.PREPARE:
            return True
        if core.has_output and (step := core.emit()) is not None:
            send(step)  # nobody waits for the part to see tokens that are there
        begun = time.perf_counter()
        problem = ""
        try:
            is_left = self._device.prepare()
        except DeviceMemoryError as error:
            is_left, problem = False, str(error)
            logger.warning("no more is prepared for quick steps, the engine serves on: %s", problem)
        core.host_work.beside("prepare", begun)
        self._num_parts += 1
        self._work_seconds += time.perf_counter() - begun
        self._last = self._clock()
        if not is_left:
            self._tell(send, problem)
        return is_left

    def _tell(self, send: Callable[[FromEngine], None], problem: str) -> None:
        """What is otherwise than Ready said."""
        logger.debug(
            "prepared after the start: %d parts, %.2f s of work within %.1f s",
            self._num_parts, self._work_seconds, self._last - self._begun,
        )  # fmt: skip
        info: dict[str, Any] = {
            name: value for name, value in self._device.info.items() if self._known.get(name) != value
        }
        send(Warmed(info, problem))
