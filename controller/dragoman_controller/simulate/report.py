"""Figures of a run from its tally, as plain values and as text. Pure; equal tallies give equal bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from dragoman_controller.policy import ClassTarget, Policy
from dragoman_controller.requests import Priority
from dragoman_controller.simulate.streams import End
from dragoman_controller.simulate.tally import Tally

NUM_TENANTS_SHOWN = 10
_PERCENTS = (50, 90, 99)
_NO_TARGET = ClassTarget()

Figures = dict[str, Any]


def figures(tally: Tally, tenants: Sequence[str], policy: Policy) -> Figures:
    """All figures; seconds, tokens and shares, to six digits. `tenants`: their names, by number."""
    counts, ends = tally.counts, list(tally.end)
    seconds = max(tally.last_seconds, 1e-9)
    num_good = _num_good(tally, policy)
    num_finished = ends.count(End.FINISHED)
    found: Figures = {
        "requests": {
            "total": len(ends) + counts["unfinished"],
            "finished": num_finished,
            "refused": ends.count(End.REFUSED),
            "lost": ends.count(End.LOST),
            "unfinished": counts["unfinished"],
            "retries": counts["retries"],
            "resumes": counts["resumes"],
            "refused_by_agents": counts["refused by agent"],
            "preemptions": counts["preemptions"],
            "spilled_to_second_cell": counts["spilled"],
        },
        "virtual_seconds": seconds,
        "requests_per_second": num_finished / seconds,
        "output_tokens_per_second": sum(tally.output_tokens) / seconds,
        "goodput_requests_per_second": num_good / seconds,
        "good_share": num_good / max(len(ends) + counts["unfinished"], 1),
        "max_num_running": tally.max_num_running,
        "time_to_first_token_seconds": spread(tally.ttft),
        "time_per_output_token_seconds": spread(tally.tpot),
        "finish_seconds": spread(tally.finish),
        "classes": _classes(tally),
        "queue": _queue(tally),
        "fairness": _fairness(tally, tenants),
        "quotes": {
            quantity: {
                "median_error": _percentile(sorted(errors), 50),
                "inside_p10_p90": tally.quotes_inside[quantity] / len(errors),
                "judged": len(errors),
            }
            for quantity, errors in sorted(tally.quote_errors.items())
        },
        "placement": {"sampled": len(tally.regrets), "over_least_finish": spread(tally.regrets)},
        "prefix": {
            "cached_share_of_prompts": counts["cached tokens"] / max(counts["prompt tokens"], 1),
            "cached_share_of_shared": counts["cached tokens"] / max(counts["shared tokens"], 1),
        },
        "faults": {key[6:]: count for key, count in sorted(counts.items()) if key.startswith("fault ")},
    }
    rounded: Figures = _rounded(found)
    return rounded


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean and percentiles of the values that are there (not below 0)."""
    ordered = sorted(value for value in values if value >= 0.0)
    if not ordered:
        return {}
    return {"mean": sum(ordered) / len(ordered), **{f"p{p}": _percentile(ordered, p) for p in _PERCENTS}}


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The value at the nearest rank."""
    return ordered[min(max(-(-len(ordered) * percent // 100) - 1, 0), len(ordered) - 1)]


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness (1984): 1 where all are equal, 1/n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _num_good(tally: Tally, policy: Policy) -> int:
    """Finished requests that met the targets of their class; where the policy has none, every finished one did."""
    targets = {int(priority): policy.targets.get(priority.label, _NO_TARGET) for priority in Priority}
    good = 0
    for priority, end, ttft, tpot in zip(tally.priority, tally.end, tally.ttft, tally.tpot, strict=True):
        target = targets[priority]
        most_ttft, most_tpot = target.time_to_first_token_seconds, target.time_per_output_token_seconds
        good += end == 1 and (not most_ttft or ttft <= most_ttft) and (not most_tpot or tpot <= most_tpot)
    return good


def _classes(tally: Tally) -> Figures:
    found = {}
    for priority in Priority:
        mine = [one == priority for one in tally.priority]
        if any(mine):
            found[priority.label] = {
                "requests": sum(mine),
                "time_to_first_token_seconds": spread(compress(tally.ttft, mine)),
                "finish_seconds": spread(compress(tally.finish, mine)),
            }
    return found


def _queue(tally: Tally) -> Figures:
    waited = [seconds for seconds in tally.queue_waits if seconds > 0.0]
    return {
        "share_queued": tally.counts["queued"] / max(len(tally), 1),
        "max_num_queued": tally.max_num_queued,
        "wait_seconds_of_queued": spread(waited),
    }


def _fairness(tally: Tally, tenants: Sequence[str]) -> Figures:
    """Jain's index of the mean tokens a second that the requests of each tenant got; a refused one got 0."""
    speeds: defaultdict[int, float] = defaultdict(float)
    num: defaultdict[int, int] = defaultdict(int)
    ended: defaultdict[int, int] = defaultdict(int)
    ttfts: defaultdict[int, list[float]] = defaultdict(list)
    for tenant, tokens, ttft, finish in zip(tally.tenant, tally.output_tokens, tally.ttft, tally.finish, strict=True):
        num[tenant] += 1
        if finish > 0.0:
            speeds[tenant] += tokens / finish
            ended[tenant] += 1
        if ttft >= 0.0:
            ttfts[tenant].append(ttft)
    most = sorted(num, key=lambda tenant: (-num[tenant], tenant))[:NUM_TENANTS_SHOWN]
    return {
        "num_tenants": len(num),
        "jain_tokens_per_second": jain([speeds[tenant] / num[tenant] for tenant in sorted(num)]),
        "tenants": {
            tenants[tenant]: {
                "requests": num[tenant],
                "finished": ended[tenant],
                "mean_tokens_per_second": speeds[tenant] / num[tenant],
                "time_to_first_token_seconds": spread(ttfts[tenant]),
            }
            for tenant in most
        },
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


# As text.

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("requests finished", ("requests", "finished"), "count"),
    ("  refused", ("requests", "refused"), "count"),
    ("  lost", ("requests", "lost"), "count"),
    ("  unfinished", ("requests", "unfinished"), "count"),
    ("  resumes", ("requests", "resumes"), "count"),
    ("  refused by an agent", ("requests", "refused_by_agents"), "count"),
    ("  preempted", ("requests", "preemptions"), "count"),
    ("most at once", ("max_num_running",), "count"),
    ("virtual time", ("virtual_seconds",), "s"),
    ("throughput", ("output_tokens_per_second",), "tokens/s"),
    ("goodput", ("goodput_requests_per_second",), "requests/s"),
    ("  share within targets", ("good_share",), "share"),
    ("TTFT p50", ("time_to_first_token_seconds", "p50"), "s"),
    ("TTFT p99", ("time_to_first_token_seconds", "p99"), "s"),
    ("TPOT p50", ("time_per_output_token_seconds", "p50"), "s"),
    ("TPOT p99", ("time_per_output_token_seconds", "p99"), "s"),
    ("finish mean", ("finish_seconds", "mean"), "s"),
    ("finish p50", ("finish_seconds", "p50"), "s"),
    ("finish p99", ("finish_seconds", "p99"), "s"),
    ("queued at the controller", ("queue", "share_queued"), "share"),
    ("  wait p99 of these", ("queue", "wait_seconds_of_queued", "p99"), "s"),
    ("fairness (Jain)", ("fairness", "jain_tokens_per_second"), "number"),
    ("quote of finish: median error", ("quotes", "finish", "median_error"), "share"),
    ("  inside p10-p90", ("quotes", "finish", "inside_p10_p90"), "share"),
    ("quote of TTFT: median error", ("quotes", "time_to_first_token", "median_error"), "share"),
    ("  inside p10-p90", ("quotes", "time_to_first_token", "inside_p10_p90"), "share"),
    ("over the least finish, p50", ("placement", "over_least_finish", "p50"), "share"),
    ("  mean", ("placement", "over_least_finish", "mean"), "share"),
    ("prompt tokens from cache", ("prefix", "cached_share_of_prompts"), "share"),
    ("  of shared prefixes", ("prefix", "cached_share_of_shared"), "share"),
)


def table(runs: Mapping[str, Figures]) -> list[list[str]]:
    """A row a figure and a column a run, with a header row; figures that no run has are left out."""
    rows = [["", *runs]]
    for name, path, unit in _ROWS:
        values = [_at(run, path) for run in runs.values()]
        if any(value is not None for value in values):
            rows.append([name, *(_text(value, unit) for value in values)])
    return rows


def tenant_table(run: Figures) -> list[list[str]]:
    """The tenants with the most requests."""
    rows = [["tenant", "requests", "finished", "tokens/s", "TTFT p50", "TTFT p99"]]
    for name, one in run["fairness"]["tenants"].items():
        ttft = one["time_to_first_token_seconds"]
        rows.append(
            [
                name or "(none)", f"{one['requests']:,}", f"{one['finished']:,}", f"{one['mean_tokens_per_second']:.3g}",
                _text(ttft.get("p50"), "s"), _text(ttft.get("p99"), "s"),
            ]
        )  # fmt: skip
    return rows


def _at(run: Figures, path: Sequence[str]) -> Any:
    value: Any = run
    for key in path:
        if key not in value:
            return None
        value = value[key]
    return value


def _text(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "count":
        return f"{value:,}"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "number":
        return f"{value:.3f}"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value:,.0f} {unit}"
