"""The engine process as the rpc process holds it: spawned, listened for, watched, ended. Standard library only."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# Our stdout carries the announced events and nothing else; what the engine prints goes to stderr.
_STDERR = 2
TORCH_KINDS = ("cuda", "hip", "xpu")  # of devices, whose libraries take seconds to import and hundreds of megabytes
_LAST_WORDS = "last-words"
_DIRECTORY_PREFIX = "dragoman-agent-"
_KILLED_SECONDS = 0.2


def leave_last_words(socket_path: str, words: str) -> None:
    """Say why the engine ends before it could connect: what it would speak with may be what is missing."""
    with contextlib.suppress(OSError):
        Path(socket_path).with_name(_LAST_WORDS).write_text(words)


def clear_away(socket_path: str) -> None:
    """Remove the socket of an rpc process that was ended before it could do so itself, and the directory that was made for it."""
    path = Path(socket_path)
    with contextlib.suppress(OSError):
        if path.is_socket() and path.parent.name.startswith(_DIRECTORY_PREFIX):
            path.unlink()
            path.parent.rmdir()


class EngineProcess:
    """Spawns the engine and listens on a Unix socket, in a directory of mode 0700, for its one connection."""

    def __init__(self, command: Sequence[str]) -> None:
        """Spawn `command` with `--socket PATH`.

        Its own session: a Ctrl-C at the terminal reaches the rpc process alone, which ends the streams first.
        """
        self._directory = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX))
        path = str(self._directory / "engine.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        listener.setblocking(False)
        self._listener: socket.socket | None = listener
        self._was_killed = False
        self._process = subprocess.Popen(
            [*command, "--socket", path], stdin=subprocess.PIPE, stdout=_STDERR, start_new_session=True
        )

    def configure(self, config: str) -> None:
        """Give it its configuration, once. One that has ended meanwhile is noticed by who watches."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(config.encode())
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs or is not yet known to have ended."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """What it said when it ended before it connected; empty when it said nothing."""
        with contextlib.suppress(OSError):
            return (self._directory / _LAST_WORDS).read_text()
        return ""

    def take_listener(self) -> socket.socket:
        """The listening socket, once; who takes it closes it."""
        listener, self._listener = self._listener, None
        if listener is None:
            raise RuntimeError("the engine's listening socket was taken before")
        return listener

    def forget_socket(self) -> None:
        """Remove the socket's directory once the engine has connected: nothing is left behind whatever ends us."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` from a thread when the process has ended."""

        def wait() -> None:
            self._process.wait()
            on_exit()

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    def kill(self, patience_seconds: float = _KILLED_SECONDS) -> None:
        """End it at once and release everything. Waits so long for its end, which a driver may hold up; a second call does not."""
        if self._process.poll() is None and not self._was_killed:
            self._was_killed = True
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_seconds)
        self._close_stdin()
        if self._listener is not None:
            self._listener.close()
        self.forget_socket()
