"""The library: its files are what the table says, complete, and never called measured."""

from pathlib import Path

import pytest

from dragoman_agent.pal.library import library_names, load_library
from dragoman_agent.pal.library.build import profile_of, write
from dragoman_agent.pal.library.cards import CARDS, Card
from dragoman_agent.pal.profile_schema import missing_values

NAMES = [card.name for card in CARDS]


def test_nine_cards_come_along() -> None:
    assert {
        "a100-sxm-80gb", "rtx3090", "rtx4060-laptop", "rtx4090", "l4", "l40s", "h100-sxm", "b200", "rtx5090"
    } <= set(library_names())  # fmt: skip


def test_files_are_what_the_table_makes(tmp_path: Path) -> None:
    write(tmp_path, say=lambda _: None)
    for name in NAMES:
        made = (tmp_path / f"{name}.json").read_text()
        shipped = load_library(name)
        assert shipped.to_json() == made, f"{name}.json is old; run: python -m dragoman_agent.pal.library.build"


@pytest.mark.parametrize("name", library_names())
def test_every_profile_can_be_planned_from(name: str) -> None:
    profile = load_library(name)
    assert profile.name == name
    assert missing_values(profile.device.kind, profile.values) == ()
    assert profile.device.memory_bytes == profile.number("memory.total") > profile.number("memory.free")


@pytest.mark.parametrize("name", library_names())
def test_no_value_is_a_measurement_of_0(name: str) -> None:
    for key, value in load_library(name).values.items():
        numbers = value.value if isinstance(value.value, tuple) else (value.value,)
        assert value.provenance != "measured" or 0 not in numbers, key


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_a_card_that_was_not_here_has_no_measured_value(card: Card) -> None:
    profile = profile_of(card)
    assert {value.provenance for value in profile.values.values()} == {"spec", "derived"}
    assert all(value.note for value in profile.values.values()), "each value names its source"
    assert profile.fingerprint == ""


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_no_derived_figure_is_over_the_sheet(card: Card) -> None:
    profile = profile_of(card)
    assert profile.number("memory.read_bandwidth") < card.bandwidth
    assert profile.number("scheduling.phase_rate") < profile.number("memory.read_bandwidth")
    assert profile.number("compute.matmul_bfloat16") < card.bfloat16
    assert profile.number("scheduling.graph_node") < profile.number("scheduling.phase")
