"""The engine process: imports what it needs, reads its EngineConfig, connects to the rpc process, and serves.

Started by the rpc process as `python -m dragoman_agent.engine.process --socket PATH --import-device KIND`, before anything is
planned; the config comes on stdin, as JSON up to its end. Imports only what is always there before it can say what is missing.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys

from dragoman_agent.engine.start_times import StartTimes
from dragoman_agent.engine_process import TORCH_KINDS, clear_away, leave_last_words
from dragoman_cli.failure import import_problem, wants_traceback
from dragoman_cli.process import log_to_stderr

PROG = "dragoman-engine"


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog=PROG, description="Started by dragoman-agent; not by hand.")
    parser.add_argument("--socket", required=True, help="Unix socket the rpc process listens on")
    parser.add_argument("--import-device", default="", help="kind of device whose library is imported meanwhile")
    arguments = parser.parse_args(argv)
    # Signals reach the rpc process, which ends the streams and then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    times = StartTimes()
    kind = arguments.import_device
    try:
        libraries = None
        if kind in TORCH_KINDS:
            from dragoman_agent.engine.native import TorchLibraries

            libraries = TorchLibraries(note=times.moment)
        from dragoman_agent.device.base import DeviceError
        from dragoman_agent.engine.ahead import DeviceImport
        from dragoman_agent.engine.config import EngineConfig
        from dragoman_agent.engine.serving import serve
    except ImportError as error:
        if wants_traceback():
            raise
        problem = f"the engine cannot start: {import_problem(error)}"
        print(f"{PROG}: {problem}", file=sys.stderr)
        leave_last_words(arguments.socket, problem)
        return 1
    times.mark("imports")
    try:
        # After the imports above: these two at the same time would hinder each other more than they would gain.
        library = DeviceImport(kind, libraries, times.moment) if kind else None
        text = sys.stdin.read()
        if not text:
            print(f"{PROG}: no configuration came on stdin: the agent has ended before it had a plan", file=sys.stderr)
            clear_away(arguments.socket)
            return 1
        config = EngineConfig.from_json(text)
    except (ValueError, DeviceError) as error:
        parser.error(str(error))
    times.mark("plan")
    log_to_stderr(config.log_level)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        try:
            stream.connect(arguments.socket)
        except OSError as error:
            clear_away(arguments.socket)
            parser.error(f"--socket {arguments.socket}: cannot connect ({error.strerror or error})")
        code = serve(stream, config, times, library)
    if code:
        # Without an interpreter's end: what torch lets go of there may wait for a device that has failed, or abort.
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    gc.disable()  # until all is imported, which stays: a tenth of the time went into looking through it again and again
    sys.exit(main())
