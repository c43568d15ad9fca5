"""The start on a real device: measured or named profile, switches, and what the decisions then say."""

import dataclasses
import os
from pathlib import Path

import pytest

from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.planner import Limits, Switches
from dragoman_agent.pal.profile import Profile, ProfileError, Value
from dragoman_agent.pal.startup import PalResult, start_on_device

CACHE = default_cache_dir(os.environ)  # where the compiled kernels are kept
MODEL = RandomSource("smollm2-135m")


def start(*, switches: Switches | None = None, profile: str = "", force: bool = False) -> PalResult:
    return start_on_device(
        MODEL, "cpu", "auto", Limits(), CACHE, switches=switches, profile=profile, profile_force=force
    )


def decision(result: PalResult, subject: str) -> Decision:
    return next(entry for entry in result.log.all() if entry.subject == subject)


@pytest.fixture(scope="module")
def own() -> Profile:
    """The measured profile of this machine's CPU."""
    from dragoman_agent.pal.attributes import cpu_device
    from dragoman_agent.pal.probe import profile_device

    return profile_device(cpu_device(), CACHE)[0]


def keep(folder: Path, profile: Profile) -> str:
    (folder / "named.json").write_text(profile.to_json())
    return str(folder / "named.json")


def test_a_start_says_which_profile_it_planned_from(own: Profile) -> None:
    told = decision(start(), "profile")
    assert told.chosen.startswith(own.name)
    assert "measured" in told.chosen
    assert told.reason.startswith("this device, measured on")


def test_a_named_profile_is_planned_from(own: Profile, tmp_path: Path) -> None:
    slower = own.with_values({"memory.read_bandwidth": Value(1e9, "bytes/s", "measured")})
    named = start(profile=keep(tmp_path, slower))
    assert "asked for with --profile: the file" in decision(named, "profile").reason
    plain = start()
    assert named.plan.step_model.decode_step_seconds(1, 64) > plain.plan.step_model.decode_step_seconds(1, 64)


def test_a_profile_of_another_device_is_refused_unless_forced(own: Profile, tmp_path: Path) -> None:
    name = keep(tmp_path, dataclasses.replace(own, fingerprint="f" * 32))
    with pytest.raises(ProfileError, match=r"does not match .*fingerprint ffffffff.* --profile-force"):
        start(profile=name)
    forced = start(profile=name, force=True)
    assert "forced with --profile-force although it differs" in decision(forced, "profile").reason


def test_a_card_cannot_be_forced_on_a_cpu() -> None:
    with pytest.raises(ProfileError, match="it is of a cuda device, this is a cpu device"):
        start(profile="rtx4090", force=True)


def test_what_is_switched_off_is_told_and_changes_the_digest() -> None:
    plans = {
        "": start(),
        "--pal off": start(switches=Switches.off()),
        "--pal-arena off": start(switches=Switches(arena=False)),
        "--pal-launch-tuning off": start(switches=Switches(launch_tuning=False)),
        "--pal-async-copy off": start(switches=Switches(async_copy=False)),
        "--pal-link-policy off": start(switches=Switches(link_policy=False)),
    }
    assert len({result.plan.digest() for result in plans.values()}) == len(plans)
    for flag, result in plans.items():
        told = [entry.chosen for entry in result.log.all() if entry.subject == "switches"]
        assert told == ([flag] if flag else [])
