"""The requests that the engine holds, and what its frames say to each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dragoman_agent.engine.messages import Delta, Embedded, Failed, Finished, Opened, Start, StartEmbed, Step
from dragoman_agent.rpc.text_streams import TextStreams, columns
from dragoman_text import TextTokenizer

Event = Opened | Delta | Finished | Failed | Embedded
OnEnd = Callable[[Event, int], None]  # the terminal event, and the tokens of the longest choice


class EventSink(Protocol):
    """Takes the events of one request. Called on the event loop; must not block and must not raise."""

    def deliver(self, event: Event) -> None:
        """One event, in order. Finished, Failed and Embedded are the last."""


class _Nowhere:
    def deliver(self, event: Event) -> None:
        """Nobody listens any more."""


NOWHERE = _Nowhere()


@dataclass(slots=True)
class Live:
    """One request the engine holds."""

    sink: EventSink
    on_end: OnEnd
    num_seqs: int
    priority: int
    max_output_tokens: int
    keys: range  # of its choices, where their text is made here; else empty
    num_emitted: int = 0  # tokens of the furthest choice
    cancelled: bool = False


class LiveTable:
    """Owns the live requests by id. Each leaves it with its terminal event, exactly once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._texts = TextStreams(tokenizer)
        self.by_id: dict[str, Live] = {}
        self.num_seqs = 0

    def add(self, command: Start | StartEmbed, sink: EventSink, on_end: OnEnd) -> None:
        """A request that the engine is about to get; a plain one gets its key here."""
        keys = range(0)
        if isinstance(command, Start):
            num_seqs, max_tokens = command.num_choices, command.stop.max_output_tokens
            if command.is_plain:
                self._texts.open(command)
                keys = range(command.key, command.key + num_seqs)
        else:
            num_seqs, max_tokens = 1, 0
        self.by_id[command.request_id] = Live(sink, on_end, num_seqs, command.priority, max_tokens, keys)
        self.num_seqs += num_seqs

    def take(self, step: Step) -> int:
        """Deliver what a frame says; the output tokens in it."""
        live = self.by_id
        num_tokens = self._take_columns(step) if step.keys else 0
        for event in step.events:
            entry = live.get(event.request_id)
            if entry is None:
                continue
            if type(event) is Delta:
                if entry.keys:
                    event = self._texts.by_key[entry.keys[event.choice]].finish(event)
                count = len(event.token_ids)
                num_tokens += count
                end = event.cursor + count
                if end > entry.num_emitted:
                    entry.num_emitted = end
            elif type(event) is not Opened:
                self._remove(event.request_id, entry)
                entry.on_end(event, entry.num_emitted)
            entry.sink.deliver(event)
        return num_tokens

    def fail_all(self, reason: int, message: str) -> None:
        """End every request: the engine is gone."""
        for request_id, entry in list(self.by_id.items()):
            self._remove(request_id, entry)
            failed = Failed(request_id, reason, message)
            entry.on_end(failed, entry.num_emitted)
            entry.sink.deliver(failed)

    def _remove(self, request_id: str, entry: Live) -> None:
        del self.by_id[request_id]
        self._texts.close(entry.keys)
        self.num_seqs -= entry.num_seqs

    def _take_columns(self, step: Step) -> int:
        """Deliver the tokens whose text is made here; how many there are."""
        live, streams = self.by_id, self._texts.by_key
        keys, token_ids = columns(step)
        for key, token_id in zip(keys, token_ids, strict=True):
            delta = streams[key].push(token_id)
            entry = live[delta.request_id]
            if delta.cursor >= entry.num_emitted:
                entry.num_emitted = delta.cursor + 1
            entry.sink.deliver(delta)
        return len(keys)
