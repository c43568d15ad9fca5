"""Which cell a request goes to: rendezvous hashing of model and prefix, with a second choice when the first is behind. Pure.

Rendezvous hashing (Thaler and Ravishankar, 1998): each cell's rank for a key is a hash of both, so a prefix stays where it is
when cells come and go. A prompt whose beginning nobody shares is hashed whole: two cells drawn at random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dragoman_controller.simulate.profiles import AgentProfile
from dragoman_controller.simulate.workload import NO_PREFIX, Workload

MAX_CELL_AGENTS = 256
# The first choice keeps the prefix it has in its caches until it is this much further behind than the second.
SPILL_SECONDS = 0.5


def divide(fleet: Sequence[AgentProfile], cell_agents: int = MAX_CELL_AGENTS) -> list[range]:
    """Agents of each cell, by index: as few cells as hold all, of sizes that differ by one at most."""
    num_cells = -(-len(fleet) // cell_agents)
    edges = [len(fleet) * cell // num_cells for cell in range(num_cells + 1)]
    return [range(edges[cell], edges[cell + 1]) for cell in range(num_cells)]


def rank_cells(key: str, num_cells: int) -> tuple[int, int]:
    """The two cells that rank highest for a key; the same one twice where there is only one."""
    ranked = sorted(
        range(num_cells),
        key=lambda cell: hashlib.blake2b(f"{cell} {key}".encode(), digest_size=8).digest(),
        reverse=True,
    )
    return ranked[0], ranked[min(1, num_cells - 1)]


class Router:
    """Spreads requests as a gateway does that knows the cells' speeds and what it has sent them, and nothing else."""

    def __init__(
        self, cells: Sequence[Sequence[AgentProfile]], model: str, mean_context: float, mean_cached: float
    ) -> None:
        """`mean_cached`: share of a shared prefix that is taken for cached, once it was sent to a cell."""
        self._model, self._num_cells = model, len(cells)
        self._prefill = [1.0 / sum(1.0 / one.prefill_token_seconds() for one in cell) for cell in cells]
        self._decode = [1.0 / sum(1.0 / one.decode_token_seconds(mean_context) for one in cell) for cell in cells]
        self._mean_cached = mean_cached
        self._behind_until = [0.0] * len(cells)
        self._choices: dict[str, tuple[int, int]] = {}
        self.num_spilled = 0

    def route(self, workload: Workload) -> list[list[int]]:
        """Indices of the requests of each cell, in order of time."""
        routed: list[list[int]] = [[] for _ in range(self._num_cells)]
        for index in range(len(workload)):
            routed[self._cell_of(workload, index)].append(index)
        return routed

    def _cell_of(self, workload: Workload, index: int) -> int:
        if self._num_cells == 1:
            return 0
        now, prefix = workload.seconds[index], workload.prefix[index]
        uncached = float(workload.prompt_tokens[index])
        if prefix == NO_PREFIX:
            drawn = int.from_bytes(hashlib.blake2b(f"{self._model} {index}".encode(), digest_size=8).digest(), "little")
            first, second = drawn % self._num_cells, (drawn >> 32) % (self._num_cells - 1)
            second += second >= first
        else:
            name = workload.prefixes[prefix]
            known = self._choices.get(name)
            if known is None:
                known = self._choices[name] = rank_cells(f"{self._model} {name}", self._num_cells)
            first, second = known
            uncached -= workload.prefix_tokens[index] * self._mean_cached
        until = self._behind_until
        chosen = first
        if max(until[first], now) > max(until[second], now) + SPILL_SECONDS:
            chosen = second
            self.num_spilled += 1
        work = uncached * self._prefill[chosen] + workload.output_tokens[index] * self._decode[chosen]
        until[chosen] = max(until[chosen], now) + work
        return chosen
