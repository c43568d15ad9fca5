"""KvTransferService: in the protocol, not yet served by this version."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dragoman.errors import DragomanError
from dragoman.serving import Context
from dragoman.v1 import error_pb2, kv_transfer_service_pb2, kv_transfer_service_pb2_grpc


class KvTransferServicer(kv_transfer_service_pb2_grpc.KvTransferServiceServicer):
    """Refuses: KV blocks of this version stay on their device."""

    async def FetchBlocks(
        self, request: kv_transfer_service_pb2.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[kv_transfer_service_pb2.FetchBlocksResponse]:
        """Always UNIMPLEMENTED."""
        raise DragomanError(
            error_pb2.ERROR_REASON_UNIMPLEMENTED,
            "this agent does not hand out KV blocks; compute the prefix again instead of fetching it",
        )
        yield  # makes this a stream
