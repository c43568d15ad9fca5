"""How many tokens a step may have when one did not fit in the device's memory. Pure."""

from __future__ import annotations

MIN_TOKENS = 16  # a step this small is not cut further: what it holds cannot run
NUM_FITTING = 256  # steps that fit before larger ones are tried again


class MemoryLimit:
    """Half as many tokens after each step that did not fit, twice as many after 256 that did, up to the plan's."""

    def __init__(self, max_batch_tokens: int) -> None:
        self._planned = self.max_step_tokens = max_batch_tokens
        self._num_fitting = 0
        self._small_failed = False  # lately

    def failed(self, num_tokens: int) -> bool:
        """A step of so many tokens did not fit; whether another is worth a try. A small one is tried once more as it is: the
        device has released what it could."""
        self._num_fitting = 0
        if num_tokens <= MIN_TOKENS:
            is_second, self._small_failed = self._small_failed, True
            return not is_second
        self.max_step_tokens = num_tokens // 2
        return True

    def fitted(self) -> None:
        """A step fitted."""
        if self.max_step_tokens == self._planned and not self._small_failed:
            return
        self._num_fitting += 1
        if self._num_fitting >= NUM_FITTING:
            self._num_fitting, self._small_failed = 0, False
            self.max_step_tokens = min(2 * self.max_step_tokens, self._planned)
