"""The Go client: its stubs are fresh, its own tests and linters pass, its README's examples run against real processes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from tests.client.go_stubs import ROOT, generate, tools
from tests.needs import skip_without
from tests.toolchains import version

from dragoman import Client

FOLDER = ROOT / "clients/go"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def go() -> None:
    if not version(["go", "version"]):
        skip_without("go", "the Go client: go is not on the PATH")


def run(*command: str | Path, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=FOLDER,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_stubs_equal_a_fresh_generation(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "dragomanv1").iterdir()}
    held = {path.name: path.read_text() for path in (FOLDER / "dragomanv1").iterdir()}
    assert sorted(fresh) == sorted(held), "run `make protos`"
    for name, text in fresh.items():
        assert held[name] == text, f"{name} is stale: run `make protos`"


def test_unit_tests_pass() -> None:
    run("go", "test", "./...")


def test_linters_are_content() -> None:
    assert run("gofmt", "-l", ".") == ""
    run("go", "vet", "./...")
    run(tools() / "staticcheck", "./...")


def test_it_depends_on_grpc_and_protobuf_alone() -> None:
    direct = re.findall(r"^\t(\S+) v\S+$", (FOLDER / "go.mod").read_text(), re.MULTILINE)
    assert sorted(direct) == ["google.golang.org/grpc", "google.golang.org/protobuf"]
    run("go", "mod", "tidy", "-diff")


@pytest.mark.parametrize("example", ["stream", "errors"])
def test_example_runs(example: str, controller: str) -> None:
    with Client(controller) as client:
        deadline = time.monotonic() + 10
        while not client.agents():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    shown = run("go", "run", f"./examples/{example}", environ={"DRAGOMAN_CONTROLLER": controller})
    assert shown.strip(), "an example shows something"
    if example == "errors":
        assert "model_not_served false" in shown


def test_the_readme_shows_the_example_that_runs() -> None:
    (shown,) = re.findall(r"```go\n(.*?)```", README, re.DOTALL)
    assert shown == (FOLDER / "examples/stream/main.go").read_text()
    body = shown[shown.index("func main") :].splitlines()[1:-1]
    handling = [line for line in body if "err != nil" in line or "log.Fatal" in line or line.strip() == "}"]
    assert len(body) - len(handling) <= 10
