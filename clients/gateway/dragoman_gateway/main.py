"""The command dragoman-gateway."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

from dragoman.address import is_loopback
from dragoman.channel import quiet_grpc
from dragoman_cli.config import parse
from dragoman_cli.failure import import_problem, wants_traceback
from dragoman_cli.process import leave, log_to_stderr
from dragoman_gateway.config import GatewaySettings

_QUIET = ("uvicorn.error",)  # its start and stop lines; ours say the same


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the gateway. Exits 2 with one line when the settings cannot be used."""
    quiet_grpc()
    settings = parse(GatewaySettings, "dragoman-gateway", argv)
    log_to_stderr(settings.log_level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    # Imported here so that --help and bad settings answer without loading gRPC.
    try:
        from dragoman_gateway.server import StartError, bind, read_api_keys, read_controllers, read_identity, run
    except ImportError as error:
        if wants_traceback():
            raise
        sys.exit(_refuse(import_problem(error)))
    try:
        read_controllers(settings)
        keys, tls = read_api_keys(settings), read_identity(settings)
        listener = bind(settings.host, settings.port)
    except StartError as error:
        sys.exit(_refuse(str(error)))
    if not is_loopback(settings.host) and not keys:
        logging.getLogger(__name__).warning("listening on %s without --api-key: anyone there may use it", settings.host)
    run(settings, listener, keys, tls)
    leave(0)


def _refuse(message: str) -> int:
    sys.stderr.write(f"dragoman-gateway: {message}\n")
    return 2


if __name__ == "__main__":
    main()
