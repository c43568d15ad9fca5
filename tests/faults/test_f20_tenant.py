"""F20: one tenant asks for far over ten times its quota among 5,000 others, in virtual time on the controller's own code."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from tests.faults.conftest import Figures

from dragoman_controller.policy import Policy, TenantPolicy
from dragoman_controller.simulate.cell_run import CellSettings
from dragoman_controller.simulate.profiles import AgentProfile, capacity, unequal_fleet
from dragoman_controller.simulate.run import Scenario, simulate
from dragoman_controller.simulate.workload import Generator, Lengths

NUM_TENANTS = 5000
MAX_RUNNING = 8
HOG_REQUESTS = (
    2500.0  # for one each of the others: a third of all requests, in flight some 110 at once if nothing held them
)


def others_ttft_p99(
    fleet: list[AgentProfile], seed: int, load: float, hog: float, max_running: int
) -> tuple[float, int]:
    """Seconds for the others, and how many of all requests did not finish."""
    generator = Generator(
        NUM_TENANTS, 1.0, seed=seed, num_tenants=NUM_TENANTS, prompt=Lengths(200.0, 0.5, 8, 2000),
        output=Lengths(60.0, 0.5, 4, 400), num_prefixes=0, hog_factor=hog,
    )  # fmt: skip
    generator = replace(generator, requests_per_second=load * capacity(fleet, *generator.mean_tokens()))
    limits = TenantPolicy(max_running_requests=max_running)
    policy = Policy(max_queued_requests=100_000, max_queue_wait_seconds=600.0, default_tenant=limits)
    tally = simulate(Scenario(fleet, generator.generate(), CellSettings(policy, seed=seed)))
    num_unfinished = len(tally) - list(tally.end).count(1) + tally.counts["unfinished"]
    others = sorted(ttft for ttft, tenant in zip(tally.ttft, tally.tenant, strict=True) if tenant < NUM_TENANTS)
    return others[int(0.99 * len(others))], num_unfinished


def measured(seed: int, load: float, figures: Figures) -> float:
    """How many times the p99 of the others is with the tenant beside them, its quota kept."""
    fleet = unequal_fleet(16, 1.5, 1)
    alone, _ = others_ttft_p99(fleet, seed, load, 0.0, MAX_RUNNING)
    beside, num_unfinished = others_ttft_p99(fleet, seed, load, HOG_REQUESTS, MAX_RUNNING)
    without_quota, _ = others_ttft_p99(fleet, seed, load, HOG_REQUESTS, 0)
    figures.add(
        "F20", f"load-{load:g}-{NUM_TENANTS}", lost=num_unfinished, ttft_p99=beside,
        ttft_p99_ratio=beside / alone, ttft_p99_ratio_without_quota=without_quota / alone,
    )  # fmt: skip
    assert num_unfinished == 0
    assert without_quota > beside, "the quota changes nothing"
    return beside / alone


@pytest.mark.parametrize("load", [0.25, 0.4])
def test_f20_the_others_do_not_feel_it(load: float, figures: Figures, num_runs: int) -> None:
    """At a quarter of the cell's capacity. What the quota leaves the tenant is work too, and at 0.4 that shows: a figure, no bar."""
    ratios = [measured(seed, load, figures) for seed in range(1, 1 + num_runs)]
    assert load > 0.25 or statistics.median(ratios) < 1.10
