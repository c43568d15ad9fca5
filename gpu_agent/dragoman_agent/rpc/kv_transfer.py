"""KvTransferService: hands cached KV blocks to other agents of the cell, and knows the format they are in."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.errors import DragomanError
from dragoman.prefix_hash import transfer_digest
from dragoman.serving import Context
from dragoman.v1 import error_pb2, kv_transfer_service_pb2_grpc
from dragoman.v1 import kv_transfer_service_pb2 as pb
from dragoman_agent.engine.messages import CachedBlock, ExportBlocks
from dragoman_agent.rpc.engine_client import EngineClient
from dragoman_agent.rpc.gate import Gate
from dragoman_agent.tickets import Presented

MAX_NUM_UNITS = 16_384
MAX_NUM_TRANSFERS = 4
# A step waits for at most as much to be copied; a message holds at most as much.
PART_BYTES, PIECE_BYTES = 1 << 20, 4 << 20


@dataclass(frozen=True, slots=True)
class KvFormat:
    """What two agents must have in common for blocks to pass between them."""

    model_digest: bytes
    kv_type: str
    layout: str
    block_tokens: int
    block_bytes: int

    @classmethod
    def of_ready(cls, info: Mapping[str, Any], model_digest: bytes, block_tokens: int) -> KvFormat | None:
        """From what the engine said when it was ready; None when its device exchanges no blocks."""
        if not info.get("kv_block_bytes"):
            return None
        return cls(model_digest, info["kv_type"], info["kv_layout"], block_tokens, int(info["kv_block_bytes"]))

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token."""
        return self.block_bytes // self.block_tokens

    def request(self, ticket_token: bytes, unit_hashes: tuple[int, ...]) -> pb.FetchBlocksRequest:
        """The request for blocks of this format."""
        return pb.FetchBlocksRequest(
            ticket_token=ticket_token,
            model_digest=self.model_digest,
            kv_type=self.kv_type,
            layout=self.layout,
            block_tokens=self.block_tokens,
            unit_hashes=unit_hashes,
        )

    def check(self, request: pb.FetchBlocksRequest) -> None:
        """Raises KV_LAYOUT_MISMATCH naming what differs."""
        for name, own, asked in (
            ("model_digest", self.model_digest.hex(), request.model_digest.hex()),
            ("kv_type", self.kv_type, request.kv_type),
            ("layout", self.layout, request.layout),
            ("block_tokens", self.block_tokens, request.block_tokens),
        ):
            if own != asked:
                raise DragomanError(
                    error_pb2.ERROR_REASON_KV_LAYOUT_MISMATCH,
                    f"{name} is {asked!r} there and {own!r} here: compute the prefix instead of fetching it",
                    metadata={"param": name},
                )


class KvTransferServicer(kv_transfer_service_pb2_grpc.KvTransferServiceServicer):
    """Reads a part at a time between two steps; a slow reader holds up nothing but itself."""

    def __init__(self, engine: EngineClient, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._num_transfers = 0
        self.format: KvFormat | None = None
        """Set once the engine is ready."""

    async def FetchBlocks(
        self, request: pb.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[pb.FetchBlocksResponse]:
        """The blocks that lead to the last cached unit, in order; none when nothing of the prefix is cached."""
        command, block_format = self._checked(request)
        self._num_transfers += 1
        try:
            command.max_num_blocks = max(PART_BYTES // block_format.block_bytes, 1)
            while True:
                part = await self._engine.export_blocks(command)
                for block in part.blocks:
                    for piece in _pieces(block):
                        yield piece
                command.first += len(part.blocks)
                if not part.blocks or command.first >= part.num_cached:
                    return
        finally:
            self._num_transfers -= 1

    def _checked(self, request: pb.FetchBlocksRequest) -> tuple[ExportBlocks, KvFormat]:
        """Raises DragomanError."""
        units = request.unit_hashes
        if not 0 < len(units) + len(request.block_hashes) <= MAX_NUM_UNITS or (units and request.block_hashes):
            raise DragomanError(
                error_pb2.ERROR_REASON_INVALID_REQUEST,
                f"unit_hashes or block_hashes must hold 1 to {MAX_NUM_UNITS} hashes, and only one of the two any",
                metadata={"param": "unit_hashes"},
            )
        bound = tuple(units) or tuple(int.from_bytes(block[:8], "little") for block in request.block_hashes)
        grant = self._gate.verify_ticket(request.ticket_token, lambda: Presented(transfer_digest(bound)))
        if self.format is None:
            raise DragomanError(
                error_pb2.ERROR_REASON_UNIMPLEMENTED,
                "this agent does not hand out KV blocks, or is still loading; compute the prefix instead of fetching it",
            )
        self.format.check(request)
        if self._num_transfers >= MAX_NUM_TRANSFERS:
            raise DragomanError(
                error_pb2.ERROR_REASON_QUEUE_FULL,
                f"{MAX_NUM_TRANSFERS} transfers are under way here; compute the prefix, or try again in 1 s",
                retry_delay=1.0,
            )
        self._gate.use_ticket(grant)
        wire_units = [unit.to_bytes(8, "little") for unit in units]
        return ExportBlocks(uuid.uuid4().hex, wire_units, list(request.block_hashes)), self.format


def _pieces(block: CachedBlock) -> list[pb.FetchBlocksResponse]:
    pieces = [
        pb.FetchBlocksResponse(block_hash=block.digest, data=block.data[start : start + PIECE_BYTES])
        for start in range(0, len(block.data), PIECE_BYTES)
    ]
    pieces[0].parent_hash = block.parent
    pieces[0].unit_hashes.extend(block.units)
    return pieces
