"""How quick the simulator is, and how near to real agents.

    python -m benchmarks.simulate [--agents 10000] [--requests 1000000] [--cell-agents 64] [--record]
    python -m benchmarks.simulate --validate [--agents 1] [--requests 120] [--speed 40] [--max-rate 2] [--record]

The first runs requests through the real admission, placement and quotes in virtual time: requests a second of wall time, the
drawing and routing of the requests included, and a CPU second. The second plays a short mixed load to real agents on the null device (processes, with step
times) through a real controller and the Python client, and to their simulation, and compares the quartiles as a client sees
them. Agents that are slowed down say nothing of it to their controller, so with several of them placement differs from the
simulated one, and with it TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import random
import resource
import statistics
import time
from typing import Any

from benchmarks.cell import Cell
from benchmarks.record import make_record, save

from dragoman import AsyncClient
from dragoman.step_model import StepModel
from dragoman_controller.policy import Policy
from dragoman_controller.simulate.cell_run import CellSettings
from dragoman_controller.simulate.profiles import AgentProfile, capacity, unequal_fleet
from dragoman_controller.simulate.report import Figures, figures
from dragoman_controller.simulate.run import Scenario, simulate
from dragoman_controller.simulate.tally import Tally
from dragoman_controller.simulate.workload import Generator, Lengths, Workload
from dragoman_controller.steps import StepTable

PREDICTED_RATE = 8000.0
PREDICTED_ERROR = 0.15
NUM_PARTS = 4
SPREAD = 8.0


def cpu_seconds() -> float:
    """CPU seconds of this process and of those it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure_rate(options: argparse.Namespace) -> list[Any]:
    """One run; the rates are those of its quarters, by requests that are done."""
    begun, used = time.perf_counter(), cpu_seconds()
    fleet = unequal_fleet(options.agents, SPREAD, 1)
    drawn = Generator(options.requests, 1.0, num_tenants=1000, num_prefixes=1000)
    rate = options.load * capacity(fleet, *drawn.mean_tokens())
    workload = dataclasses.replace(drawn, requests_per_second=rate).generate()
    scenario = Scenario(fleet, workload, CellSettings(), options.cell_agents, options.processes)
    drawn_in = time.perf_counter() - begun
    marks = [(0, drawn_in)]

    def on_cell(tally: Tally) -> None:
        marks.append((marks[-1][0] + len(tally), time.perf_counter() - begun))

    tally = simulate(scenario, on_cell)
    seconds, used = time.perf_counter() - begun, cpu_seconds() - used
    found = figures(tally, workload.tenants, Policy())
    show(found)
    print(
        f"{options.requests:,} requests on {options.agents:,} agents: {seconds:.0f} s, {used:.0f} s of CPU, drawn in {drawn_in:.0f} s"
    )
    # The drawing is a part of the work: each quarter bears a quarter of it.
    samples = [
        count / (took + drawn_in * count / options.requests)
        for count, took in parts(marks)
    ]  # fmt: skip
    print(f"{options.requests / seconds:,.0f} requests/s, {options.requests / used:,.0f} a CPU second")
    case = (
        f"{options.agents}x{options.requests // 1_000_000}M"
        if options.requests >= 1_000_000
        else f"{options.agents}x{options.requests}"
    )
    note = (
        f"{options.processes} processes, cells of {options.cell_agents}, load {options.load:g}, {tally.max_num_running:,} streams at "
        f"once, {seconds:.0f} s in all, {used:.0f} s of CPU; load average of the machine {os.getloadavg()[1]:.1f}"
    )
    return [
        make_record(
            bench="simulate", case=case, metric=metric, unit="1/s", samples=values, predicted=predicted,
            command=f"python -m benchmarks.simulate --agents {options.agents} --requests {options.requests} "
            f"--cell-agents {options.cell_agents}",
            packages=("protobuf", "cryptography"), note=note,
        )
        for metric, values, predicted in (
            ("requests_per_second", samples, PREDICTED_RATE),
            ("requests_per_cpu_second", [options.requests / used] * 3, PREDICTED_RATE / 2),
        )
    ]  # fmt: skip


def parts(marks: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Requests and seconds of each quarter of the run, at the cells that end nearest to its edges."""
    total = marks[-1][0]
    edges = [min(marks, key=lambda mark: abs(mark[0] - total * part / NUM_PARTS)) for part in range(NUM_PARTS + 1)]
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(edges) if b[0] > a[0]]


def show(found: Figures) -> None:
    """The figures that matter here."""
    for name in (
        "requests",
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "finish_seconds",
        "quotes",
        "placement",
    ):
        print(f"{name}: {found[name]}")


# Against real agents.


def null_profile(speed: float) -> AgentProfile:
    """The null device's plan, as `--null-speed` slows it down."""
    from dragoman_agent.device.null_model import default_null_plan, open_null_model

    plan = default_null_plan(open_null_model("null"))
    model = plan.step_model
    slowed = StepModel(
        model.batch_sizes, model.context_tokens, tuple(speed * seconds for seconds in model.decode_seconds_grid),
        model.prefill_tokens_per_second / speed, model.prefill_base_seconds * speed,
    )  # fmt: skip
    return AgentProfile(
        "null", StepTable(slowed), plan.max_context_tokens, plan.max_num_seqs, plan.max_num_waiting, plan.max_batch_tokens,
        (plan.num_blocks - 1) * plan.page_size, plan.page_size,
    )  # fmt: skip


async def play(address: str, workload: Workload) -> tuple[list[float], list[float]]:
    """Sends each request at its time; TTFT and TPOT of each as the client sees them."""
    ttfts, tpots = [], []
    begun = time.monotonic()
    async with AsyncClient(address) as client:

        async def one(number: int) -> None:
            rng = random.Random(number)
            prompt = [rng.randrange(3, 250) for _ in range(workload.prompt_tokens[number])]
            await asyncio.sleep(max(workload.seconds[number] - (time.monotonic() - begun), 0.0))
            tokens = workload.output_tokens[number]
            stream = client.generate(prompt, max_output_tokens=tokens, ignore_eos=True, temperature=0.0)
            asked = time.monotonic()
            times = [time.monotonic() async for _ in stream]
            assert (await stream.result()).usage.output_tokens == tokens
            # By the client's watch: the engine counts from when it reads a request, which may be a step after it came.
            ttfts.append(times[0] - asked)
            tpots.append((times[-1] - times[0]) / (tokens - 1))

        await asyncio.gather(*(one(number) for number in range(len(workload))))
    return ttfts, tpots


def validate(options: argparse.Namespace) -> list[Any]:
    """Medians of real and simulated agents side by side, and the error of the simulated ones."""
    profile = null_profile(options.speed)
    drawn = Generator(
        options.requests, 1.0, prompt=Lengths(600.0, 0.9, 16, 6000), output=Lengths(60.0, 0.6, 8, 300), num_prefixes=0
    )
    rate = options.load * capacity([profile] * options.agents, *drawn.mean_tokens())
    workload = dataclasses.replace(drawn, requests_per_second=min(rate, options.max_rate)).generate()
    cell = Cell()
    try:
        for number in range(options.agents):
            cell.start_agent(f"agent-{number}", "--null-speed", str(options.speed))
        ttfts, tpots = asyncio.run(play(cell.controller_address, workload))
    finally:
        cell.close()
    tally = simulate(Scenario([profile] * options.agents, workload))
    records = []
    for name, real, ours in (("ttft", ttfts, tally.ttft), ("tpot", tpots, tally.tpot)):
        seen, made = statistics.quantiles(real, n=4), statistics.quantiles(ours, n=4)
        errors = [simulated / true - 1 for simulated, true in zip(made, seen, strict=True)]
        print(
            f"{name}: real quartiles {[f'{1000 * value:.1f} ms' for value in seen]}, simulated "
            f"{[f'{1000 * value:.1f} ms' for value in made]}, median off by {errors[1]:+.1%}"
        )
        records.append(
            make_record(
                bench="simulate_validation", case=f"null{options.agents}x{options.requests}", metric=f"{name}_error", unit="share",
                samples=[abs(error) for error in errors], predicted=PREDICTED_ERROR,
                command=f"python -m benchmarks.simulate --validate --agents {options.agents} --requests {options.requests} "
                f"--speed {options.speed:g}",
                packages=("grpcio", "numpy"),
                note=f"quartiles against real null-device agents; {workload.seconds[-1]:.0f} s of load",
            )
        )  # fmt: skip
    return records


def main() -> None:
    """Measures, prints, and with --record records."""
    parser = argparse.ArgumentParser(description="speed of the simulator, and its nearness to real agents")
    parser.add_argument("--agents", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--cell-agents", type=int, default=64)
    parser.add_argument("--load", type=float, default=0.7, help="share of what the fleet can do")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--validate", action="store_true", help="play a load to real agents and to their simulation")
    parser.add_argument("--speed", type=float, default=40.0, help="--null-speed of the real agents")
    parser.add_argument("--max-rate", type=float, default=2.0, help="most requests a second to the real agents")
    parser.add_argument("--record", action="store_true", help="record in results/control.json")
    options = parser.parse_args()
    options.agents = options.agents or (1 if options.validate else 10_000)
    options.requests = options.requests or (120 if options.validate else 1_000_000)
    records = validate(options) if options.validate else measure_rate(options)
    if options.record:
        save("control", records)


if __name__ == "__main__":
    main()
