"""Profiles: a file round-trips, a broken one is refused, and a measurement is kept for one fingerprint."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.pal import probe as probe_module
from dragoman_agent.pal.attributes import cpu_device
from dragoman_agent.pal.messages import profile_to_proto
from dragoman_agent.pal.probe import probe, profile_device
from dragoman_agent.pal.profile import (
    MAX_FILE_BYTES,
    DeviceFacts,
    NewerProfileError,
    Profile,
    ProfileError,
    Value,
    fingerprint,
    load_profile,
    now,
)
from dragoman_agent.pal.profile_schema import PROVENANCES, UNIT_OF

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


def broken(change: Any) -> str:
    body = json.loads(PROFILE.to_json())
    change(body)
    return json.dumps(body)


def value(**changes: Any) -> Any:
    return lambda body: body["values"]["memory.read_bandwidth"].update(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(schema_version=0), "schema version 0 was never used"),
        (lambda body: body.update(schema_version=True), "schema_version is 'True'"),
        (lambda body: body.pop("schema_version"), "schema_version is 'None'"),
        (lambda body: body.pop("device"), "no 'device'"),
        (lambda body: body.update(colour="red"), "'colour', which is not known"),
        (lambda body: body.update(name=3), "name is '3'; a text was expected"),
        (lambda body: body.update(created="yesterday"), "created is 'yesterday'"),
        (lambda body: body.update(created="2026-11-29T12:00:00"), "created is"),
        (lambda body: body.update(values=[]), "values is no JSON object"),
        (lambda body: body["device"].pop("uuid"), "device has no 'uuid'"),
        (lambda body: body["device"].update(index=-1), "device.index is '-1'"),
        (lambda body: body["device"].update(memory_bytes=1.5), "device.memory_bytes"),
        (lambda body: body["device"].update(kind=""), "device.kind is empty"),
        (lambda body: body["device"].update(name="\ud800"), "device.name is not valid Unicode"),
        (lambda body: body["values"].update({"Read Bandwidth": {}}), "'Read Bandwidth' is not the name of a value"),
        (lambda body: body["values"].update({"memory.free": 3}), "memory.free is no JSON object"),
        (value(provenance="guessed"), "memory.read_bandwidth has provenance 'guessed'"),
        (value(provenance=None), "memory.read_bandwidth has provenance None"),
        (value(value=float("nan")), "memory.read_bandwidth is nan; a finite number"),
        (value(value=float("inf")), "memory.read_bandwidth is inf"),
        (value(value=10**400), "memory.read_bandwidth is beyond any device"),
        (
            lambda body: body["values"].update(
                {"memory.free": {"value": 2**63, "unit": "bytes", "provenance": "spec"}}
            ),
            "memory.free is beyond any device",
        ),
        (value(value=-1.0), "memory.read_bandwidth is -1.0, which is negative"),
        (value(value=None), "memory.read_bandwidth is a null; a number was expected"),
        (value(value="fast"), "memory.read_bandwidth is a text"),
        (value(value=True), "memory.read_bandwidth is a flag"),
        (value(value=[1.0]), "memory.read_bandwidth is a list"),
        (value(unit="GB/s"), "memory.read_bandwidth is in 'GB/s'; 'bytes/s' was expected"),
        (value(unit="bytes"), "memory.read_bandwidth is in 'bytes'"),
        (value(spread=-0.1), "memory.read_bandwidth has the spread -0.1"),
        (value(spread=float("nan")), "memory.read_bandwidth has the spread nan"),
        (value(spread="wide"), "memory.read_bandwidth has the spread 'wide'"),
        (value(note=3), "note of memory.read_bandwidth"),
        (value(labels=["a"]), "memory.read_bandwidth has 1 labels for no list of numbers"),
        (value(sprad=0.1), "memory.read_bandwidth has 'sprad'"),
        (lambda body: body["values"]["compute.capability"].update(value=9.0), "compute.capability is a number"),
        (lambda body: body["values"]["compute.capability"].update(value="Hopper"), "compute.capability is 'Hopper'"),
        (lambda body: body["values"]["scheduling.throughput"].update(labels=["1"]), "1 labels for 2 numbers"),
        (
            lambda body: body["values"]["scheduling.throughput"].update(unit="GB/s"),
            "scheduling.throughput is in 'GB/s'",
        ),
        (lambda body: body["values"]["scheduling.throughput"].update(value=[1.0, "x"]), "holds a text"),
        (lambda body: body["values"]["scheduling.throughput"].update(value=[1.0, float("nan")]), "is nan"),
        (lambda body: body["values"]["scheduling.throughput"].update(value=[1.0] * 5000, labels=[]), "5000 numbers"),
    ],
)
def test_broken_files_are_refused_by_the_name_of_what_is_wrong(change: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(message)) as refused:
        Profile.from_json(broken(change), "some-file")
    assert "some-file" in str(refused.value)
    assert "dragoman probe" in str(refused.value)


def test_a_newer_schema_is_an_error_of_its_own() -> None:
    with pytest.raises(NewerProfileError, match="schema version 99, this program reads up to 1: a newer Dragoman"):
        Profile.from_json(broken(lambda body: body.update(schema_version=99, values="another form")), "some-file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        (PROFILE.to_json()[:200], "not JSON"),
        ("[]", "the file is no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        (PROFILE.to_json().replace('"fingerprint"', '"name"'), "'name' stands there twice"),
        (PROFILE.to_json().replace("link.pinned", "compute.capability"), "'compute.capability' stands there twice"),
        (PROFILE.to_json().replace("4600000000000.0", "1" * 5000), "integer"),
    ],
)
def test_damaged_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profile.from_json(text, "some-file")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.write_bytes(b'{"name": "\xff"}'), "byte 10 is not UTF-8"),
        (lambda path: path.write_text(PROFILE.to_json() + " " * MAX_FILE_BYTES), "larger than 1 MiB"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a file"),
    ],
)
def test_files_that_cannot_be_profiles_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "p.json")
    with pytest.raises(ProfileError, match=message):
        load_profile(tmp_path / "p.json")


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ProfileError, match="cannot be"):
        load_profile(Path("a\0b"))


@given(st.text(max_size=200))
def test_any_text_is_a_profile_or_a_profile_error(text: str) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(text, "fuzz")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_a_profile_with_any_one_part_replaced_is_read_or_refused(data: st.DataObject) -> None:
    body = json.loads(PROFILE.to_json())
    place: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        read = Profile.from_json(json.dumps(body), "fuzz")
    except ProfileError:
        return
    profile_to_proto(read).SerializeToString()  # what was let in can be shown
    assert Profile.from_json(read.to_json(), "again") == read


SPREADS = st.none() | st.integers(0, 20_000).map(lambda number: number / 10_000)  # as files keep them
NUMBERS = st.floats(0, 1e20) | st.integers(0, 1 << 60)
SIZES = st.floats(0, 1e18) | st.integers(0, 1 << 60)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def values(draw: st.DrawFn) -> tuple[str, Value]:
    name, unit = draw(st.sampled_from(sorted(UNIT_OF.items())) | st.just(("memory.some_new_value", "bytes")))
    provenance = draw(st.sampled_from(PROVENANCES))
    if name in ("memory.read_by_size", "memory.latency_by_region", "scheduling.atomics"):
        numbers = tuple(draw(st.lists(st.floats(0, 1e20), max_size=5)))
        labels = tuple(draw(TEXTS) for _ in numbers)
        return name, Value(numbers, unit, provenance, draw(SPREADS), draw(TEXTS), labels)
    return name, Value(draw(SIZES if unit == "bytes" else NUMBERS), unit, provenance, draw(SPREADS), draw(TEXTS))


@given(TEXTS, st.builds(DeviceFacts, st.sampled_from(["cuda", "cpu"]), st.integers(0, 7), TEXTS, TEXTS, st.integers(0, 1 << 50), TEXTS), st.lists(values(), max_size=8))  # fmt: skip
def test_every_profile_comes_back_from_its_file(name: str, device: DeviceFacts, held: list[tuple[str, Value]]) -> None:
    profile = Profile(name, device, "print", now(), dict(held))
    assert Profile.from_json(profile.to_json(), "round trip") == profile


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
