from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class FetchBlocksRequest(_message.Message):
    __slots__ = ("ticket_token", "model_digest", "kv_type", "layout", "block_tokens", "block_hashes", "unit_hashes")
    TICKET_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_TYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    UNIT_HASHES_FIELD_NUMBER: _ClassVar[int]
    ticket_token: bytes
    model_digest: bytes
    kv_type: str
    layout: str
    block_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    unit_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket_token: _Optional[bytes] = ..., model_digest: _Optional[bytes] = ..., kv_type: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., unit_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchBlocksResponse(_message.Message):
    __slots__ = ("block_hash", "data", "parent_hash", "unit_hashes")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    UNIT_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    data: bytes
    parent_hash: bytes
    unit_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, block_hash: _Optional[bytes] = ..., data: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., unit_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...
