"""Requests whose grammar is being compiled: they wait here, outside the scheduler, and others go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from dragoman_agent.engine.grammar import (
    COMPILE_SECONDS,
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarsBusyError,
)
from dragoman_agent.engine.messages import GrammarSpec
from dragoman_agent.engine.request import Request
from dragoman_text import TextTokenizer


@dataclass(slots=True)
class _Entry:
    request: Request
    future: Future[CompiledGrammar]
    until: float


class CompilingRequests:
    """Owns the compiler and the requests that wait for it."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._compiler = GrammarCompiler(tokenizer, vocab_size)
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, spec: GrammarSpec, now: float) -> None:
        """Begin to compile the grammar of `request`."""
        self._entries.append(_Entry(request, self._compiler.submit(spec), now + COMPILE_SECONDS))

    def ready(self, now: float) -> Iterator[tuple[Request, CompiledGrammar | GrammarError]]:
        """Requests whose grammar is compiled, or why it cannot be; those that ended meanwhile are dropped."""
        waiting: list[_Entry] = []
        ready: list[_Entry] = []
        for entry in self._entries:
            if entry.request.is_over:
                entry.future.cancel()
            else:
                (ready if entry.future.done() or now >= entry.until else waiting).append(entry)
        self._entries = waiting
        if waiting:
            self._compiler.replace_held_up()
        for entry in ready:
            yield entry.request, _outcome(entry.future)


def _outcome(future: Future[CompiledGrammar]) -> CompiledGrammar | GrammarError:
    if future.cancel():  # no thread has begun it
        return GrammarsBusyError("hard grammars of other requests are being compiled; try again in some seconds")
    if not future.done():
        return GrammarError(f"compiling takes over {COMPILE_SECONDS:g} s; make it smaller")
    error = future.exception()
    if error is None:
        return future.result()
    return error if isinstance(error, GrammarError) else GrammarError(str(error))
