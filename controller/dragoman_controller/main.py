"""The command dragoman-controller."""

from __future__ import annotations

import asyncio
import logging
import sys

from dragoman.channel import quiet_grpc
from dragoman_cli.config import parse
from dragoman_controller.config import ControllerSettings


def main() -> None:
    """Serves until a signal. Exit codes: 0 stopped, 2 cannot start."""
    quiet_grpc()
    settings = parse(ControllerSettings, "dragoman-controller")
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Imported here so that --help and bad settings answer without loading gRPC.
    from dragoman_controller.server import StartupError, serve

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings))
    except StartupError as error:
        print(f"dragoman-controller: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        # The package leaves it out where it does not exist (Windows).
        return None
    return uvloop.Loop


if __name__ == "__main__":
    main()
