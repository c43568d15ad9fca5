"""What is remembered of agents by their name, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

# Four times the largest cell planned for.
MAX_NUM_AGENTS = 4096

T = TypeVar("T")


class RecentAgents(Generic[T]):
    """A value an agent id; beyond `max_num_agents` the one used longest ago is dropped."""

    def __init__(self, max_num_agents: int = MAX_NUM_AGENTS) -> None:
        self._max_num_agents = max_num_agents
        self._values: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, agent_id: str) -> T | None:
        """The value, which counts as used."""
        value = self._values.get(agent_id)
        if value is not None:
            self._values.move_to_end(agent_id)
        return value

    def put(self, agent_id: str, value: T) -> None:
        """Remember a value."""
        self._values[agent_id] = value
        self._values.move_to_end(agent_id)
        if len(self._values) > self._max_num_agents:
            self._values.popitem(last=False)
