"""The controller's metrics: their names, their form, and that they count."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from prometheus_client import generate_latest
from tests.needs import need

from dragoman_controller.intervals import Quantiles
from dragoman_controller.metrics import ControllerMetrics
from dragoman_controller.policy import ClassTarget, Policy
from dragoman_controller.quote import Judgement, Quote
from dragoman_controller.requests import Priority


def value(metrics: ControllerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_event_is_counted(bench: Any) -> None:
    metrics = ControllerMetrics()
    metrics.ticket("queue_full")
    metrics.waited(Priority.BATCH, 0.2)
    metrics.hinted("refused")
    metrics.judged([Judgement("finish", 0.07, True), Judgement("finish", 0.5, False)])
    slow = Quote(2.0, 0.1, 9.0, (Quantiles(0.5, 1.0, 1.5),) * 3)
    metrics.quoted(Priority.BATCH, slow, Policy(targets={"batch": ClassTarget(1.0, 0.5)}))
    metrics.quoted(Priority.STANDARD, slow, Policy(targets={"batch": ClassTarget(1.0, 0.5)}))
    assert value(metrics, "dragoman_tickets_total", result="queue_full") == 1
    assert value(metrics, "dragoman_queue_seconds_sum", **{"class": "batch"}) == 0.2
    assert value(metrics, "dragoman_hints_total", outcome="refused") == 1
    assert value(metrics, "dragoman_quote_error_ratio_count", quantity="finish") == 2
    assert value(metrics, "dragoman_quotes_judged_total", quantity="finish", inside="yes") == 1
    missed = {"class": "batch", "quantity": "time_to_first_token"}
    assert value(metrics, "dragoman_targets_missed_total", **missed) == 1
    assert value(metrics, "dragoman_targets_missed_total", **{**missed, "class": "standard"}) is None


def test_gauges_follow_the_cell(bench: Any) -> None:
    metrics = ControllerMetrics()
    bench.join()
    for _ in range(8):
        bench.ask()
    metrics.sample(bench.cell)
    assert value(metrics, "dragoman_agents", state="serving") == 1
    assert value(metrics, "dragoman_requests_waiting", **{"class": "standard"}) == 2
    assert value(metrics, "dragoman_granted_requests") == 6


def test_promtool_finds_no_fault(bench: Any) -> None:
    need("promtool")
    metrics = ControllerMetrics()
    metrics.ticket("granted")
    metrics.judged([Judgement("finish", 0.07, True)])
    metrics.sample(bench.cell)
    promtool = shutil.which("promtool")
    assert promtool is not None
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(metrics.registry),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
