"""F19: KV events lost, overtaken, repeated, and numbered anew after a restart: the index ends up as what the agents hold.

The agents' own feeds against the controller's own index, in memory; `tests/controller/test_kv_events.py` searches for orders
that break it.
"""

from __future__ import annotations

from random import Random

from tests.controller.held import held_by
from tests.controller.test_kv_events import Wire
from tests.faults.conftest import Figures

from dragoman_controller.prefix_index import PrefixIndex

NUM_AGENTS, NUM_CHANGES = 8, 2000
FATES = ("arrives", "arrives", "arrives", "lost", "waits", "overtaken", "arrives twice")


def test_f19_the_index_ends_up_as_what_the_agents_hold(figures: Figures, num_runs: int) -> None:
    for run in range(num_runs):
        chance, index = Random(run), PrefixIndex()
        wires = [Wire(index, f"agent-{number}") for number in range(NUM_AGENTS)]
        lost = restarts = 0
        for _ in range(NUM_CHANGES):
            wire, fate = chance.choice(wires), chance.choice(FATES)
            lost += fate == "lost"
            wire.send(chance.randrange(4), chance.random() < 0.5, fate)
            if chance.random() < 0.02:
                restarts += 1
                wire.restart()
        differed = sum(held_by(index, wire.agent_id) != wire.journal.held for wire in wires)
        for wire in wires:
            wire.settle()
        differing = sum(held_by(index, wire.agent_id) != wire.journal.held for wire in wires)
        below = sum(index._holders[wire.agent_id].below != wire.journal.held_below for wire in wires)
        assert lost > NUM_CHANGES / 20 and restarts and differed, "the faults are what this is about"
        figures.add(
            "F19", f"{NUM_AGENTS}-agents-{NUM_CHANGES}", messages_lost=lost, restarts=restarts, differed_before=differed,
            differing=differing + below,
        )  # fmt: skip
        assert not differing and not below
