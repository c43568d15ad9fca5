"""`dragoman-agent`: reads the settings, prepares, serves. Every failure before serving is one line and exit code 2."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from dragoman_agent.config import AgentSettings
from dragoman_agent.tickets import is_loopback
from dragoman_cli.config import parse

PROG = "dragoman-agent"
_EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point."""
    # The engine is spawned (fork and exec) while gRPC runs; its fork handlers serve children that do not exec.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    settings = parse(AgentSettings, PROG, argv)
    problem = settings_problem(settings)
    if problem:
        _fail(problem)
    logging.basicConfig(
        level=settings.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    sys.exit(_run(settings))


def settings_problem(settings: AgentSettings) -> str:
    """What makes the settings unusable together; empty when nothing does."""
    if settings.open and not is_loopback(settings.host):
        return (
            f"--open takes requests from anyone who can reach {settings.host}; it is allowed on loopback addresses only: "
            "use --host 127.0.0.1, or give --controllers and leave --open out"
        )
    if not settings.open and not settings.controllers:
        return "no request could be accepted: give --controllers HOST:PORT, or --open for an agent without tickets"
    return ""


def _run(settings: AgentSettings) -> int:
    # Imported once the settings are known to be good: a wrong flag is told at once.
    from dragoman_agent.agent import Agent
    from dragoman_agent.startup import StartupError, prepare

    async def serve() -> int:
        # Built inside the loop: a gRPC server belongs to the loop it is made in.
        return await Agent(settings, prepared).run()

    try:
        prepared = prepare(settings)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve())
    except StartupError as error:
        logging.getLogger(PROG).debug("startup failed", exc_info=True)
        _fail(str(error))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not built for this platform
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


def _fail(message: str) -> NoReturn:
    print(f"{PROG}: {message}", file=sys.stderr)
    sys.exit(_EXIT_USAGE)


if __name__ == "__main__":
    main()
