"""`dragoman-agent`: reads the settings, prepares, serves. Every failure before serving is one line and exit code 2."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, NoReturn

from dragoman.channel import quiet_grpc
from dragoman_agent.config import AgentSettings, settings_problem
from dragoman_cli.config import parse
from dragoman_cli.failure import import_problem
from dragoman_cli.process import leave, log_to_stderr, loop_factory

if TYPE_CHECKING:
    from dragoman.tls import TlsIdentity

PROG = "dragoman-agent"
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130  # as a shell has it: 128 and the number of SIGINT


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point."""
    quiet_grpc()
    settings = parse(AgentSettings, PROG, argv)
    problem = settings_problem(settings)
    if problem:
        _fail(problem)
    log_to_stderr(settings.log_level)
    try:
        code = _run(settings)
    except KeyboardInterrupt:  # before the agent has handlers of its own
        print(f"{PROG}: interrupted before it served", file=sys.stderr)
        code = _EXIT_INTERRUPTED
    leave(code)


def _run(settings: AgentSettings) -> int:
    from dragoman_agent.startup import StartupError, prepare

    try:
        tls = _identity(settings)
        with prepare(settings) as prepared:
            # Imported while the engine process starts: gRPC and the rest take as long as its own imports.
            import asyncio

            from dragoman_agent.agent import Agent

            async def serve() -> int:
                # Built inside the loop: a gRPC server belongs to the loop it is made in.
                return await Agent(settings, prepared, tls).run()

            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(serve())
    except StartupError as error:
        logging.getLogger(PROG).debug("startup failed", exc_info=True)
        _fail(str(error))
    except ImportError as error:
        logging.getLogger(PROG).debug("startup failed", exc_info=True)
        _fail(import_problem(error))


def _identity(settings: AgentSettings) -> TlsIdentity | None:
    """The agent's TLS identity, if it is given one. Exits where its files cannot be used."""
    files = (settings.tls_certificate, settings.tls_key, settings.tls_ca)
    if files == (None, None, None):
        return None  # without importing gRPC, which can wait until the engine process is spawned
    from dragoman.tls import TlsError, read_tls

    try:
        return read_tls(*files)
    except TlsError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"{PROG}: {message}", file=sys.stderr)
    sys.exit(_EXIT_USAGE)


if __name__ == "__main__":
    main()
