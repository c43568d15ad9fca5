"""Logs that cannot be written: counted, told of afterwards, and no reason to end or to end badly."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dragoman_cli.process import LogHandler, count_lost_records

PROGRAM = """
import logging, os, sys
from dragoman_cli.process import LogHandler, log_to_stderr
log_to_stderr("info")
for number in range(3000):
    logging.getLogger("test").warning("record %d", number)
kept = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
lost = LogHandler.num_lost
os.dup2(kept, 2)
logging.getLogger("test").warning("after")
print(lost)
"""


def test_records_for_a_full_disk_are_counted_and_told_of_and_the_process_ends_well(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "log")],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=30,
        )
    assert (done.returncode, done.stdout) == (0, "3000\n")
    told, after = (tmp_path / "log").read_text().splitlines()
    assert told == "3000 log records before this one were lost: No space left on device" and after.endswith("after")


def test_a_process_whose_disk_stays_full_ends_well() -> None:
    with open("/dev/full", "w") as full:
        program = PROGRAM.replace("os.dup2(kept, 2)", "")
        done = subprocess.run(
            [sys.executable, "-c", program, "/dev/null"], stdout=subprocess.PIPE, stderr=full, timeout=30
        )
    assert done.returncode == 0


@pytest.mark.parametrize("stdout", ["open", "closed", "full"])
def test_leaving_writes_what_is_left_and_ends_with_the_code_whatever_stdout_is(stdout: str, tmp_path: Path) -> None:
    redirect = {"open": f"> {tmp_path / 'out'}", "closed": ">&-", "full": "> /dev/full"}[stdout]
    program = "from dragoman_cli.process import leave; print('the last line', end=''); leave(3)"
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, program]
    environ = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that something is left
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (3, "")
    assert stdout != "open" or (tmp_path / "out").read_text() == "the last line"


@pytest.fixture
def lost() -> Iterator[None]:
    before = LogHandler.num_lost
    LogHandler.num_lost = 7
    yield
    LogHandler.num_lost = before


@pytest.mark.usefixtures("lost")
def test_the_count_is_a_metric() -> None:
    registry = CollectorRegistry()
    count_lost_records(registry)
    assert b"dragoman_log_records_lost_total 7.0" in generate_latest(registry)


def test_a_stand_in_for_stderr_gets_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    handler = LogHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.emit(logging.LogRecord("a", logging.INFO, os.devnull, 1, "hello %s", ("you",), None))
    assert capsys.readouterr().err == "hello you\n"
