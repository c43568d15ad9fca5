"""Figures by hand."""

from __future__ import annotations

import pytest

from dragoman_controller.policy import Policy
from dragoman_controller.quote import Judgement
from dragoman_controller.simulate.report import figures, jain, spread, table, tenant_table
from dragoman_controller.simulate.streams import End, Stream
from dragoman_controller.simulate.tally import Tally


def ended(tally: Tally, tenant: int, end: End, first_at: float, now: float, tokens: int = 11) -> None:
    stream = Stream(len(tally), 1.0, tenant, 2, 100, tokens, -1, 0, ())
    stream.first_at, stream.end = first_at, end
    tally.ended(stream, now)


@pytest.fixture
def tally() -> Tally:
    made = Tally()
    ended(made, 0, End.FINISHED, 1.5, 3.5)
    ended(made, 0, End.FINISHED, 2.0, 6.0)
    ended(made, 1, End.REFUSED, -1.0, 8.0)
    made.judged([Judgement("finish", 0.2, True), Judgement("finish", 0.4, False)])
    made.regrets.extend([0.0, 0.1])
    made.counts.update({"prompt tokens": 200, "cached tokens": 50, "shared tokens": 100, "queued": 1, "fault kill": 2})
    made.queue_waits.extend([0.0, 3.0])
    return made


def test_figures_of_three_requests(tally: Tally) -> None:
    found = figures(tally, ["a", "b"], Policy())
    requests = found["requests"]
    assert (requests["total"], requests["finished"], requests["refused"]) == (3, 2, 1)
    assert found["virtual_seconds"] == 8.0 and found["output_tokens_per_second"] == 22 / 8
    assert found["time_to_first_token_seconds"] == {"mean": 0.75, "p50": 0.5, "p90": 1.0, "p99": 1.0}
    assert found["time_per_output_token_seconds"]["p50"] == 0.2
    assert found["finish_seconds"]["mean"] == 3.75
    assert found["quotes"]["finish"] == {"median_error": 0.2, "inside_p10_p90": 0.5, "judged": 2}
    assert found["placement"] == {"sampled": 2, "over_least_finish": {"mean": 0.05, "p50": 0.0, "p90": 0.1, "p99": 0.1}}
    assert found["prefix"] == {"cached_share_of_prompts": 0.25, "cached_share_of_shared": 0.5}
    assert found["queue"]["wait_seconds_of_queued"]["mean"] == 3.0
    assert found["faults"] == {"kill": 2}
    # Tenant a got 11 tokens in 2.5 s and in 5 s, tenant b nothing.
    assert found["fairness"]["jain_tokens_per_second"] == 0.5
    assert found["fairness"]["tenants"]["a"]["mean_tokens_per_second"] == pytest.approx(3.3)


def test_two_cells_are_joined_as_one(tally: Tally) -> None:
    both = Tally()
    both.merge(tally)
    both.merge(tally)
    found = figures(both, ["a", "b"], Policy())
    assert found["requests"]["total"] == 6 and found["virtual_seconds"] == 8.0
    assert found["quotes"]["finish"]["judged"] == 4 and found["faults"] == {"kill": 4}


def test_jain_is_1_for_equals_and_one_in_n_where_one_has_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([5.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.0, 0.0]) == 1.0


def test_percentiles_are_at_the_nearest_rank() -> None:
    assert spread(map(float, range(1, 101))) == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert spread([-1.0]) == {}


def test_a_table_has_a_column_a_run_and_no_row_that_nobody_has(tally: Tally) -> None:
    empty = figures(Tally(), [], Policy())
    rows = table({"ours": figures(tally, ["a", "b"], Policy()), "none": empty})
    assert rows[0] == ["", "ours", "none"]
    assert ["TTFT p50", "500 ms", "-"] in rows and ["fairness (Jain)", "0.500", "1.000"] in rows
    assert not any(row[0].startswith("quote of TTFT") for row in rows)
    assert tenant_table(figures(tally, ["", "b"], Policy()))[1][:3] == ["(none)", "2", "2"]
