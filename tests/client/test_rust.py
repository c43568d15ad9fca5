"""The Rust client: its own tests and linters pass, its README's examples run against real processes."""

from __future__ import annotations

import os
import re
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
from clients.conformance.language import cache_folder
from tests.needs import skip_without
from tests.toolchains import version

from dragoman import Client

FOLDER = Path(__file__).resolve().parents[2] / "clients/rust"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
# Built with the conformance runner, once for both.
TARGET = cache_folder() / "rust" / "target"


@pytest.fixture(scope="module", autouse=True)
def cargo() -> None:
    for name in ("cargo", "cc"):
        if not version([name, "--version"]):
            skip_without(name, f"the Rust client: {name} is not on the PATH")


def run(*command: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env={**os.environ, "CARGO_TARGET_DIR": str(TARGET), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_unit_tests_pass() -> None:
    shown = run("cargo", "test", "--quiet", "--jobs", "2", "--release")
    assert sum(map(int, re.findall(r"(\d+) passed", shown))) > 40


def test_linters_are_content() -> None:
    run("cargo", "fmt", "--all", "--check")
    run(
        "cargo", "clippy", "--quiet", "--jobs", "2", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"
    )  # fmt: skip


def test_it_depends_on_grpc_and_protobuf_alone() -> None:
    """Its own dependencies are in the tree of tonic and prost anyway: it adds none."""
    grpc = run("cargo", "tree", "--package", "tonic", "--edges", "normal,build", "--prefix", "none", "--no-dedupe")
    known = {line.split()[0] for line in grpc.splitlines()} | {"tonic-prost", "prost", "prost-types"}
    manifest = tomllib.loads((FOLDER / "Cargo.toml").read_text())
    assert set(manifest["dependencies"]) <= known
    assert "prost-types" in manifest["dependencies"]


def test_versions_are_pinned_and_no_lock_file_is_kept() -> None:
    for path in (FOLDER / "Cargo.toml", FOLDER / "conformance/Cargo.toml"):
        manifest = tomllib.loads(path.read_text())
        for kind in ("dependencies", "build-dependencies", "dev-dependencies"):
            for name, wanted in manifest.get(kind, {}).items():
                exact = wanted if isinstance(wanted, str) else wanted.get("version", "=" if "path" in wanted else "")
                assert exact.startswith("="), f"{path.name}: {name} is not pinned"
    assert "Cargo.lock" in (FOLDER / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("example", ["stream", "errors"])
def test_example_runs(example: str, controller: str) -> None:
    with Client(controller) as client:
        deadline = time.monotonic() + 10
        while not client.agents():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    shown = run(
        "cargo", "run", "--quiet", "--jobs", "2", "--release", "--example", example,
        environ={"DRAGOMAN_CONTROLLER": controller},
    )  # fmt: skip
    assert shown.strip(), "an example shows something"
    if example == "errors":
        assert "model_not_served false" in shown


def test_the_readme_shows_the_example_that_runs() -> None:
    (shown,) = re.findall(r"```rust\n(.*?)```", README, re.DOTALL)
    example = (FOLDER / "examples/stream.rs").read_text()
    assert shown == re.sub(r"^//!.*\n", "", example, flags=re.MULTILINE).lstrip()
    body = shown[shown.index("async fn main") :].splitlines()[1:-1]
    assert len(body) <= 10
