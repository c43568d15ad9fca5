"""Whole runs: the same every time, nothing lost through kills, drains and restarts, limits that hold, and a fair share for all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dragoman_controller.native.library import load
from dragoman_controller.policy import ClassTarget, Policy, TenantPolicy
from dragoman_controller.simulate.cell_run import CellRun, CellSettings
from dragoman_controller.simulate.faults import Fault, parse_fault
from dragoman_controller.simulate.profiles import AgentProfile, capacity, standard_profile, unequal_fleet
from dragoman_controller.simulate.report import figures
from dragoman_controller.simulate.run import Scenario, agent_name, simulate
from dragoman_controller.simulate.tally import Tally
from dragoman_controller.simulate.workload import Arrival, Generator, Lengths, Workload

FLEET = unequal_fleet(8, 8.0, 1)


def drawn(num_requests: int = 300, load: float = 0.6, fleet: list[AgentProfile] = FLEET, **options: Any) -> Generator:
    made = Generator(num_requests, 1.0, **options)
    return replace(made, requests_per_second=load * capacity(fleet, *made.mean_tokens()))


def run(generator: Generator, fleet: list[AgentProfile] = FLEET, **settings: Any) -> dict[str, Any]:
    workload, policy = generator.generate(), settings.get("policy", Policy())
    return figures(simulate(Scenario(fleet, workload, CellSettings(**settings))), workload.tenants, policy)


def test_equal_seeds_give_equal_bytes_whatever_the_number_of_processes() -> None:
    workload = drawn().generate()
    scenario = Scenario(FLEET, workload, cell_agents=4)
    texts = [
        json.dumps(figures(simulate(replace(scenario, num_processes=count)), workload.tenants, Policy()))
        for count in (1, 1, 2)
    ]
    assert texts[0] == texts[1] == texts[2]
    blind = [
        simulate(replace(scenario, settings=CellSettings(chooser="random", seed=seed))).last_seconds
        for seed in (1, 2, 1)
    ]
    assert blind[0] == blind[2] != blind[1]


@pytest.mark.skipif(load() is None, reason="no C++ compiler is on PATH")
def test_a_run_without_a_compiler_gives_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = drawn(600, 0.9, num_prefixes=20).generate()
    faults = (Fault("kill", 4.0, agent_name(1)), Fault("drain", 6.0, agent_name(2)))
    scenario = Scenario(FLEET, workload, CellSettings(faults=faults))
    native = simulate(scenario)
    monkeypatch.setattr("dragoman_controller.simulate.run.load", lambda: None)
    python = simulate(scenario)
    assert json.dumps(figures(native, workload.tenants, Policy())) == json.dumps(
        figures(python, workload.tenants, Policy())
    )
    assert native.finish == python.finish and native.counts["resumes"] > 0


def test_every_request_ends_and_afterwards_nothing_is_held() -> None:
    workload = drawn().generate()
    cell = CellRun(CellSettings(), [(agent_name(index), one) for index, one in enumerate(FLEET)], workload, range(300))
    tally = cell.run()
    assert len(tally) == 300 and tally.counts["unfinished"] == 0
    assert sum(tally.output_tokens) == sum(workload.output_tokens)
    assert len(cell._controller.ledger) > 0
    for seat in cell._seats.values():
        seat.beat(cell._controller, cell.now)
        assert seat.agent.num_requests == 0
    assert len(cell._controller.ledger) == 0 and not cell._controller.admission.has_waiting


def test_what_finishes_first_is_chosen_better_than_blindly_and_prefixes_are_used() -> None:
    found = {name: run(drawn(600), chooser=name) for name in ("random", "least-loaded", "dragoman")}
    finish = {name: one["finish_seconds"]["mean"] for name, one in found.items()}
    assert finish["dragoman"] < finish["least-loaded"] < finish["random"]
    over = {name: one["placement"]["over_least_finish"]["mean"] for name, one in found.items()}
    assert over["dragoman"] < 0.5 * over["random"]
    cached = {name: one["prefix"]["cached_share_of_shared"] for name, one in found.items()}
    assert cached["dragoman"] > cached["random"]


def test_the_oracle_is_never_over_the_least_finish() -> None:
    found = run(drawn(150), chooser="oracle")
    assert found["placement"]["over_least_finish"]["p99"] == pytest.approx(0.0, abs=0.05)


def test_a_killed_agent_loses_nothing_and_comes_back() -> None:
    faults = (Fault("kill", 3.0, agent_name(1)), Fault("join", 4.0, agent_name(1)))
    found = run(drawn(load=0.8), faults=faults)
    requests = found["requests"]
    assert requests["resumes"] > 0 and found["faults"] == {"kill": 1, "join": 1}
    assert (requests["finished"], requests["lost"], requests["refused"], requests["unfinished"]) == (300, 0, 0, 0)


def test_a_resumed_stream_goes_on_where_it_was_cut() -> None:
    """A run of 400 tokens, cut in the middle: the second agent computes the prompt again, and only what is missing."""
    workload = Workload(["t"], [])
    workload.add(Arrival(0.0, 0, 2, 100, 400))
    fleet = [standard_profile()] * 2
    calm = simulate(Scenario(fleet, workload)).finish[0]
    faults = tuple(Fault("kill", calm / 2, agent_name(index)) for index in (0, 1))
    for fault in faults:
        cut = simulate(Scenario(fleet, workload, CellSettings(faults=(fault,))))
        assert cut.finish[0] < calm + 0.5
        if cut.counts["resumes"]:
            return
    pytest.fail("neither agent had it")


def test_who_waits_while_the_controller_goes_asks_the_next_one() -> None:
    policy = Policy(max_queue_wait_seconds=600.0, default_tenant=TenantPolicy(max_running_requests=2))
    found = run(drawn(60, num_tenants=1), faults=(Fault("restart", 1.0),), policy=policy)
    assert found["queue"]["share_queued"] > 0.3
    assert found["requests"]["finished"] == 60 and found["requests"]["unfinished"] == 0


def test_streams_cut_more_often_than_they_are_resumed_are_lost_and_counted() -> None:
    """Every agent dies in turn, faster than a long stream can end."""
    workload = Workload(["t"], [])
    workload.add(Arrival(0.0, 0, 2, 100, 4000))
    fleet = [standard_profile()] * 5
    faults = tuple(Fault("kill", 2.0 + 3 * turn, agent_name(index)) for turn, index in enumerate(range(5)))
    tally = simulate(Scenario(fleet, workload, CellSettings(faults=faults)))
    assert tally.counts["resumes"] <= 3
    found = figures(tally, ["t"], Policy())["requests"]
    assert found["finished"] + found["lost"] == 1 and tally.counts["fault kill"] == 5
    assert found["lost"] == 1


def test_a_drained_agent_ends_what_it_has_and_gets_no_more() -> None:
    workload = drawn().generate()
    settings = CellSettings(faults=(Fault("drain", 2.0, agent_name(2)),))
    cell = CellRun(settings, [(agent_name(index), one) for index, one in enumerate(FLEET)], workload, range(300))
    tally = cell.run()
    assert list(tally.end) == [1] * 300 and tally.counts["resumes"] == 0
    seat = cell._seats[agent_name(2)]
    assert not seat.agent.is_alive and not seat.is_member and cell._controller.fleet.get(agent_name(2)) is None


def test_5000_streams_opened_at_once_after_a_restart_are_all_served() -> None:
    """The controller goes at 2 s, for 1 s, with requests running, and as it is back 5,000 come at one instant."""
    fleet = unequal_fleet(24, 4.0, 1)
    generator = drawn(
        200,
        0.3,
        fleet,
        bursts=((5000, 3.0),),
        num_tenants=1,
        output=Lengths(20.0, 0.5, 4, 60),
        prompt=Lengths(60.0, 0.5, 8, 200),
    )
    found = run(generator, fleet, faults=(Fault("restart", 2.0),), policy=Policy(max_queue_wait_seconds=60.0))
    requests = found["requests"]
    assert (requests["finished"], requests["lost"], requests["refused"]) == (5200, 0, 0)
    assert found["faults"] == {"restart": 1} and found["queue"]["share_queued"] > 0.01


def test_a_flood_is_queued_up_to_the_limit_and_then_refused() -> None:
    policy = Policy(max_queued_requests=50, max_queue_wait_seconds=2.0)
    found = run(drawn(100, 0.5, bursts=((2500, 1.0),)), policy=policy)
    requests = found["requests"]
    assert found["queue"]["max_num_queued"] == 50
    assert requests["refused"] > 0 and requests["retries"] > 0
    assert requests["finished"] + requests["refused"] == 2600


def test_a_prompt_that_fits_no_agent_is_refused_and_a_long_output_is_cut_to_the_room() -> None:
    workload = Workload(["t"], [])
    workload.add(Arrival(0.0, 0, 2, 9000, 10))
    workload.add(Arrival(0.1, 0, 2, 8000, 5000))
    tally = simulate(Scenario(FLEET, workload))
    assert list(tally.end) == [2, 1] and list(tally.output_tokens) == [0, 192]


def test_targets_of_the_policy_decide_what_is_good() -> None:
    strict = Policy(targets={"interactive": ClassTarget(1e-6, 0.0)})
    found = run(drawn(200), policy=strict)
    share = found["classes"]["interactive"]["requests"] / 200
    assert found["good_share"] == pytest.approx(1 - share) and 0 < share < 1


def others_ttft_p99(fleet: list[AgentProfile], hog: float, max_running: int) -> float:
    generator = drawn(
        5000, 0.25, fleet, num_tenants=5000, prompt=Lengths(200.0, 0.5, 8, 2000), output=Lengths(60.0, 0.5, 4, 400),
        num_prefixes=0, hog_factor=hog,
    )  # fmt: skip
    policy = Policy(
        max_queued_requests=100_000,
        max_queue_wait_seconds=600.0,
        default_tenant=TenantPolicy(max_running_requests=max_running),
    )
    tally: Tally = simulate(Scenario(fleet, generator.generate(), CellSettings(policy)))
    assert list(tally.end).count(1) == len(tally)
    others = sorted(ttft for ttft, tenant in zip(tally.ttft, tally.tenant, strict=True) if tenant < 5000)
    assert len(others) == 5000
    return others[4950]


def test_f20_a_tenant_at_more_than_ten_times_its_quota_moves_the_p99_of_5000_others_by_less_than_a_tenth() -> None:
    """It asks for a third of all work, some 80 requests at once, and its quota is 4."""
    fleet = unequal_fleet(16, 1.5, 1)
    assert others_ttft_p99(fleet, 2500.0, 4) < 1.10 * others_ttft_p99(fleet, 0.0, 4)


@pytest.mark.parametrize("text", ["kill@3", "restart:a@3", "stop:a@3", "kill:a", "kill:a@-3", ""])
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="kill:AGENT@SECONDS"):
        parse_fault(text)


def test_faults_are_read() -> None:
    assert parse_fault("drain:host:0@2.5") == Fault("drain", 2.5, "host:0")
    assert parse_fault("restart@9") == Fault("restart", 9.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cell_agents": 257}, "1 to 256"),
        ({"settings": CellSettings(chooser="best")}, "known are dragoman"),
        ({"settings": CellSettings(beat_seconds=3.0)}, "0.01 to 2 s"),
        ({"settings": CellSettings(network_seconds=-1.0)}, "0 to 1 s"),
        ({"settings": CellSettings(faults=(Fault("kill", 1.0, "x"),))}, "agent-00000 to agent-00007"),
        ({"fleet": []}, "0 agents"),
    ],
)
def test_a_scenario_that_cannot_be_run_is_refused(change: dict[str, Any], words: str) -> None:
    workload = Workload(["t"], [])
    workload.add(Arrival(0.0, 0, 2, 10, 10))
    with pytest.raises(ValueError, match=words):
        simulate(replace(Scenario(FLEET, workload), **change))
