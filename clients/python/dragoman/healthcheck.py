"""`python -m dragoman.healthcheck HOST:PORT [SERVICE]`: exit 0 when the gRPC health service says SERVING, for containers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dragoman.address import address_problem
from dragoman.channel import quiet_grpc

if TYPE_CHECKING:
    import grpc

_MAX_NAME_BYTES = 128  # from which on a length takes a second byte
_SERVING = b"\x08\x01"  # HealthCheckResponse {status: SERVING}; grpc.health.v1 is frozen


def check(address: str, service: str = "", timeout_seconds: float = 2.0) -> str:
    """Empty when the service is serving, else why not."""
    quiet_grpc()
    import grpc

    from dragoman.tls import TlsError

    name = service.encode(errors="surrogateescape")
    if len(name) >= _MAX_NAME_BYTES:
        return f"{address}: the service has {len(name)} bytes in its name, no service of a server here has {_MAX_NAME_BYTES}"
    if problem := address_problem(address):
        return f"the address {address!r} {problem}"
    request = (b"\x0a" + bytes([len(name)]) + name) if name else b""  # HealthCheckRequest {service: name}
    try:
        with _channel(address) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            answer: bytes = call(request, timeout=timeout_seconds)
    except TlsError as error:
        return str(error)
    except grpc.RpcError as error:
        return f"{address} {service}: {error.code().name}: {error.details()}"
    return "" if answer == _SERVING else f"{address} {service}: not serving"


def _channel(address: str) -> grpc.Channel:
    """Under TLS the check runs beside its server, with the server's own certificate, whatever name that is for."""
    import grpc

    from dragoman.tls import environment_identity

    identity = environment_identity()
    if identity is None:
        return grpc.insecure_channel(address)
    options = [("grpc.ssl_target_name_override", name) for name in identity.names[:1]]
    return grpc.secure_channel(address, identity.channel_credentials(), options=options)


def main() -> int:
    """The command."""
    if not 2 <= len(sys.argv) <= 3:
        print("usage: python -m dragoman.healthcheck HOST:PORT [SERVICE]", file=sys.stderr)
        return 2
    problem = check(sys.argv[1], "".join(sys.argv[2:]))
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
