"""Log-probabilities of a prompt's own tokens, gathered over the chunks in which it is computed."""

from __future__ import annotations

import numpy as np

from dragoman_agent.device.base import Int32Array, StepResult
from dragoman_agent.engine.messages import Opened


class PromptScores:
    """Scores of one prompt: position i tells how likely token i + 1 was after the tokens up to i."""

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_positions = num_prompt - 1
        self.num_top = num_top
        self.num_done = 0  # positions scored, from the first on
        self._logprobs = np.zeros(self.num_positions, np.float32)
        self._top_ids = np.zeros((self.num_positions, num_top), np.int32)
        self._top_logprobs = np.zeros((self.num_positions, num_top), np.float32)

    @property
    def is_complete(self) -> bool:
        """Whether every position is scored."""
        return self.num_done >= self.num_positions

    def due(self, start: int, count: int) -> range:
        """Positions to score when `count` tokens from `start` on are computed; what was scored before is left out."""
        return range(max(start, self.num_done), min(start + count, self.num_positions))

    def take(self, positions: range, rows: slice, result: StepResult) -> bool:
        """Take the result's `rows` for `positions`, which follow those before. False when one is not finite."""
        values = result.score_logprobs
        assert values is not None, "the device returned no scores"
        if not np.isfinite(values[rows]).all():
            return False
        at = slice(positions.start, positions.stop)
        self._logprobs[at] = values[rows]
        if self.num_top and result.score_top_ids is not None and result.score_top_logprobs is not None:
            self._top_ids[at] = result.score_top_ids[rows, : self.num_top]
            self._top_logprobs[at] = result.score_top_logprobs[rows, : self.num_top]
        self.num_done = positions.stop
        return True

    def opened(self, request_id: str) -> Opened:
        """The message that carries them."""
        return Opened(
            request_id,
            self._logprobs.astype("<f4").tobytes(),
            self.num_top,
            self._top_ids.astype("<i4").tobytes(),
            self._top_logprobs.astype("<f4").tobytes(),
        )


def score_rows(first_row: int, start: int, positions: range) -> Int32Array:
    """Rows of a step's tokens for `positions` of a sequence whose chunk begins at `start`, in row `first_row`."""
    return np.arange(first_row + positions.start - start, first_row + positions.stop - start, dtype=np.int32)
