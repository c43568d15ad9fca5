"""What is said of errors, and of parts that are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_cli import failure
from dragoman_cli.failure import Failure, missing_module, report, require_extras


def test_a_missing_extra_names_the_module_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(failure.EXTRAS, "agent", ("json", "no_such_module_here"))
    assert missing_module("agent") == "no_such_module_here"
    with pytest.raises(Failure) as raised:
        require_extras("agent", "controller", purpose="dragoman up")
    assert raised.value.what == "dragoman up needs parts of Dragoman that are not installed: agent"
    assert "no module no_such_module_here" in raised.value.why
    assert raised.value.remedy == failure.install_command("agent")


@pytest.mark.parametrize(
    ("module", "missing", "arguments"),
    [
        ("dragoman_cli.entry", "typer", ("--help",)),
        ("dragoman_controller.main", "grpc_health", ("--port", "0", "--metrics-port", "0")),
        ("dragoman_gateway.main", "uvicorn", ("--port", "0")),
        ("dragoman_agent.main", "numpy", ("--device", "null", "--open", "--port", "0", "--metrics-port", "0")),
    ],
)
def test_a_command_without_its_extra_says_so_in_one_line(module: str, missing: str, arguments: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom {module} import main\nmain()"
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"the Python module '{missing}" in done.stderr and " is missing in " in done.stderr
    assert "run `make setup`, or: " in done.stderr and "'dragoman[agent,controller,gateway]'" in done.stderr


def test_a_file_that_cannot_be_used_is_named() -> None:
    told = failure.to_failure(PermissionError(13, "Permission denied", "/a/b"))
    assert (told.what, told.remedy) == ("/a/b cannot be used: permission denied", "check the path and the rights on it")
    assert failure.to_failure(OSError("odd")).what == "odd"


def test_a_module_that_is_not_used_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(failure.EXTRAS, "agent", ("json", "no_such_module_here"))
    require_extras("agent", purpose="dragoman plan", unused=("no_such_module_here",))
    with pytest.raises(Failure):
        require_extras("agent", purpose="dragoman plan", unused=("json",))


@pytest.mark.parametrize(
    ("has_pip", "command"),
    [
        (True, f"{sys.executable} -m pip install 'dragoman[agent,bench]'"),
        (False, f"uv pip install --python {sys.executable} 'dragoman[agent,bench]'"),
    ],
)
def test_the_command_is_one_that_the_environment_has(
    monkeypatch: pytest.MonkeyPatch, has_pip: bool, command: str
) -> None:
    monkeypatch.setattr(failure, "find_spec", lambda name: name if name == "pip" and has_pip else None)
    assert failure.install_command("agent", "bench") == command


def test_extras_name_modules_that_exist_where_all_is_installed() -> None:
    require_extras("agent", "controller", "gateway", purpose="this test")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (Failure("a", "b", "c"), "error: a\n  why: b\n  do:  c\n"),
        (Failure("a"), "error: a\n"),
        (
            DragomanError(error_pb2.ERROR_REASON_QUEUE_FULL, "the queue is full; wait"),
            "error: the queue is full; wait\n",
        ),
        (
            FileNotFoundError(2, "No such file", "x"),
            "error: x cannot be used: no such file\n  do:  check the path and the rights on it\n",
        ),
        (
            ZeroDivisionError("x"),
            "error: an unexpected ZeroDivisionError: x\n  why: this is a fault of Dragoman\n"
            "  do:  run it again with -v to see where, and report that\n",
        ),
    ],
)
def test_errors_are_words(
    error: Exception, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAGOMAN_DEBUG", raising=False)
    assert report(error) == 1
    assert capsys.readouterr().err == shown


def test_a_traceback_on_request(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_DEBUG", "1")
    try:
        raise Failure("a", exit_code=3)
    except Failure as error:
        assert report(error) == 3
    assert "Traceback" in capsys.readouterr().err
