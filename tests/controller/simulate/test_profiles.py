"""Profiles: what a file may hold, and a made-up fleet whose speeds lie apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dragoman_controller.simulate.profiles import (
    capacity,
    check_fleet,
    profile_from_dict,
    profile_to_dict,
    read_profile,
    standard_profile,
    unequal_fleet,
)

FIELDS = profile_to_dict(standard_profile())


def test_a_profile_goes_to_a_file_and_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(FIELDS))
    assert profile_to_dict(read_profile(path)) == FIELDS


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": 3}, "unknown key 'speed'"),
        ({"step_model": {}}, "step_model must be an object with the keys"),
        ({"step_model": {**FIELDS["step_model"], "decode_seconds": [0.1]}}, "1 times for a grid"),
        ({"step_model": {**FIELDS["step_model"], "decode_seconds": [-1.0] * 12}}, "finite times over 0"),
        ({"step_model": {**FIELDS["step_model"], "prefill_base_seconds": "soon"}}, "could not convert"),
        ({"max_running_requests": 0}, "max_running_requests is 0, must be a whole number, 1 or more"),
        ({"company_tokens": -1}, "company_tokens is -1, must be a whole number, 0 or more"),
        ({"company_tokens": 512.0}, "company_tokens is 512.0, must be a whole number, 0 or more"),
        ({"company_tokens": FIELDS["max_batch_tokens"] + 1}, "company_tokens is 4097, over max_batch_tokens 4096"),
        ({"kv_tokens": 100}, "a request of full length would not fit"),
    ],
)
def test_a_bad_profile_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        profile_from_dict({**FIELDS, **change}, "here.json")
    assert "here.json" in str(raised.value)


def test_a_profile_without_the_tokens_of_steps_beside_streams_has_as_many_as_of_any_step() -> None:
    without = {key: value for key, value in FIELDS.items() if key != "company_tokens"}
    assert profile_from_dict(without, "old.json").company_tokens == 0
    same = profile_from_dict({**FIELDS, "company_tokens": FIELDS["max_batch_tokens"]}, "new.json")
    assert same.company_tokens == same.max_batch_tokens


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("no")
    with pytest.raises(ValueError, match=r"p\.json is not JSON"):
        read_profile(tmp_path / "p.json")


def test_the_speeds_of_a_fleet_lie_a_factor_apart_and_equal_seeds_make_equal_fleets() -> None:
    fleet = unequal_fleet(200, 8.0, 1)
    rates = [profile.steps.model.prefill_tokens_per_second for profile in fleet]
    assert 6.0 < max(rates) / min(rates) <= 8.0
    steps = [profile.steps.model.decode_step_seconds(8, 1000) for profile in fleet]
    assert 6.0 < max(steps) / min(steps) <= 8.0
    names = [profile.name for profile in fleet]
    assert names == [profile.name for profile in unequal_fleet(200, 8.0, 1)]
    assert names != [profile.name for profile in unequal_fleet(200, 8.0, 2)]


def test_capacity_is_what_the_time_of_prompts_and_outputs_leaves() -> None:
    profile = standard_profile()
    seconds = 1 / profile.requests_per_second(1000, 200)
    batch = profile.full_batch(1100)
    assert seconds == pytest.approx(1000 / 12_000 + 200 * profile.steps.model.decode_step_seconds(batch, 1100) / batch)
    assert capacity([profile] * 3, 1000, 200) == pytest.approx(3 / seconds)


def test_a_fleet_has_agents() -> None:
    with pytest.raises(ValueError, match="0 agents"):
        check_fleet([])
