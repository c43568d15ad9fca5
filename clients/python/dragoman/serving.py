"""What every Dragoman gRPC server does with a failure: one interceptor that turns exceptions into status and detail."""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from dragoman.errors import DragomanError, error_metadata, in_short
from dragoman.v1 import error_pb2

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Any, Any], Any]
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Raise DragomanError in a handler, get its status, its message and its detail in the trailing metadata.

    Any other exception becomes INTERNAL with an id; the traceback goes to the log under that id and nowhere else.
    Works for handlers written as coroutines and as asynchronous generators.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call with its failures translated."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return _wrapped(handler, handler_call_details.method)


def _wrapped(handler: MethodHandler, method: str) -> MethodHandler:
    build: Any
    inner: Any
    build, inner = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[(handler.request_streaming, handler.response_streaming)]
    guard = _guard_generator if inspect.isasyncgenfunction(inner) else _guard_coroutine
    wrapped: MethodHandler = build(
        guard(inner, method),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped


def _guard_coroutine(inner: Handler, method: str) -> Handler:
    async def call(request: Any, context: Context) -> Any:
        try:
            result = inner(request, context)
            return await result if inspect.isawaitable(result) else result
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:
            return await refuse(context, error, method)

    return call


def _guard_generator(inner: Handler, method: str) -> Handler:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        # The inner generator is closed here, not when the collector finds it: its `finally` frees what the call holds.
        messages = inner(request, context)
        try:
            async for message in messages:
                yield message
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            await refuse(context, error, method)
        finally:
            await messages.aclose()

    return call


async def refuse(context: Context, error: Exception, method: str) -> None:
    """End the call with the status of `error`. Never returns: grpc raises AbortError."""
    full = as_dragoman_error(error, method)
    metadata = {key: in_short(value) for key, value in full.metadata.items()}
    known = DragomanError(full.reason, in_short(full.message), retry_delay=full.retry_delay, metadata=metadata)
    await context.abort(known.grpc_code, known.message, trailing_metadata=error_metadata(known))


def as_dragoman_error(error: Exception, where: str) -> DragomanError:
    """`error` itself, or for an exception nobody planned for an INTERNAL that names the log entry of its traceback."""
    if isinstance(error, DragomanError):
        return error
    fault_id = uuid.uuid4().hex[:12]
    logger.error("fault %s in %s", fault_id, where, exc_info=error)
    return DragomanError(
        error_pb2.ERROR_REASON_INTERNAL,
        f"a fault of the server, logged there as {fault_id}; report it with this id",
        metadata={"fault_id": fault_id},
    )
