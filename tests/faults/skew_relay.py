"""A relay of gRPC calls, as a process, between peers of which one speaks another version of the protocol.

`older`: fields, and methods, that the first version did not have are taken out of what passes, both ways.
`newer`: every message, and every message in it, gets fields that nobody knows yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from dragoman.channel import channel_options, server_options
from dragoman.v1 import (  # noqa: F401 - their services are found by name
    admission_service_pb2,
    agent_registry_service_pb2,
    embedding_service_pb2,
    fleet_service_pb2,
    generation_service_pb2,
    hardware_service_pb2,
    kv_transfer_service_pb2,
    policy_service_pb2,
    prefetch_service_pb2,
    telemetry_service_pb2,
    tokenizer_service_pb2,
)

PACKAGE = "dragoman.v1."
# What has been added since the first version, by message. A new field belongs here.
ADDED: dict[str, tuple[str, ...]] = {
    "AgentLoad": ("kv_fetch_bytes_per_second", "kv_fetch_base_seconds", "kv_tier_bytes_per_second"),
    "Command": ("undrain",),
    "DeregisterAgentRequest": ("outcomes",),
    "ExplainPlacementResponse": ("model", "prompt_tokens", "output_tokens"),
    "FetchBlocksRequest": ("unit_hashes",),
    "FetchBlocksResponse": ("parent_hash", "unit_hashes"),
    "HeartbeatResponse": ("controllers",),
    "PlacementCandidate": ("fetch_seconds",),
    "PrefetchPrefix": ("source_ticket", "source_agent_id", "time_limit"),
    "PublishKvEventsRequest": ("lower_stored_block_hashes", "lower_removed_block_hashes"),
    "RegisterAgentResponse": ("controller_id",),
    "RequestOutcome": ("engine_lost",),
    "ServedModel": ("kv_type", "kv_layout", "kv_bytes_per_token"),
}
ADDED_METHODS = ("FleetService/ListControllers", "FleetService/UndrainAgent")
# Field 1000 as a varint, field 1001 as bytes.
UNKNOWN_FIELDS = b"\xc0\x3e\x07" + b"\xca\x3e\x04new!"


def older(message: Message) -> bool:
    """Take out what the first version did not have; whether there was any."""
    changed = False
    for name in ADDED.get(message.DESCRIPTOR.name, ()):
        field = message.DESCRIPTOR.fields_by_name[name]
        if any(found is field for found, _ in message.ListFields()):
            message.ClearField(name)
            changed = True
    for part in parts(message):
        changed |= older(part)
    return changed


def newer(message: Message) -> bool:
    """Add what no version knows."""
    for part in parts(message):
        newer(part)
    message.MergeFromString(UNKNOWN_FIELDS)
    return True


def parts(message: Message) -> list[Message]:
    """The messages right inside a message."""
    found: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if not field.is_repeated:
            found.append(value)
        elif field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                found.extend(value.values())
        else:
            found.extend(value)
    return found


class Relay(grpc.GenericRpcHandler):
    """Handles every method by calling the same one at the target."""

    def __init__(self, channel: grpc.aio.Channel, change: Callable[[Message], bool], without: tuple[str, ...]) -> None:
        self._channel, self._change, self._without = channel, change, without
        self.num_changed = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See GenericRpcHandler."""
        method = handler_call_details.method
        if method.removeprefix(f"/{PACKAGE}") in self._without:
            return None
        asked, answered = types_of(method)

        async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            call = self._channel.stream_stream(method)(
                self._changed(requests, asked), metadata=context.invocation_metadata(), timeout=context.time_remaining()
            )
            try:
                async for answer in self._changed(call, answered):
                    yield answer
            except grpc.aio.AioRpcError as error:
                context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
                await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _changed(self, messages: AsyncIterator[bytes], kind: type[Message] | None) -> AsyncIterator[bytes]:
        async for data in messages:
            if kind is None:
                yield data
                continue
            message = kind.FromString(data)
            self.num_changed += self._change(message)
            yield message.SerializeToString()


def types_of(method: str) -> tuple[type[Message] | None, type[Message] | None]:
    """The messages of a method of ours; None for those of others."""
    if not method.startswith(f"/{PACKAGE}"):
        return None, None
    service, _, name = method[1:].partition("/")
    found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(found.input_type), message_factory.GetMessageClass(found.output_type)


async def serve(target: str, version: str) -> None:
    """Until SIGTERM; then how many messages were changed goes to stdout."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        relay = Relay(channel, older, ADDED_METHODS) if version == "older" else Relay(channel, newer, ())
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((relay,))
        print(json.dumps({"address": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"}), flush=True)
        await server.start()
        await ended.wait()
        print(json.dumps({"num_changed": relay.num_changed}), flush=True)
        await server.stop(0.2)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--version", required=True, choices=("older", "newer"))
    options = parser.parse_args()
    asyncio.run(serve(options.target, options.version))


if __name__ == "__main__":
    main()
