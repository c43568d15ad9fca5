"""Reflection of a real agent, read as a command line client reads it: list, describe, call, without stubs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.reflection import listed_services


@pytest.fixture(scope="module")
def sync_channel(shared_agent: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(shared_agent.address) as channel:
        yield channel


def test_every_service_is_listed_and_described(sync_channel: grpc.Channel) -> None:
    ours = {"Generation", "Embedding", "Tokenizer", "Hardware", "Telemetry", "KvTransfer"}
    listed = listed_services(sync_channel)
    assert {f"dragoman.v1.{name}Service" for name in ours} | {"vllm.grpc.engine.VllmEngine"} <= listed
    assert "dragoman.v1.AdmissionService" not in listed, "that is the controller's"


@pytest.mark.parametrize(
    ("service", "method", "fields", "answer"),
    [
        ("dragoman.v1.TokenizerService", "Tokenize", {"text": "hi"}, {"tokenIds": {"ids": [104, 105]}}),
        ("vllm.grpc.engine.VllmEngine", "HealthCheck", {}, {"healthy": True}),
        ("grpc.health.v1.Health", "Check", {"service": "vllm.grpc.engine.VllmEngine"}, {"status": "SERVING"}),
    ],
)
def test_a_call_needs_no_stubs(
    sync_channel: grpc.Channel, service: str, method: str, fields: dict[str, Any], answer: dict[str, Any]
) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(sync_channel))
    described = pool.FindServiceByName(service).FindMethodByName(method)
    call = sync_channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(described.output_type).FromString,
    )
    got = MessageToDict(call(ParseDict(fields, GetMessageClass(described.input_type)()), timeout=5))
    assert {name: got[name] for name in answer} == answer
