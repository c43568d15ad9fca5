"""Profiles: a file round-trips, a broken one is refused, and a measurement is kept for one fingerprint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.pal import probe as probe_module
from dragoman_agent.pal.attributes import cpu_device
from dragoman_agent.pal.probe import probe, profile_device
from dragoman_agent.pal.profile import DeviceFacts, Profile, ProfileError, Value, fingerprint, load_profile, now
from dragoman_agent.pal.view import profile_to_proto

PROFILE = Profile(
    "some-card",
    DeviceFacts("cuda", 0, "Some Card", "sm_90", 1 << 37, "uuid-1"),
    fingerprint(["uuid-1", "580"]),
    now(),
    {
        "memory.read_bandwidth": Value(4.6e12, "bytes/s", "measured", spread=0.02),
        "compute.capability": Value("9.0", "", "reported"),
        "link.pinned": Value(True, "", "reported"),
        "scheduling.throughput": Value((1.0, 2.0), "bytes/s", "spec", labels=("128", "256"), note="two sizes"),
    },
)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(PROFILE.to_json())
    assert load_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(schema_version=99), "schema version 99"),
        (lambda body: body.pop("device"), "KeyError"),
        (lambda body: body["values"]["compute.capability"].update(provenance="guessed"), "guessed"),
        (lambda body: body["values"]["memory.read_bandwidth"].update(value=float("nan")), "not finite"),
        (lambda body: body["values"]["memory.read_bandwidth"].update(value=None), "NoneType"),
        (lambda body: body.update(name=3), "a text was expected"),
    ],
)
def test_broken_files_are_refused_by_name(change: Any, message: str) -> None:
    body = json.loads(PROFILE.to_json())
    change(body)
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(json.dumps(body), "some-file")


@given(st.text(max_size=200))
def test_any_text_is_a_profile_or_a_profile_error(text: str) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(text, "fuzz")


def test_message_carries_every_value_with_its_provenance() -> None:
    message = profile_to_proto(PROFILE)
    assert len(message.values) == len(PROFILE.values)
    by_name = {value.name: value for value in message.values}
    assert by_name["memory.read_bandwidth"].number == 4.6e12
    assert by_name["link.pinned"].flag is True
    assert list(by_name["scheduling.throughput"].numbers.values) == [1.0, 2.0]


def test_a_second_probe_of_the_same_device_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe(tmp_path)
    assert not first.from_cache
    monkeypatch.setattr(probe_module, "measure_cpu", lambda _: pytest.fail("measured again"))
    second = probe(tmp_path)
    assert second.from_cache
    assert second.profiles[0].number("memory.read_bandwidth") == first.profiles[0].number("memory.read_bandwidth")
    assert json.loads(second.to_json())["profiles"][0]["fingerprint"] == first.profiles[0].fingerprint


def test_another_fingerprint_measures_again(tmp_path: Path) -> None:
    device = cpu_device()
    profile_device(device, tmp_path)
    _, cached = profile_device(dataclasses.replace(device, fingerprint="another"), tmp_path)
    assert not cached


def test_a_damaged_cache_entry_is_measured_again(tmp_path: Path) -> None:
    device = cpu_device()
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / f"{device.fingerprint}.json").write_text("{")
    profile, cached = profile_device(device, tmp_path)
    assert not cached
    assert profile.number("memory.read_bandwidth") > 1e8


def test_a_read_only_cache_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file where the folder should be")
    profile, cached = profile_device(cpu_device(), tmp_path)
    assert not cached
    assert profile.number("compute.matmul_float32") > 1e8
