"""Runs one server process for `dragoman up` and ends it when `up` is gone, however it went (kill -9 included).

The parent holds the other end of our stdin and never writes: end of file means that it no longer exists. This works on
every system, and unlike PR_SET_PDEATHSIG does not depend on which thread of the parent started us.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

from dragoman_cli.failure import import_problem, wants_traceback

# Time to end streams with a reason before the process is simply ended.
_GRACE_SECONDS = 4.0


def main() -> None:
    """`python -m dragoman_cli.child MODULE ARGUMENTS...`"""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    try:
        importlib.import_module(module).main()
    except ImportError as error:
        if wants_traceback():
            raise
        sys.exit(import_problem(error))


def _watch_parent() -> None:
    try:
        while os.read(0, 64):
            pass
    except OSError:
        pass
    timer = threading.Timer(_GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
