"""Profiles that come along: what is known of common cards without having one. A file a card, made by `build.py`."""

from __future__ import annotations

from importlib import resources

from dragoman_agent.pal.profile import Profile


def library_names() -> tuple[str, ...]:
    """Names of the profiles that come along, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_library(name: str) -> Profile:
    """The profile `name`, one of `library_names()`. Raises ProfileError where the installed file is damaged."""
    file = resources.files(__name__) / f"{name}.json"
    return Profile.from_json(file.read_text(encoding="utf-8"), f"{name} of the library")
