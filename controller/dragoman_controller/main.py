"""The command dragoman-controller."""

from __future__ import annotations

import asyncio
import gc
import sys

from dragoman.channel import quiet_grpc
from dragoman_cli.config import parse
from dragoman_cli.failure import import_problem, wants_traceback
from dragoman_cli.process import log_to_stderr, loop_factory
from dragoman_controller.config import ControllerSettings

# A decision makes some twenty small objects that live until its request ends. By default the collector looks at the young
# ones after every 30 decisions, and ever again at all that are remembered: a tenth of the controller's time, for cycles
# that it next to never makes (one object in a thousand, of calls that end). Most of what is young at this threshold has
# gone by itself before the collector comes.
_GC_THRESHOLDS = 500_000, 20, 50


def main() -> None:
    """Serves until a signal. Exit codes: 0 stopped, 2 cannot start."""
    quiet_grpc()
    settings = parse(ControllerSettings, "dragoman-controller")
    log_to_stderr(settings.log_level)
    # Imported here so that --help and bad settings answer without loading gRPC.
    try:
        from dragoman_controller.server import StartupError, serve
    except ImportError as error:
        if wants_traceback():
            raise
        print(f"dragoman-controller: {import_problem(error)}", file=sys.stderr)
        raise SystemExit(2) from None

    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve(settings))
    except StartupError as error:
        print(f"dragoman-controller: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
