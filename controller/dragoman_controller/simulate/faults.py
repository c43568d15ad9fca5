"""What goes wrong in a run, and when: agents that die, come back or drain, and a controller that is started anew."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("kill", "join", "drain", "restart")
_FORM = re.compile(r"(?P<kind>[a-z]+)(?::(?P<agent>[^@]+))?@(?P<seconds>\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kill`, `join` (again, after a kill) and `drain` are of one agent; `restart` is of every cell's controller."""

    kind: str
    seconds: float
    agent_id: str = ""


def parse_fault(text: str) -> Fault:
    """The fault of "kill:AGENT@SECONDS", "join:…", "drain:…" or "restart@SECONDS". Raises ValueError."""
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in KINDS or (match["kind"] == "restart") != (match["agent"] is None):
        raise ValueError(
            f"fault {text!r} is none: write kill:AGENT@SECONDS, join:AGENT@SECONDS, drain:AGENT@SECONDS or restart@SECONDS"
        )
    return Fault(match["kind"], float(match["seconds"]), match["agent"] or "")
