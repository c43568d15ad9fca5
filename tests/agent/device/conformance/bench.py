"""What a case works with: the subject, its shared device, steps on it, and how results are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.agent.device.conformance.steps import NUM_TOP, Part, by_id, step_of
from tests.agent.device.conformance.subjects import Subject

from dragoman_agent.device.base import Device, DeviceError, LoadProgress, StepBatch, StepResult


class Bench:
    """A subject with a device that most cases share; its model is the poisoned one, whose bad token they leave alone."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.plan = subject.plan
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        if self._device is None:
            self._device = self.subject.open()
            self._device.load(self.subject.model(poisoned=True), self.plan, ignore)
        return self._device

    def close(self) -> None:
        if self._device is not None:
            self._device.close()

    @contextmanager
    def opened(self) -> Iterator[Device]:
        """A device of the case's own, with no model."""
        device = self.subject.open()
        try:
            yield device
        finally:
            device.close()

    def step(self, *parts: Part, **options: Any) -> StepBatch:
        return step_of(parts, self.plan.page_size, **{"num_logprobs": NUM_TOP, **options})

    def run(self, *parts: Part, device: Device | None = None, **options: Any) -> StepResult:
        return (device or self.device).submit(self.step(*parts, **options)).result()

    def row(self, *parts: Part, row: int = 0, **options: Any) -> npt.NDArray[np.float32]:
        """Log-probabilities of one row of a step."""
        return by_id(self.run(*parts, **options), row)

    def same(self, got: npt.NDArray[Any], wanted: npt.NDArray[Any], what: str, *, cut: bool) -> None:
        """Equal in each bit; where the work was `cut` otherwise and the backend promises no more, within its tolerance."""
        if self.subject.is_exact or not cut:
            assert np.array_equal(got, wanted), f"{what}: not the same bits, {np.abs(got - wanted).max():.2e} apart"
        else:
            worst = float(np.abs(got - wanted).max())
            assert worst <= self.subject.tolerance, f"{what}: {worst:.2e} apart, at most {self.subject.tolerance}"


def ignore(_: LoadProgress) -> None:
    """Progress that nobody looks at."""


@contextmanager
def refused(words: str = "") -> Iterator[None]:
    """The block raises DeviceError, whose message is a sentence that has one of `words`, split by |."""
    try:
        yield
    except DeviceError as error:
        message = str(error)
        assert len(message) > 20 and "\n" not in message.strip(), f"no sentence: {message!r}"
        assert any(word in message for word in words.split("|")), f"{message!r} says nothing of {words}"
    else:
        raise AssertionError("nothing was refused")
