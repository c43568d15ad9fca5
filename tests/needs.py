"""Tools that some tests need and not every machine has: skipped by name, or failed where they are required."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

from dragoman_agent.device.cpu_road import native_problem


def is_required(name: str) -> bool:
    """Whether this run must not go without `name`."""
    return name in os.environ.get("DRAGOMAN_REQUIRE", "").replace(",", " ").split()


def skip_without(name: str, reason: str) -> NoReturn:
    """Skip by name, or fail where `name` is required."""
    if is_required(name):
        pytest.fail(f"{name} is required (DRAGOMAN_REQUIRE): {reason}", pytrace=False)
    pytest.skip(reason)


def need_cpu_kernels() -> None:
    """The compiled kernels: without a compiler the test is skipped by name, a compiler that fails on them is a failure."""
    need("g++")
    if problem := native_problem():
        pytest.fail(problem, pytrace=False)


def need(name: str) -> str:
    """Path of the command `name`. Without it the test is skipped by name; DRAGOMAN_REQUIRE listing it makes that a failure."""
    path = shutil.which(name)
    if path is not None:
        return path
    skip_without(name, f"needs {name}, which is not installed")
