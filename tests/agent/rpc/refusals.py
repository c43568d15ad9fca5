"""What a call that is refused tells."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from dragoman.errors import DragomanError, from_rpc_error


async def error_of(call: Any) -> DragomanError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    assert "Traceback" not in str(caught.value.details())
    return from_rpc_error(caught.value)
