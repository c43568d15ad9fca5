"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from tests.needs import skip_without

from dragoman_agent.model.embedded import default_cache_dir, embedded_target, fetch_command

# Correctness tests never time: a busy machine must not fail a property.
settings.register_profile("dragoman", deadline=None)
settings.load_profile("dragoman")


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The embedded model's file, found and never fetched; without it the test is skipped by name."""
    path = embedded_target(default_cache_dir(os.environ))
    if not path.exists():
        skip_without("model", f"embedded model not at {path}: run `{fetch_command(default_cache_dir(os.environ))}`")
    return path
