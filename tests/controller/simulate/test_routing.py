"""Cells: of at most 256 agents, a prefix stays in one, and the second choice takes what the first is behind with."""

from __future__ import annotations

from collections import Counter

import pytest

from dragoman_controller.simulate.profiles import standard_profile, unequal_fleet
from dragoman_controller.simulate.routing import Router, divide, rank_cells
from dragoman_controller.simulate.workload import Arrival, Generator, Workload


@pytest.mark.parametrize(("num_agents", "num_cells"), [(1, 1), (256, 1), (257, 2), (10_000, 40)])
def test_cells_hold_every_agent_once_and_at_most_256(num_agents: int, num_cells: int) -> None:
    cells = divide([standard_profile()] * num_agents)
    assert len(cells) == num_cells and max(map(len, cells)) <= 256
    assert [index for cell in cells for index in cell] == list(range(num_agents))


def test_a_new_cell_takes_its_share_of_keys_and_moves_no_other() -> None:
    keys = [f"model prefix-{number}" for number in range(600)]
    before = [rank_cells(key, 5)[0] for key in keys]
    after = [rank_cells(key, 6)[0] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {5}
    assert len(moved) / len(keys) == pytest.approx(1 / 6, rel=0.3)
    assert all(first != second for first, second in (rank_cells(key, 5) for key in keys))


def workload(count: int, gap_seconds: float, prefix: int = 0) -> Workload:
    made = Workload(["t"], ["hot", "cold"])
    for number in range(count):
        made.add(Arrival(number * gap_seconds, 0, 2, 1000, 200, prefix, 512))
    return made


def test_a_prefix_keeps_its_cell_until_that_is_behind_and_then_spills_to_one_other() -> None:
    cells = [[standard_profile()] * 2] * 6
    calm, flood = Router(cells, "m", 1000.0, 0.7), Router(cells, "m", 1000.0, 0.7)
    assert [len(one) for one in calm.route(workload(50, 10.0)) if one] == [50]
    spread = [len(one) for one in flood.route(workload(2000, 0.001)) if one]
    assert len(spread) == 2 and min(spread) > 900
    assert (calm.num_spilled, flood.num_spilled) == (0, flood.num_spilled) and flood.num_spilled > 0


def test_prompts_without_a_shared_beginning_are_spread_by_speed() -> None:
    fleet = unequal_fleet(64, 8.0, 1)
    cells = [[fleet[index] for index in cell] for cell in divide(fleet, 16)]
    drawn = Generator(8000, 8000.0, num_prefixes=0).generate()
    counts = Counter({cell: len(mine) for cell, mine in enumerate(Router(cells, "m", 1000.0, 0.7).route(drawn))})
    assert sum(counts.values()) == 8000 and min(counts.values()) > 0.5 * max(counts.values())
