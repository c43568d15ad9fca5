"""Tools that some tests need and not every machine has: skipped by name, or failed where they are required."""

from __future__ import annotations

import os
import shutil

import pytest


def need(name: str) -> str:
    """Path of the command `name`. Without it the test is skipped by name; DRAGOMAN_REQUIRE listing it makes that a failure."""
    path = shutil.which(name)
    if path is not None:
        return path
    if name in os.environ.get("DRAGOMAN_REQUIRE", "").replace(",", " ").split():
        pytest.fail(f"{name} is required (DRAGOMAN_REQUIRE) and not installed", pytrace=False)
    pytest.skip(f"needs {name}, which is not installed")
