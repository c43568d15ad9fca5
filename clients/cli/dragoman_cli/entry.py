"""What the script `dragoman` runs: the command line, or one line where the installed extras do not bring it."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs the command line and exits. The client library alone comes without what the command line is made of."""
    try:
        from dragoman_cli.main import main as run
    except ImportError as error:
        from dragoman_cli.failure import import_problem, wants_traceback

        if wants_traceback():
            raise
        sys.exit(f"dragoman: {import_problem(error)}")
    except KeyboardInterrupt:  # while it was imported
        sys.exit(128 + signal.SIGINT)
    run()
