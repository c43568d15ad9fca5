"""A server's reflection against what it really answers."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import dragoman.compat
import dragoman.v1

OTHERS = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def services_of(package: Any) -> dict[str, Any]:
    """Descriptors of all services that a package of stubs knows, by full name."""
    found = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name.endswith("_pb2"):
            module = importlib.import_module(f"{package.__name__}.{entry.name}")
            found.update({service.full_name: service for service in module.DESCRIPTOR.services_by_name.values()})
    return found


KNOWN = {**services_of(dragoman.v1), **services_of(dragoman.compat)}


def is_answered(channel: grpc.Channel, service: Any) -> bool:
    """Whether the server has the first method of a service."""
    call = channel.stream_stream(f"/{service.full_name}/{service.methods[0].name}")(iter([b""]), timeout=3)
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code() != grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined, no-any-return]
    finally:
        call.cancel()
    return True


def listed_services(channel: grpc.Channel) -> set[str]:
    """What the server lists, after a look that it answers just these and describes each as its stubs do."""
    database = ProtoReflectionDescriptorDatabase(channel)
    listed = set(database.get_services())
    assert listed == {name for name, service in KNOWN.items() if is_answered(channel, service)} | OTHERS
    pool = DescriptorPool(database)
    for name in listed - OTHERS:
        described, known = (
            {method.name: (method.input_type.full_name, method.output_type.full_name) for method in service.methods}
            for service in (pool.FindServiceByName(name), KNOWN[name])
        )
        assert described == known
    return listed
