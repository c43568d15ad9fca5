"""PrefetchService."""

from __future__ import annotations

from dragoman.serving import Context
from dragoman.v1 import prefetch_service_pb2 as pb
from dragoman.v1 import prefetch_service_pb2_grpc as pb_grpc
from dragoman_controller.cell import Cell


class PrefetchServicer(pb_grpc.PrefetchServiceServicer):
    """Takes hints."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    async def HintPrefix(self, request: pb.HintPrefixRequest, context: Context) -> pb.HintPrefixResponse:
        """Passes a hint on, or says why not. Never an error: a hint is advice."""
        refused = self._cell.hints.hint(request.model, tuple(request.block_hashes))
        return pb.HintPrefixResponse(accepted=not refused, reason=refused)
