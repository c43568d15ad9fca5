"""The engine process: reads its arguments, connects to the rpc process, and serves.

Started by the rpc process as `python -m dragoman_agent.engine.process --socket PATH --config JSON`. Imports only what is always
there before it can say what is missing.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from dragoman_agent.engine_process import leave_last_words
from dragoman_cli.failure import import_problem, wants_traceback
from dragoman_cli.process import log_to_stderr

PROG = "dragoman-engine"


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=PROG, description="Started by dragoman-agent; not by hand.")
    parser.add_argument("--socket", required=True, help="Unix socket the rpc process listens on")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args(argv)
    try:
        from dragoman_agent.engine.config import EngineConfig
        from dragoman_agent.engine.serving import serve
    except ImportError as error:
        if wants_traceback():
            raise
        problem = f"the engine cannot start: {import_problem(error)}"
        print(f"{PROG}: {problem}", file=sys.stderr)
        leave_last_words(arguments.socket, problem)
        return 1
    try:
        config = EngineConfig.from_json(arguments.config)
    except ValueError as error:
        parser.error(str(error))
    log_to_stderr(config.log_level)
    # Signals reach the rpc process, which ends the streams and then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        try:
            stream.connect(arguments.socket)
        except OSError as error:
            parser.error(f"--socket {arguments.socket}: cannot connect ({error.strerror or error})")
        return serve(stream, config)


if __name__ == "__main__":
    sys.exit(main())
