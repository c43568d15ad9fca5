"""Runs a scenario: requests are divided over cells, cells run one after the other or in several processes, tallies are joined."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from dragoman_controller.native.library import load
from dragoman_controller.simulate.cell_run import MODEL, CellRun, CellSettings
from dragoman_controller.simulate.choosers import CHOOSERS
from dragoman_controller.simulate.profiles import AgentProfile, check_fleet
from dragoman_controller.simulate.routing import MAX_CELL_AGENTS, Router, divide
from dragoman_controller.simulate.tally import Tally
from dragoman_controller.simulate.workload import Workload

# Of the placements of a run about so many are held against the oracle, which looks at every agent.
NUM_SAMPLED = 400
# Share of a shared prefix that the router takes for cached when it reckons how much it has sent to a cell.
_ROUTER_CACHED_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate. The agents are named agent-00000 and so on, in the order of the fleet."""

    fleet: Sequence[AgentProfile]
    workload: Workload
    settings: CellSettings = field(default_factory=CellSettings)
    cell_agents: int = MAX_CELL_AGENTS
    num_processes: int = 1

    def check(self) -> None:
        """Raises ValueError that names the bad value."""
        check_fleet(self.fleet)
        if not 1 <= self.cell_agents <= MAX_CELL_AGENTS:
            raise ValueError(f"a cell of {self.cell_agents} agents: it has 1 to {MAX_CELL_AGENTS}")
        if self.settings.chooser not in CHOOSERS:
            raise ValueError(f"placement {self.settings.chooser!r} is unknown, known are {', '.join(CHOOSERS)}")
        if not 0.01 <= self.settings.beat_seconds <= 2.0:
            raise ValueError(
                f"beats every {self.settings.beat_seconds:g} s: 0.01 to 2 s, for 3 s of silence are suspect"
            )
        if not 0 <= self.settings.network_seconds <= 1:
            raise ValueError(f"a network delay of {self.settings.network_seconds:g} s: 0 to 1 s")
        names = {agent_name(index) for index in range(len(self.fleet))}
        for fault in self.settings.faults:
            if fault.agent_id and fault.agent_id not in names:
                raise ValueError(
                    f"fault {fault.kind}: there is no agent {fault.agent_id!r}, they are {agent_name(0)} to "
                    f"{agent_name(len(names) - 1)}"
                )


def agent_name(index: int) -> str:
    """The id of an agent of the fleet."""
    return f"agent-{index:05d}"


@dataclass(frozen=True, slots=True)
class _Job:
    settings: CellSettings
    agents: list[tuple[str, AgentProfile]]
    workload: Workload
    name: str


def simulate(scenario: Scenario, on_cell: Callable[[Tally], None] = lambda _: None) -> Tally:
    """What was seen in all cells. The same for equal scenarios, whatever the number of processes. Raises ValueError.

    `on_cell` is told of each cell that is done, in their order.
    """
    scenario.check()
    tally = Tally()
    cells = divide(scenario.fleet, scenario.cell_agents)
    jobs = _jobs(scenario, cells, tally)
    num_processes = min(scenario.num_processes, len(cells))
    if num_processes == 1:
        for job in jobs:
            done = _run(job)
            tally.merge(done)
            on_cell(done)
        return tally
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(_run, jobs):
            tally.merge(done)
            on_cell(done)
    return tally


def _jobs(scenario: Scenario, cells: Sequence[range], tally: Tally) -> Iterator[_Job]:
    workload, fleet = scenario.workload, scenario.fleet
    prompt, output = workload.means()
    router = Router(
        [[fleet[index] for index in cell] for cell in cells], MODEL, prompt + output / 2, _ROUTER_CACHED_SHARE
    )
    routed = router.route(workload)
    tally.counts["spilled"] = router.num_spilled
    settings = replace(scenario.settings, sample_every=max(len(workload) // NUM_SAMPLED, 1))
    for number, (cell, mine) in enumerate(zip(cells, routed, strict=True)):
        part = Workload(workload.tenants, workload.prefixes)
        for index in mine:
            part.add(workload.at(index))
        yield _Job(settings, [(agent_name(index), fleet[index]) for index in cell], part, f"cell-{number}")


def _run(job: _Job) -> Tally:
    was_enabled = gc.isenabled()
    gc.disable()  # a run makes next to no cycles, and looking for them costs a tenth of it
    try:
        return CellRun(job.settings, job.agents, job.workload, range(len(job.workload)), job.name, load()).run()
    finally:
        if was_enabled:
            gc.enable()
            gc.collect()
