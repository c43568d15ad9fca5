"""The command line towards a cell that speaks TLS: real processes, certificates of this test's own authority."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.conformance.certificates import Authority
from tests.cli.command import Dragoman, assert_error
from tests.gateway.stack import Process

from dragoman_cli.ready import read_facts


@dataclass
class Cell:
    """A controller and one agent of it."""

    controller: str
    agent: str
    environ: dict[str, str]  # of a client that may talk to them


def write(folder: Path, authority: Authority, name: str) -> tuple[str, str, str]:
    """Paths of a certificate for `name`, its key, and the authority's certificate."""
    paths = [folder / f"{name}.{kind}" for kind in ("pem", "key")] + [folder / "ca.pem"]
    key, certificate = authority.issue(name)
    for path, text in zip(paths, (certificate, key, authority.pem), strict=True):
        path.write_text(text)
    return str(paths[0]), str(paths[1]), str(paths[2])


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder, authority = tmp_path_factory.mktemp("tls"), Authority()

    def flags(name: str, last: str) -> list[str]:
        given = zip(("--tls-certificate", "--tls-key", last), write(folder, authority, name), strict=True)
        return [word for pair in given for word in pair]

    controller = Process(
        "dragoman_controller.main", "--port", "0", "--metrics-port", "0", *flags("controller", "--tls-client-ca")
    )
    address = controller.wait_for("serving")["grpc"]
    agent = Process(
        "dragoman_agent.main", "--device", "null", "--model", "null", "--port", "0", "--metrics-port", "0",
        "--controllers", address, "--agent-id", "agent-of-tls", *flags("agent-of-tls", "--tls-ca"),
    )  # fmt: skip
    names = ("DRAGOMAN_TLS_CERTIFICATE", "DRAGOMAN_TLS_KEY", "DRAGOMAN_TLS_CA")
    environ = dict(zip(names, write(folder, authority, "person"), strict=True))
    served = agent.wait_for("serving")["grpc"]
    agent.wait_for("ready")
    yield Cell(address, served, environ)
    for process in (agent, controller):
        process.stop()


def test_explain_knows_the_agent_by_its_id(cell: Cell, dragoman: Dragoman) -> None:
    done = dragoman("explain", "--agent", cell.agent, "--agent-id", "agent-of-tls", "--json", environ=cell.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "null"


def test_explain_says_what_is_missing(cell: Cell, dragoman: Dragoman) -> None:
    for arguments in ((), ("--agent-id", "another")):
        done = dragoman("explain", "--agent", cell.agent, *arguments, environ=cell.environ)
        assert_error(done, "its certificate is not for this name", "an agent's its agent id")
    assert_error(dragoman("explain", "--agent", cell.agent), "see the --tls flags")
    done = dragoman("explain", "--agent", cell.agent, "--agent-id", "agent-of-tls")
    assert_error(done, "--agent-id has no effect without TLS", "set DRAGOMAN_TLS_CERTIFICATE", code=2)
    half = {"DRAGOMAN_TLS_CERTIFICATE": cell.environ["DRAGOMAN_TLS_CERTIFICATE"]}
    assert_error(dragoman("explain", "--agent", cell.agent, environ=half), "TLS needs all three of")


def test_ps_lists_the_agent(cell: Cell, dragoman: Dragoman) -> None:
    done = dragoman("ps", "--controller", cell.controller, "--json", environ=cell.environ)
    assert done.returncode == 0, done.stderr
    assert "agent-of-tls" in done.stdout
    assert_error(dragoman("ps", "--controller", cell.controller), "see the --tls flags")


def test_the_facts_of_the_ready_box(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cell.environ.items():
        monkeypatch.setenv(name, value)
    facts = asyncio.run(read_facts(cell.agent, "agent-of-tls"))
    assert facts["model"] == "null" and facts["device_kind"] == "null"
