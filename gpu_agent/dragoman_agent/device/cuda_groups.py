"""How many short sequences share a program of decode attention: a word on the device for each of the plan's ranges of batches.

Graphs read the words, so what they say may change from one step to the next without a new graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman_agent.pal.plan import ShortGroups, groups_for


class GroupWords:
    """Owner of the words, which say one sequence a program at first."""

    def __init__(self, groups: Sequence[ShortGroups], device: torch.device) -> None:
        words = torch.ones(len(groups), dtype=torch.int32, device=device)
        self._words = {one: words[nth : nth + 1] for nth, one in enumerate(groups)}
        self._wanted = self._written = 1

    def of(self, num_seqs: int) -> Tensor | None:
        """The word, int32 [1], that a decode step of `num_seqs` reads; None where each sequence has its own programs."""
        found = groups_for(tuple(self._words), num_seqs)
        return None if found is None else self._words[found]

    def want(self, rows: int) -> None:
        """`rows` sequences a program from the next `write` on, in each range of batches at most as many as the plan has."""
        self._wanted = max(rows, 1)

    def write(self) -> None:
        """Queue what is wanted on the current stream, behind the steps under way; the host waits for nothing."""
        if self._wanted == self._written:
            return
        with torch.inference_mode():  # in which a load makes the words
            for one, word in self._words.items():
                word.fill_(min(self._wanted, one.rows))
        self._written = self._wanted
