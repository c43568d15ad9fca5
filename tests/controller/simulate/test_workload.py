"""Arrivals: equal for equal seeds, of the shape that was asked for, and a trace that says which line is bad."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman_controller.simulate.workload import Generator, Lengths, Workload, prefix_units, read_trace

DRAWN = Generator(4000, 100.0, num_tenants=5)


def columns(workload: Workload) -> list[object]:
    return [workload.at(index) for index in range(len(workload))]


def test_equal_seeds_give_equal_requests_and_others_others() -> None:
    assert columns(DRAWN.generate()) == columns(DRAWN.generate())
    assert columns(DRAWN.generate()) != columns(replace(DRAWN, seed=2).generate())


def test_rate_lengths_and_prefixes_are_as_asked_for() -> None:
    workload = DRAWN.generate()
    assert len(workload) / workload.seconds[-1] == pytest.approx(100.0, rel=0.1)
    assert statistics.median(workload.output_tokens) == pytest.approx(180, rel=0.1)
    assert sum(one >= 0 for one in workload.prefix) / len(workload) == pytest.approx(0.5, rel=0.1)
    assert max(workload.prompt_tokens) <= DRAWN.max_prompt_tokens
    assert all(a <= b for a, b in zip(workload.prefix_tokens, workload.prompt_tokens, strict=True))
    assert workload.means() == pytest.approx(DRAWN.mean_tokens(), rel=0.15)


def test_bursts_come_closer_together() -> None:
    def variation(workload: Workload) -> float:
        counts = Counter(int(seconds / 5) for seconds in workload.seconds)
        return statistics.pstdev(counts.values()) / statistics.mean(counts.values())

    bursty = replace(DRAWN, burstiness=0.9, burst_seconds=3.0)
    assert variation(bursty.generate()) > 3 * variation(DRAWN.generate())


def test_tenants_are_skewed_and_a_hog_leaves_the_others_as_they_are() -> None:
    counts = Counter(replace(DRAWN, tenant_skew=1.0).generate().tenant)
    assert counts[0] > 2 * counts[2] > 2 * counts[4] * 0.9
    assert set(Counter(DRAWN.generate().tenant)) == set(range(5))
    hogged = replace(DRAWN, hog_factor=10.0).generate()
    others = [hogged.at(index) for index in range(len(hogged)) if hogged.tenant[index] < 5]
    assert others == columns(DRAWN.generate())
    assert len(hogged) - len(others) == 10 * 4000 / 5


def test_a_burst_comes_at_one_instant() -> None:
    workload = replace(DRAWN, bursts=((50, 7.5),)).generate()
    assert list(workload.seconds).count(7.5) == 50 and len(workload) == 4050


def test_the_units_of_a_shorter_prefix_begin_those_of_a_longer_one() -> None:
    assert prefix_units("p", 130) == prefix_units("p", 640)[:2]
    assert prefix_units("p", 128) != prefix_units("q", 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_requests": 0}, "num_requests is 0"),
        ({"requests_per_second": 0.0}, "must be over 0"),
        ({"burstiness": 1.0}, "burstiness is 1.0"),
        ({"prefix_share": 1.5}, "prefix_share is 1.5"),
        ({"num_tenants": 0}, "at least one tenant"),
        ({"max_prompt_tokens": 64}, "over the longest prefix"),
        ({"num_tenants": 10**12}, "at most 1000000 tenants"),
        ({"num_prefixes": 10**9}, "at most 1000000 tenants and as many prefixes"),
        ({"bursts": ((10**12, 1.0),)}, "with bursts and the hog there are 1e\\+12 requests"),
        ({"hog_factor": 1e12}, "with bursts and the hog there are"),
        ({"hog_factor": float("inf")}, "there are inf requests, must be at most 10000000"),
    ],
)
def test_what_cannot_be_drawn_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(DRAWN, **change).generate()  # type: ignore[arg-type]


def test_the_mean_of_long_prompts_is_that_of_what_is_left_of_them() -> None:
    long = replace(DRAWN, prompt=Lengths(1e12, 0.9, 8, 15 * 10**12))
    assert long.mean_tokens()[0] == long.max_prompt_tokens == max(long.generate().prompt_tokens)


def test_lengths_are_cut() -> None:
    from random import Random

    rng = Random(1)
    drawn = [Lengths(100.0, 2.0, 50, 200).draw(rng) for _ in range(100)]
    assert min(drawn) == 50 and max(drawn) == 200


GOOD = {"seconds": 3.0, "prompt_tokens": 100, "output_tokens": 10}


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_in_order_of_time_from_its_first_request(tmp_path: Path) -> None:
    later = {**GOOD, "seconds": 5, "tenant": "acme", "class": "batch", "prefix_id": 7, "prefix_tokens": 64}
    workload = read_trace(write(tmp_path / "trace.jsonl", later, "", GOOD))
    assert list(workload.seconds) == [0.0, 2.0]
    assert workload.tenants[workload.tenant[1]] == "acme"
    assert list(workload.priority) == [2, 3]
    assert list(workload.prefix) == [-1, 0] and list(workload.prefix_tokens) == [0, 64]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "an object"),
        ({**GOOD, "tokens": 3}, "unknown key 'tokens'"),
        ({**GOOD, "seconds": -1}, "seconds is -1"),
        ({**GOOD, "seconds": float("inf")}, "seconds is inf"),
        ({**GOOD, "prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"seconds": 1, "prompt_tokens": 5}, "output_tokens is None"),
        ({**GOOD, "class": "urgent"}, "class is 'urgent', must be one of interactive, standard, batch"),
        ({**GOOD, "tenant": "a\nb"}, "printable"),
        ({**GOOD, "prefix_id": "a", "prefix_tokens": 101}, "over the prompt's 100"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        read_trace(write(tmp_path / "trace.jsonl", GOOD, line))
    assert "trace.jsonl:2" in str(raised.value)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no request"):
        read_trace(write(tmp_path / "trace.jsonl", ""))
