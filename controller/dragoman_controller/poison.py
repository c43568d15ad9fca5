"""Keeps a prompt that engines are lost to from taking down one agent after another. No clock of its own.

A prompt is known by its digest. It has a strike for each life of an agent that was lost while it ran there; two strikes
quarantine it for a while. A run that came to its end clears it: what kills engines does not finish.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.requests import AdmissionRequest

MAX_LOST_AGENTS = 2
QUARANTINE_SECONDS = 600.0
# How long a resume waits for the verdict on the agent it was cut from, where that agent would be the second.
VERDICT_SECONDS = 0.3
MAX_NUM_SUSPECTS = 4096

Life = tuple[str, int]
"""Agent id and epoch."""


@dataclass(slots=True)
class _Suspect:
    strikes: set[Life] = field(default_factory=set)
    last_strike_at: float = 0.0


class PoisonGuard:
    """Owns the suspects. `is_lost`: whether a life of an agent has been lost, as far as the controller sees."""

    def __init__(self, is_lost: Callable[[Life], bool], clock: Callable[[], float]) -> None:
        self._is_lost = is_lost
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(one.strikes) >= MAX_LOST_AGENTS for one in self._suspects.values())

    def lost(self, prompt_digest: bytes, life: Life) -> None:
        """An engine was lost while it ran this prompt."""
        if not prompt_digest:
            return
        suspect = self._fresh(prompt_digest) or _Suspect()
        suspect.strikes.add(life)
        suspect.last_strike_at = self._clock()
        self._suspects[prompt_digest] = suspect
        self._suspects.move_to_end(prompt_digest)
        if len(self._suspects) > MAX_NUM_SUSPECTS:
            self._suspects.popitem(last=False)

    def finished(self, prompt_digest: bytes) -> None:
        """A run of this prompt came to its end."""
        if self._suspects:
            self._suspects.pop(prompt_digest, None)

    def check(self, request: AdmissionRequest) -> bool:
        """Whether the request can be placed now; False: ask again in a moment, the agent it was cut from is not judged yet.

        Raises PROMPT_QUARANTINED.
        """
        resume = request.resume
        if resume is not None and self._is_lost((resume.origin_agent_id, resume.origin_epoch)):
            self.lost(request.prompt_digest, (resume.origin_agent_id, resume.origin_epoch))
        if not self._suspects:
            return True
        suspect = self._fresh(request.prompt_digest)
        if suspect is None:
            return True
        if len(suspect.strikes) >= MAX_LOST_AGENTS:
            raise self._quarantined(suspect)
        return resume is None or (resume.origin_agent_id, resume.origin_epoch) in suspect.strikes

    def _fresh(self, prompt_digest: bytes) -> _Suspect | None:
        suspect = self._suspects.get(prompt_digest)
        if suspect is not None and self._clock() - suspect.last_strike_at >= QUARANTINE_SECONDS:
            del self._suspects[prompt_digest]
            return None
        return suspect

    def _quarantined(self, suspect: _Suspect) -> DragomanError:
        agents = sorted({agent_id for agent_id, _ in suspect.strikes})
        left = suspect.last_strike_at + QUARANTINE_SECONDS - self._clock()
        return DragomanError(
            error_pb2.ERROR_REASON_PROMPT_QUARANTINED,
            f"{len(suspect.strikes)} engines were lost while they ran this prompt (on {', '.join(agents)}): it is refused for "
            f"another {left:.0f} s; do not send it again, and report it with the logs of these agents",
            metadata={"agents": ",".join(agents), "quarantine_seconds": f"{left:.0f}"},
        )
