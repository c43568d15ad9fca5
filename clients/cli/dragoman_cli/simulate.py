"""`dragoman simulate`: the controller's own admission, placement and quotes against simulated agents, in virtual time."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dragoman_cli.console import make_console
from dragoman_cli.failure import Failure, require_extras
from dragoman_cli.typed import refuse_typed

if TYPE_CHECKING:
    from dragoman_controller.policy import Policy
    from dragoman_controller.simulate.profiles import AgentProfile
    from dragoman_controller.simulate.workload import Generator, Workload

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_DEFAULT_AGENTS = 64
_MOST_TOKENS = 10_000_000  # of a median: more than any model's context
_LATEST_BURST_SECONDS = 1_000_000  # of virtual time, in which every agent sends its beats
# What requests are drawn from, where no trace gives them.
_DRAWN = (
    "requests", "load", "rate", "burstiness", "tenants", "tenant_skew", "hog", "prompt", "output", "prefixes", "prefix_share",
    "burst",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Variant:
    """One column of the comparison."""

    name: str
    policy: Policy
    chooser: str


@app.command()
def simulate(
    ctx: typer.Context,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="JSONL, one request a line; left out, requests are drawn from --seed."),
    ] = None,
    agents: Annotated[
        int, typer.Option("--agents", min=1, help="Made-up agents, where there is no --fleet.")
    ] = _DEFAULT_AGENTS,
    spread: Annotated[
        float, typer.Option("--spread", min=1.0, max=1000.0, help="How far apart their speeds lie, as a factor.")
    ] = 8.0,
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            "--fleet", help="NAME:COUNT agents of a card of the library (see `plan`) or an agent profile file."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="The model that the cards of --fleet are planned for.")
    ] = "qwen3-0.6b",
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests to draw.")] = 20_000,
    load: Annotated[
        float, typer.Option("--load", min=0.001, help="Their rate, as a share of what the fleet can do.")
    ] = 0.7,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Their rate a second, instead of --load.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal output, byte for byte.")] = 1,
    burstiness: Annotated[float, typer.Option("--burstiness", help="0: Poisson; 0.9: ten to one and back.")] = 0.0,
    tenants: Annotated[int, typer.Option("--tenants", min=1, help="Tenants.")] = 10,
    tenant_skew: Annotated[
        float, typer.Option("--tenant-skew", min=0.0, help="0: all alike; 1: as Zipf has it.")
    ] = 0.0,
    hog: Annotated[float, typer.Option("--hog", min=0.0, help="One tenant more, with so many times the mean.")] = 0.0,
    prompt: Annotated[
        int, typer.Option("--prompt", min=1, max=_MOST_TOKENS, help="Median tokens of a prompt, its prefix left out.")
    ] = 400,
    output: Annotated[int, typer.Option("--output", min=1, max=_MOST_TOKENS, help="Median tokens of an output.")] = 180,
    prefixes: Annotated[int, typer.Option("--prefixes", min=0, help="Beginnings that prompts share.")] = 100,
    prefix_share: Annotated[float, typer.Option("--prefix-share", help="Share of prompts that have one.")] = 0.5,
    burst: Annotated[
        list[str] | None, typer.Option("--burst", help="COUNT@SECONDS: so many requests more, all at once.")
    ] = None,
    policy: Annotated[list[Path] | None, typer.Option("--policy", help="A policy file; several are compared.")] = None,
    compare: Annotated[
        str, typer.Option("--compare", help="Ways of placement, with commas: dragoman, random, least-loaded, oracle.")
    ] = "dragoman",
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", help="kill:AGENT@SECONDS, join:AGENT@SECONDS, drain:AGENT@SECONDS or restart@SECONDS."),
    ] = None,
    cell_agents: Annotated[int, typer.Option("--cell-agents", help="Most agents of a cell.")] = 256,
    beat: Annotated[float, typer.Option("--beat", help="Seconds between an agent's beats.")] = 0.2,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Processes to spread cells over; default: one a core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run admission, placement and quotes against simulated agents in virtual time; compare policies and placements."""
    require_extras("controller", purpose="dragoman simulate")
    _refuse_without_effect(ctx, is_traced=trace is not None, has_rate=rate is not None, has_fleet=bool(fleet))
    from dragoman_controller.simulate.cell_run import CellSettings
    from dragoman_controller.simulate.faults import parse_fault
    from dragoman_controller.simulate.report import figures
    from dragoman_controller.simulate.run import Scenario
    from dragoman_controller.simulate.run import simulate as run
    from dragoman_controller.simulate.workload import Generator, Lengths

    with _told():
        variants = _variants(policy or [], compare)
        faults = tuple(parse_fault(text) for text in fault or ())
        profiles = _fleet(fleet or [], agents, spread, seed, model)
        longest = max(profile.max_context_tokens for profile in profiles)
        drawn = Generator(
            requests, 1.0, seed,
            prompt=Lengths(prompt, 0.9, 8, max(15 * prompt, 8)),
            max_prompt_tokens=longest * 3 // 4, prefix_length=Lengths(512.0, 0.6, 64, max(longest // 2, 64)),
            output=Lengths(output, 0.7, 2, min(11 * output, max(longest, 2))),
            burstiness=burstiness, num_tenants=tenants, tenant_skew=tenant_skew, hog_factor=hog,
            num_prefixes=prefixes, prefix_share=prefix_share, bursts=tuple(_burst(text) for text in burst or ()),
        )  # fmt: skip
        workload = _workload(trace, drawn, profiles, load, rate)
    found: dict[str, Any] = {}
    for variant in variants:
        settings = CellSettings(variant.policy, variant.chooser, seed, beat, faults=faults)
        scenario = Scenario(profiles, workload, settings, cell_agents, processes or os.cpu_count() or 1)
        begun = time.perf_counter()
        with _told():
            tally = run(scenario)
        seconds = time.perf_counter() - begun
        found[variant.name] = figures(tally, workload.tenants, variant.policy)
        # How quick this was differs from run to run: it is no part of the result.
        print(f"{variant.name}: {len(workload) / seconds:,.0f} requests simulated a second", file=sys.stderr)
    if as_json:
        print(json.dumps({"requests": len(workload), "agents": len(profiles), "seed": seed, "runs": found}, indent=1))
    else:
        _show(found, len(profiles), len(workload))


def _fleet(given: list[str], agents: int, spread: float, seed: int, model: str) -> list[AgentProfile]:
    from dragoman_controller.simulate.profiles import check_fleet, read_profile, unequal_fleet

    if not given:
        return unequal_fleet(agents, spread, seed)
    profiles: list[AgentProfile] = []
    for text in given:
        name, _, count = text.rpartition(":")
        if not name or not count.isdecimal() or not int(count):
            raise ValueError(f"--fleet {text!r}: write NAME:COUNT, such as rtx4090:12 or profile.json:3")
        profile = read_profile(Path(name)) if Path(name).is_file() else _card(name, model)
        profiles += [profile] * int(count)
        check_fleet(profiles)
    return profiles


def _card(name: str, model: str) -> AgentProfile:
    """An agent as it would be planned on a card of the library."""
    from dragoman_cli.planning import Request, plan_offline
    from dragoman_controller.simulate.profiles import AgentProfile
    from dragoman_controller.steps import StepTable

    plan = plan_offline(Request(name, model), "dragoman simulate").outlook.plan
    if plan is None:
        raise ValueError(f"{model} does not fit on {name}: `dragoman plan --model {model} --profile {name}` says why")
    return AgentProfile(
        name=name,
        steps=StepTable(plan.step_model),
        max_context_tokens=plan.max_context_tokens,
        max_running_requests=plan.max_num_seqs,
        max_waiting_requests=plan.max_num_waiting,
        max_batch_tokens=plan.max_batch_tokens,
        company_tokens=plan.max_company_tokens,
        kv_tokens=(plan.num_blocks - 1) * plan.page_size,
        page_tokens=plan.page_size,
    )


def _workload(
    trace: Path | None, drawn: Generator, profiles: list[AgentProfile], load: float, rate: float | None
) -> Workload:
    from dragoman_controller.simulate.profiles import capacity
    from dragoman_controller.simulate.workload import read_trace

    if trace is not None:
        return read_trace(trace)
    rate = rate or load * capacity(profiles, *drawn.mean_tokens())
    return dataclasses.replace(drawn, requests_per_second=rate).generate()


def _variants(policies: list[Path], compare: str) -> list[_Variant]:
    from dragoman_controller.policy import Policy, read_policy
    from dragoman_controller.simulate.choosers import CHOOSERS

    choosers = [name.strip() for name in compare.split(",")]
    for name in choosers:
        if name not in CHOOSERS:
            raise ValueError(f"--compare {name!r}: known are {', '.join(CHOOSERS)}")
    if len(set(choosers)) < len(choosers) or len(set(policies)) < len(policies):
        raise ValueError("--compare and --policy: name each one once")
    read = {
        path.name if len({p.name for p in policies}) == len(policies) else str(path): read_policy(path)
        for path in policies
    }
    return [
        _Variant(" ".join([chooser, *([name] if len(read) > 1 else [])]), policy, chooser)
        for name, policy in (read or {"": Policy()}).items()
        for chooser in choosers
    ]


def _burst(text: str) -> tuple[int, float]:
    count, _, seconds = text.partition("@")
    try:
        found = int(count), float(seconds)
    except ValueError:
        found = 0, 0.0
    if found[0] < 1 or not 0 <= found[1] <= _LATEST_BURST_SECONDS:
        raise ValueError(
            f"--burst {text!r}: write COUNT@SECONDS, such as 5000@10, with at most {_LATEST_BURST_SECONDS:,} seconds"
        )
    return found


def _refuse_without_effect(ctx: typer.Context, *, is_traced: bool, has_rate: bool, has_fleet: bool) -> None:
    """Raises Failure for an option beside others that leave it nothing to do."""
    if is_traced:
        refuse_typed(ctx, _DRAWN, "requests come from --trace, none are drawn")
    if has_rate:
        refuse_typed(ctx, ("load",), "--rate says how many requests come")
    if has_fleet:
        refuse_typed(ctx, ("agents", "spread"), "the agents are those of --fleet")
    else:
        refuse_typed(ctx, ("model",), "no card is planned without --fleet")


@contextmanager
def _told() -> Iterator[None]:
    """A value that cannot be used, in words."""
    try:
        yield
    except OSError as error:
        raise Failure("this cannot be simulated", f"{error.filename} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Failure(
            "this cannot be simulated", str(error), "`dragoman simulate --help` shows the options", exit_code=2
        ) from None


def _show(found: dict[str, Any], num_agents: int, num_requests: int) -> None:
    from dragoman_controller.simulate.report import table, tenant_table

    print(f"{num_requests:,} requests on {num_agents:,} simulated agents, in virtual time")
    console = make_console()
    console.print(_table(table(found)))
    if len(found) == 1:  # beside others they would be too many; --json has them all
        (run,) = found.values()
        if run["fairness"]["num_tenants"] > 1:
            console.print(_table(tenant_table(run), "tenants with the most requests"))


def _table(rows: list[list[str]], title: str = "") -> Table:
    made = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left")
    for column, name in enumerate(rows[0]):
        made.add_column(name, justify="right" if column else "left", no_wrap=True)
    for row in rows[1:]:
        made.add_row(*map(Text, row))
    return made
