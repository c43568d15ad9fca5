"""Children that announce, die, hang, outlive, and lose their parent. They are real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from dragoman_cli.failure import Failure
from dragoman_cli.supervisor import STOP_SECONDS, Child, Supervisor


def with_path(folder: Path) -> dict[str, str]:
    """Our environment, with the modules of a folder importable."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Bench:
    """A supervisor whose children are written down in a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[tuple[str, str]] = []
        self.supervisor = Supervisor(lambda name, line: self.log.append((name, line)))

    async def start(self, body: str) -> Child:
        module = f"child_{len(self.supervisor.children)}"
        (self.folder / f"{module}.py").write_text("import sys, time, os\ndef main():\n" + textwrap.indent(body, "    "))
        return await self.supervisor.start("agent", module, [], with_path(self.folder))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_events_and_log(bench: Bench) -> None:
    child = await bench.start(
        "assert sys.argv[-1] == '--announce'\n"
        'print(\'{"event": "progress", "done": 1}\', flush=True)\n'
        "print('not json', flush=True)\n"
        "print('a line of log', file=sys.stderr, flush=True)\n"
        'print(\'{"event": "serving", "grpc": "x:1"}\', flush=True)\n'
        "time.sleep(60)\n"
    )
    assert (await child.event())["event"] == "progress"
    assert (await child.expect("serving"))["grpc"] == "x:1"
    await bench.supervisor.stop()
    assert ("agent", "not json") in bench.log
    assert ("agent", "a line of log") in bench.log


async def test_a_death_shows_the_last_error_line(bench: Bench) -> None:
    child = await bench.start("print('dragoman-agent: the file is broken', file=sys.stderr)\nsys.exit(2)\n")
    with pytest.raises(Failure) as failure:
        await child.expect("serving")
    assert (failure.value.what, failure.value.why) == ("the agent cannot start: the file is broken", "")
    assert bench.log == [], "it is told once"
    await bench.supervisor.stop()


async def test_a_fatal_event_is_the_reason(bench: Bench) -> None:
    child = await bench.start('print(\'{"event": "fatal", "message": "no memory"}\', flush=True)\ntime.sleep(60)\n')
    with pytest.raises(Failure) as failure:
        await child.expect("serving")
    assert failure.value.why == "no memory"
    await bench.supervisor.stop()


async def test_first_death(bench: Bench) -> None:
    await bench.start("time.sleep(60)\n")
    mortal = await bench.start("time.sleep(0.2)\nos.kill(os.getpid(), 9)\n")
    assert await asyncio.wait_for(bench.supervisor.first_death(), 5) is mortal
    assert mortal.death().what == "the agent was killed by SIGKILL"
    assert "want of memory" in mortal.death().why
    assert "dmesg" in mortal.death().remedy
    await bench.supervisor.stop()


async def test_an_end_in_order_is_no_failure_of_the_process(bench: Bench) -> None:
    """As after `dragoman drain`: the last warning is not the reason."""
    child = await bench.start("print('WARNING handing over', file=sys.stderr, flush=True)\n")
    assert await asyncio.wait_for(bench.supervisor.first_death(), 5) is child
    death = child.death()
    assert death.what == "the agent has left"
    assert "drained" in death.why and "handing over" not in death.why
    await bench.supervisor.stop()


async def fails() -> None:
    await asyncio.sleep(0.05)
    raise ConnectionError("cannot reach the agent")


async def test_work_that_fails_with_a_dying_child_fails_with_the_childs_last_words(bench: Bench) -> None:
    await bench.start("time.sleep(60)\n")
    await bench.start("time.sleep(0.3)\nprint('the disk is gone', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(Failure) as failure:
        await bench.supervisor.unless_death(fails())
    assert (failure.value.what, failure.value.why) == ("the agent exited with 3", "the disk is gone")
    await bench.supervisor.stop()


async def test_work_that_fails_beside_healthy_children_fails_with_its_own_words(bench: Bench) -> None:
    await bench.start("time.sleep(60)\n")
    with pytest.raises(ConnectionError, match="cannot reach the agent"):
        await bench.supervisor.unless_death(fails())
    assert await bench.supervisor.unless_death(asyncio.sleep(0, "done")) == "done"
    await bench.supervisor.stop()


async def test_a_child_that_ignores_interrupts_is_killed_in_time(bench: Bench) -> None:
    child = await bench.start(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        'print(\'{"event": "serving"}\', flush=True)\n'
        "time.sleep(60)\n"
    )
    await child.expect("serving")
    began = time.monotonic()
    await bench.supervisor.stop()
    assert STOP_SECONDS - 0.1 <= time.monotonic() - began < STOP_SECONDS + 1.0
    assert child.process.returncode == -signal.SIGKILL


async def test_a_second_signal_does_not_wait(bench: Bench) -> None:
    child = await bench.start(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        'print(\'{"event": "serving"}\', flush=True)\n'
        "time.sleep(60)\n"
    )
    await child.expect("serving")
    hurry = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, hurry.set)
    began = time.monotonic()
    await bench.supervisor.stop(hurry)
    assert time.monotonic() - began < 1.5


async def test_a_grandchild_that_holds_the_log_does_not_hide_a_death(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman_cli.supervisor._LAST_WORDS_SECONDS", 0.5)
    child = await bench.start(
        "import subprocess\n"
        f"p = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(30)'])\n"
        'print(\'{"event": "serving", "pid": %d}\' % p.pid, flush=True)\n'
    )
    pid = (await child.expect("serving"))["pid"]
    await asyncio.wait_for(child.wait(), 10)
    psutil.Process(pid).kill()
    await bench.supervisor.stop()


async def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(
        'import time\ndef main():\n    print(\'{"event": "serving"}\', flush=True)\n    time.sleep(60)\n'
    )
    parent = (
        "import asyncio, os\n"
        "from dragoman_cli.supervisor import Supervisor\n"
        "async def run():\n"
        "    child = await Supervisor(print).start('agent', 'orphan', [], dict(os.environ))\n"
        "    await child.expect('serving')\n"
        "    print(child.process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE, env=with_path(tmp_path)
    )
    assert process.stdout is not None
    orphan = psutil.Process(int(await process.stdout.readline()))
    process.kill()
    await process.wait()
    await asyncio.to_thread(orphan.wait, 5)
    assert not orphan.is_running()
