"""No plan changes unseen: every shipped profile with every shipped model against its golden file."""

from __future__ import annotations

import difflib
import json

import pytest
from tests.agent.pal.golden_plans import FOLDER, golden_text

from dragoman_agent.model.random_source import random_model_names
from dragoman_agent.pal.library import library_names


@pytest.mark.parametrize("name", library_names())
def test_plans_are_the_golden_ones(name: str) -> None:
    path = FOLDER / f"{name}.json"
    held = path.read_text(encoding="utf-8") if path.exists() else ""
    made = golden_text(name)
    if made != held:
        lines = difflib.unified_diff(held.splitlines(), made.splitlines(), f"golden {name}", "now", lineterm="", n=1)
        pytest.fail("run `make golden` if this is meant:\n" + "\n".join(list(lines)[:60]), pytrace=False)


def test_every_profile_has_a_file_with_every_model_and_no_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(library_names())
    for path in FOLDER.glob("*.json"):
        assert sorted(json.loads(path.read_text())) == random_model_names(), path.name


def test_cards_get_plans_of_their_own() -> None:
    """A plan that no card changes would be a constant."""
    held = {path.stem: json.loads(path.read_text())["qwen3-0.6b"]["plan"] for path in FOLDER.glob("*.json")}
    small, big = held["rtx4060-laptop"], held["b200"]
    for field in ("num_blocks", "max_batch_tokens", "decode_num_splits"):
        assert small[field] != big[field], field
