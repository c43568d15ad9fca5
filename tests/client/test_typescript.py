"""The TypeScript client: its own tests and linters pass, its README's example is one that runs against real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from clients.conformance.language import built, load_languages
from tests.needs import skip_without

from dragoman import Client

LANGUAGE = load_languages()["typescript"]
README = (LANGUAGE.folder / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def package() -> Path:
    """The built package: tsc has found nothing to say about sources, tests, runner and examples."""
    if missing := LANGUAGE.missing():
        skip_without(missing, f"the TypeScript client: {missing} is not on the PATH")
    return built(LANGUAGE)


def run(package: Path, *command: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=package,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_unit_tests_pass(package: Path) -> None:
    shown = run(package, "npm", "test", "--silent")
    (passed,) = re.findall(r"^# pass (\d+)$", shown, re.MULTILINE)
    assert int(passed) > 30


def test_linters_are_content(package: Path) -> None:
    run(package, "npm", "run", "lint", "--silent")


def test_it_depends_on_grpc_and_protobuf_alone() -> None:
    manifest = json.loads((LANGUAGE.folder / "package.json").read_text())
    assert sorted(manifest["dependencies"]) == ["@bufbuild/protobuf", "@grpc/grpc-js"]
    locked = json.loads((LANGUAGE.folder / "package-lock.json").read_text())
    assert locked["packages"][""]["dependencies"] == manifest["dependencies"], "run `npm install --package-lock-only`"
    assert not [name for name, entry in locked["packages"].items() if "resolved" in entry], (
        "no addresses in it: see .npmrc"
    )


@pytest.mark.parametrize("example", ["stream", "errors"])
def test_example_runs(example: str, package: Path, controller: str) -> None:
    with Client(controller) as client:
        deadline = time.monotonic() + 10
        while not client.agents():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    shown = run(package, "node", f"dist/examples/{example}.js", environ={"DRAGOMAN_CONTROLLER": controller})
    assert shown.strip(), "an example shows something"
    if example == "errors":
        assert "model_not_served false" in shown


def test_the_readme_shows_the_example_that_runs() -> None:
    (shown,) = re.findall(r"```ts\n(.*?)```", README, re.DOTALL)
    assert shown == (LANGUAGE.folder / "examples/stream.ts").read_text()
    assert len(shown.splitlines()) <= 10
