"""Decisions in plain words: what was chosen, why, among what, from what, and what came of it."""

from __future__ import annotations

import pytest

from dragoman.v1 import hardware_pb2 as pb
from dragoman_cli.plan_text import field_text, newest, paragraph


def decision(**changes: object) -> pb.Decision:
    fields: dict[str, object] = {"subject": "page-size", "chosen": "64", "reason": "one tile", "unit": "s", **changes}
    return pb.Decision(**fields)  # type: ignore[arg-type]


def test_a_whole_decision_is_one_paragraph() -> None:
    told = paragraph(
        decision(
            inputs=[
                pb.DecisionInput(name="memory.l2_size", value="60 MiB", provenance=pb.PROVENANCE_REPORTED),
                pb.DecisionInput(name="scheduling.phase", value="2.4e-06 s", provenance=pb.PROVENANCE_MEASURED),
            ],
            candidates=[
                pb.DecisionCandidate(name="16", predicted=2e-5, rejected_because="slower."),
                pb.DecisionCandidate(name="64", predicted=1e-5),
                pb.DecisionCandidate(name="128", rejected_because="wastes the tail"),
            ],
            predicted=1e-5,
            measured=1.5e-5,
        )
    )
    assert told == (
        "page-size: 64, chosen among 16, 64, 128. Because: one tile. Not taken: 16 (20 us predicted): slower; 128: "
        "wastes the tail. It rests on memory.l2_size = 60 MiB (reported), scheduling.phase = 2.4e-06 s (measured). "
        "Predicted 10 us, measured 15 us, 1.50 times the prediction."
    )


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"predicted": 2.0}, "Predicted 2 s; not measured yet."),
        ({"measured": 2.0}, "Measured 2 s."),
        ({"predicted": 0.0, "measured": 2.0}, "Predicted 0 s, measured 2 s."),
        ({"unit": "tokens"}, "page-size: 64 tokens. Because: one tile."),
        ({"unit": ""}, "page-size: 64. Because: one tile."),
    ],
)
def test_what_is_not_known_is_not_told(changes: dict[str, object], end: str) -> None:
    assert paragraph(decision(**changes)).endswith(end)


@pytest.mark.parametrize(
    ("values", "labels", "text"),
    [
        ([1, 2, 8], [], "1, 2, 8"),
        ([16, 16, 4, 1], ["1", "2", "8", "64"], "to 2: 16, to 8: 4, above: 1"),
        ([6, 6], ["96x32 from 1536 rows", "64x96 from 1536 rows"], "96x32 from 1536 rows: 6, 64x96 from 1536 rows: 6"),
        ([64, 64], ["1", "2"], "64"),
        ([], [], "none"),
    ],
)
def test_lists_tell_where_they_change(values: list[float], labels: list[str], text: str) -> None:
    assert field_text(pb.PlanField(numbers=pb.NumberList(values=values, labels=labels))) == text


def test_fields_of_every_kind() -> None:
    assert field_text(pb.PlanField(number=64, unit="tokens")) == "64 tokens"
    assert field_text(pb.PlanField(text="l2")) == "l2"
    assert field_text(pb.PlanField(flag=False)) == "no"
    assert field_text(pb.PlanField()) == ""


def test_the_newest_of_a_subject_counts() -> None:
    found = newest([decision(chosen="16"), decision(subject="road"), decision(chosen="64")])
    assert [(subject, entry.chosen) for subject, entry in found.items()] == [("page-size", "64"), ("road", "64")]
