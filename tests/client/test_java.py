"""The Java client: its own tests and linters pass, its README's examples run against real processes."""

from __future__ import annotations

import os
import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from clients.conformance.language import built, cache_folder, load_languages
from tests.needs import skip_without

from dragoman import Client

LANGUAGE = load_languages()["java"]
README = (LANGUAGE.folder / "README.md").read_text(encoding="utf-8")
EXAMPLES = LANGUAGE.folder / "src/test/java/dev/dragoman/examples"
POM = "{http://maven.apache.org/POM/4.0.0}"


@pytest.fixture(scope="module", autouse=True)
def maven() -> None:
    if missing := LANGUAGE.missing():
        skip_without(missing, f"the Java client: {missing} is not on the PATH")


@pytest.fixture(scope="module")
def target() -> Path:
    """What is built with the conformance runner, once for both."""
    return built(LANGUAGE) / "target"


def run(*command: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=LANGUAGE.folder,
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_unit_tests_pass(target: Path) -> None:
    shown = run("mvn", "--batch-mode", f"-Ddragoman.build={target}", "test")
    (passed,) = re.findall(r"Tests run: (\d+), Failures: 0, Errors: 0, Skipped: 0$", shown, re.MULTILINE)[-1:]
    assert int(passed) > 100


def test_linters_are_content() -> None:
    """The compiler and Error Prone, every warning an error; what did not change since is not looked at again."""
    run(
        "mvn", "--batch-mode", "--quiet", "-Plint", f"-Ddragoman.build={cache_folder() / 'java' / 'lint'}", "test-compile"
    )  # fmt: skip


def test_it_depends_on_grpc_and_protobuf_alone() -> None:
    project = ElementTree.parse(LANGUAGE.folder / "pom.xml").getroot()
    own = [
        str(dependency.findtext(f"{POM}groupId"))
        for dependency in project.findall(f"{POM}dependencies/{POM}dependency")
        if dependency.findtext(f"{POM}scope") != "test"
    ]
    assert set(own) == {"io.grpc", "com.google.protobuf"}
    assert project.find(f"{POM}repositories") is None and project.find(f"{POM}pluginRepositories") is None
    unpinned = [
        plugin.findtext(f"{POM}artifactId")
        for plugin in project.findall(f"{POM}build/{POM}plugins/{POM}plugin")
        if not plugin.findtext(f"{POM}version")
    ]
    assert not unpinned


@pytest.mark.parametrize("example", ["StreamExample", "ErrorsExample"])
def test_example_runs(example: str, target: Path, controller: str) -> None:
    with Client(controller) as client:
        deadline = time.monotonic() + 10
        while not client.agents():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    shown = run(
        "java", "-cp", f"{target}/test-classes:{target}/classes:{target}/lib/*", f"dev.dragoman.examples.{example}",
        environ={"DRAGOMAN_CONTROLLER": controller},
    )  # fmt: skip
    assert shown.strip(), "an example shows something"
    if example == "ErrorsExample":
        assert "model_not_served false" in shown


def test_the_readme_shows_the_example_that_runs() -> None:
    (shown,) = re.findall(r"```java\n(.*?)```", README, re.DOTALL)
    assert shown == (EXAMPLES / "StreamExample.java").read_text()
    body = shown[shown.index("void main") :].splitlines()[1:]
    assert len(body) <= 10


def test_files_are_short() -> None:
    for path in LANGUAGE.folder.rglob("src/**/*.java"):
        assert len(path.read_text().splitlines()) < 400, path
