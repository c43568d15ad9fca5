"""Client library of Dragoman: `AsyncClient`, `Client`, and the errors they raise.

The names are imported when they are first used: the servers import this package for its protocol alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.client import AsyncClient
    from dragoman.errors import DragomanError
    from dragoman.request import GenerateOptions
    from dragoman.results import (
        Choice,
        Embeddings,
        Estimate,
        GenerationResult,
        Quote,
        Timings,
        Token,
        TokenLogprob,
        Usage,
    )
    from dragoman.retry import RetryPolicy
    from dragoman.stream import GenerationStream
    from dragoman.sync import Client, Stream

__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "client",
    "Choice": "results",
    "Client": "sync",
    "DragomanError": "errors",
    "Embeddings": "results",
    "Estimate": "results",
    "GenerateOptions": "request",
    "GenerationResult": "results",
    "GenerationStream": "stream",
    "Quote": "results",
    "RetryPolicy": "retry",
    "Stream": "sync",
    "Timings": "results",
    "Token": "results",
    "TokenLogprob": "results",
    "Usage": "results",
}

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "DragomanError",
    "Embeddings",
    "Estimate",
    "GenerateOptions",
    "GenerationResult",
    "GenerationStream",
    "Quote",
    "RetryPolicy",
    "Stream",
    "Timings",
    "Token",
    "TokenLogprob",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dragoman' has no attribute {name!r}")
    value = getattr(import_module(f"dragoman.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
