"""Stop strings in streamed text: an Aho-Corasick automaton that holds back only what may become a stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

MAX_NUM_STOPS = 1024
MAX_STOP_CHARS = 4096
MAX_TOTAL_STOP_CHARS = 65536


def validate_stops(stops: Any) -> tuple[str, ...]:
    """`stops` as a tuple: None, one string or a sequence of strings. Raises ValueError saying which rule is broken.

    At most 1,024 stop strings of at most 4,096 characters, 65,536 together; none empty.
    """
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, Sequence) or isinstance(stops, (bytes, bytearray)):
        raise ValueError(f"stop must be a string or a list of strings, not {type(stops).__name__}")
    if len(stops) > MAX_NUM_STOPS:
        raise ValueError(f"stop has {len(stops)} strings, at most {MAX_NUM_STOPS} are allowed; send fewer")
    total = 0
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise ValueError(f"stop[{index}] must be a string, not {type(stop).__name__}")
        if not stop:
            raise ValueError(f"stop[{index}] is empty and would stop before the first character; remove it")
        if len(stop) > MAX_STOP_CHARS:
            raise ValueError(
                f"stop[{index}] has {len(stop)} characters, at most {MAX_STOP_CHARS} are allowed; shorten it"
            )
        total += len(stop)
    if total > MAX_TOTAL_STOP_CHARS:
        raise ValueError(
            f"stop has {total} characters together, at most {MAX_TOTAL_STOP_CHARS} are allowed; send fewer or shorter"
        )
    return tuple(stops)


class StopMatcher:
    """Finds the first stop string in text that comes in pieces.

    The match that completes first wins; of several that complete at one character, the longest. Text before a
    match is never withheld, text that may still begin one always is. A character costs the same for one stop
    string as for a thousand (Aho and Corasick, 1975).
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop` keeps the matched string in the text. Raises ValueError as `validate_stops` does."""
        self._include_stop = include_stop
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        self._fail = [0]
        for stop in validate_stops(stops):
            self._insert(stop)
        self._link()
        self._first_characters = frozenset(self._next[0])
        self._node = 0
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string found, None so far."""
        return self._matched

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """(text now safe to show, the stop string if one was completed). Nothing comes out after a match.

        Where `counts` is false, a stop completed by `text` is passed over, and one that `text` begins can still come.
        """
        if self._matched is not None:
            return "", self._matched
        if self._node == 0 and self._first_characters.isdisjoint(text):
            return text, None
        buffer = self._held + text
        offset = len(self._held)
        for index, character in enumerate(text):
            self._node = self._step(self._node, character)
            stop = self._match[self._node]
            if stop is not None and counts:
                end = offset + index + 1
                self._matched, self._held = stop, ""
                return buffer[: end if self._include_stop else end - len(stop)], stop
        while self._node and not self._next[self._node]:
            self._node = self._fail[self._node]  # passed over, and nothing longer begins with it
        keep = self._depth[self._node]
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The text held back, once no more can come; empty after a match."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(character, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            following = self._next[node].get(character)
            if following is None:
                following = len(self._next)
                self._next[node][character] = following
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
                self._fail.append(0)
            node = following
        self._match[node] = stop

    def _link(self) -> None:
        """Breadth first, so that a node's shorter suffix is linked before the node itself."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            if self._match[node] is None:
                self._match[node] = self._match[self._fail[node]]
            for character, following in self._next[node].items():
                self._fail[following] = self._step(self._fail[node], character)
                queue.append(following)
