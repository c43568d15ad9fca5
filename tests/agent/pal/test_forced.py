"""`--profile`: found by name or file, refused where it is of another device, and bounded by the device when forced."""

import dataclasses
from pathlib import Path

import pytest

from dragoman_agent.pal.forced import NamedProfile, describe, find_profile, mismatches, take_forced
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.profile import DeviceFacts, Profile, ProfileError, Value

GIB = 1 << 30
H100 = load_library("h100-sxm")
CARD = DeviceFacts("cuda", 1, "NVIDIA H100 80GB HBM3", "sm_90", int(79.1 * GIB), "uuid-9")
REPORTED = {
    "compute.capability": Value("9.0", "", "reported"),
    "compute.multiprocessors": Value(132, "", "reported"),
    "compute.dependent_launch": Value(True, "", "reported"),
    "memory.free": Value(70 * GIB, "bytes", "reported"),
    "memory.shared_per_block": Value(227 << 10, "bytes", "reported"),
}
LAPTOP = DeviceFacts("cuda", 0, "NVIDIA GeForce RTX 4060 Laptop GPU", "sm_89", 8 * GIB, "uuid-4")
LAPTOP_REPORTED = {
    "compute.capability": Value("8.9", "", "reported"),
    "compute.multiprocessors": Value(24, "", "reported"),
    "compute.dependent_launch": Value(False, "", "reported"),
    "memory.free": Value(7 * GIB, "bytes", "reported"),
    "memory.shared_per_block": Value(99 << 10, "bytes", "reported"),
}
CPU = DeviceFacts("cpu", 0, "some CPU", "x86_64-avx2", 16 * GIB, "machine")


def measured(**changes: object) -> Profile:
    """The profile of one certain H100."""
    return dataclasses.replace(H100, **{"fingerprint": "a" * 32, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "rtx-4090", "RTX4090"])
def test_names_of_the_library_are_found_however_they_are_spelt(name: str) -> None:
    named = find_profile(name)
    assert named.profile.name == "rtx4090"
    assert named.origin == "the library's rtx4090"


def test_a_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.json").write_text(H100.to_json())
    assert find_profile(str(tmp_path / "mine.json")).profile == H100
    monkeypatch.chdir(tmp_path)
    assert find_profile("mine.json").origin == "the file mine.json"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx4091", "did you mean rtx4090?"),
        ("RTX 4060", "did you mean rtx4060-laptop?"),
        (
            "abacus",
            "no profile 'abacus' in the library and no such file. Give the path of a profile file, or one of: a100",
        ),
        ("", "no profile ''"),
        ("a\0b", "no profile"),
        ("./nowhere.json", "cannot be read: No such file"),
        ("nowhere.json", "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_found_says_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ProfileError) as refused:
        find_profile(name)
    assert message in str(refused.value)


def test_a_profile_that_cannot_be_planned_from_names_what_it_lacks(tmp_path: Path) -> None:
    values = {name: value for name, value in H100.values.items() if name != "memory.read_bandwidth"}
    (tmp_path / "half.json").write_text(dataclasses.replace(H100, values=values).to_json())
    with pytest.raises(ProfileError, match=r"needs memory\.read_bandwidth, which it lacks"):
        find_profile(str(tmp_path / "half.json"))


def test_a_sheet_of_the_same_card_is_taken_with_the_memory_that_is_free_now() -> None:
    profile, decision = take_forced(NamedProfile(H100, "the library's h100-sxm"), CARD, "print", REPORTED, force=False)
    assert profile.number("memory.free") == 70 * GIB
    assert profile.device == CARD
    assert profile.number("memory.read_bandwidth") == H100.number("memory.read_bandwidth")
    assert decision.subject == "profile"
    assert decision.reason == "asked for with --profile: the library's h100-sxm"
    assert "h100-sxm (" in decision.chosen
    assert "spec" in decision.chosen
    assert {entry.provenance for entry in decision.inputs} == {"spec", "derived"}


def test_the_measured_profile_of_this_very_device_needs_no_force() -> None:
    assert mismatches(measured(), CARD, "a" * 32, REPORTED) == ()


@pytest.mark.parametrize(
    ("profile", "differs"),
    [
        (measured(fingerprint="b" * 32), ["fingerprint bbbbbbbb, here aaaaaaaa"]),
        (measured(device=dataclasses.replace(H100.device, memory_bytes=94 * GIB)), ["94.0 GiB of memory"]),
        (load_library("rtx4060-laptop"), ["architecture sm_89", "24 multiprocessors", "8.0 GiB of memory"]),
        (load_library("a100-sxm-80gb"), ["architecture sm_80", "108 multiprocessors"]),
        (measured(device=CPU), ["it is of a cpu device, this is a cuda device"]),
    ],
)
def test_what_differs_is_named(profile: Profile, differs: list[str]) -> None:
    found = mismatches(profile, CARD, "a" * 32, REPORTED)
    for part in differs:
        assert any(part in entry for entry in found), found
    with pytest.raises(ProfileError, match="does not match NVIDIA H100") as refused:
        take_forced(NamedProfile(profile, "the file x"), CARD, "a" * 32, REPORTED, force=False)
    assert all(part in str(refused.value) for part in differs)


def test_a_forced_profile_says_so_and_stays_within_what_the_device_has() -> None:
    named = NamedProfile(H100, "the library's h100-sxm")
    profile, decision = take_forced(named, LAPTOP, "print", LAPTOP_REPORTED, force=True)
    assert profile.number("memory.free") == 7 * GIB
    assert profile.number("memory.shared_per_block") == 99 << 10
    assert profile.values["compute.dependent_launch"].value is False
    assert profile.values["compute.capability"].value == "8.9"
    assert profile.device.memory_bytes == 8 * GIB
    # What makes it the wrong card's plan stays.
    assert profile.number("compute.multiprocessors") == 132
    assert profile.number("memory.read_bandwidth") == H100.number("memory.read_bandwidth")
    for part in ("forced with --profile-force although it differs", "architecture sm_90", "bounded by", "memory.free"):
        assert part in decision.reason


def test_the_smaller_of_two_cards_bounds_the_memory() -> None:
    small = load_library("rtx4060-laptop")
    profile, _ = take_forced(NamedProfile(small, "x"), CARD, "print", REPORTED, force=True)
    assert profile.number("memory.free") == small.number("memory.free")
    assert profile.values["compute.capability"].value == "8.9"
    assert profile.device.index == 1


def test_another_kind_of_device_is_refused_even_when_forced() -> None:
    with pytest.raises(ProfileError, match="cannot run on another, whatever is forced"):
        take_forced(NamedProfile(H100, "the library's h100-sxm"), CPU, "print", {}, force=True)


def test_a_profile_is_described_by_its_provenance() -> None:
    values = {"memory.free": Value(1, "bytes", "reported"), "memory.total": Value(1, "bytes", "reported")}
    assert describe(Profile("mine", CPU, "p", "now", values)) == "mine (2 reported values)"
