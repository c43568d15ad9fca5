"""When a request counts as accepted: at once, or when the engine has compiled its grammar or scored its prompt."""

from __future__ import annotations

import numpy as np

from dragoman.errors import DragomanError
from dragoman.v1 import generation_service_pb2
from dragoman_agent.engine.messages import Failed, Opened, Start
from dragoman_agent.rpc.convert import TokenBytes
from dragoman_agent.rpc.engine_client import Event


class Opening:
    """The GenerationStarted of one request, kept back while the engine may still refuse it."""

    def __init__(
        self, start: Start, started: generation_service_pb2.GenerationStarted, token_bytes: TokenBytes
    ) -> None:
        self.is_open = not start.opens_late
        self.started = started
        self._prompt_ids = start.prompt_ids
        self._token_bytes = token_bytes

    def take(self, event: Event) -> generation_service_pb2.GenerationStarted:
        """The start, now that the first event has come. Raises DragomanError when that refuses the request."""
        if isinstance(event, Failed):
            metadata = {"param": event.param} if event.param else None
            raise DragomanError(event.reason, event.message, metadata=metadata)  # type: ignore[arg-type]
        self.is_open = True
        if isinstance(event, Opened):
            self._fill(event)
        return self.started

    def _fill(self, opened: Opened) -> None:
        """Write the prompt's log-probabilities: one entry a token from the second on."""
        if not opened.logprobs:
            return
        logprobs = np.frombuffer(opened.logprobs, dtype="<f4").tolist()
        num_top = opened.num_top
        top_ids = np.frombuffer(opened.top_ids, dtype="<i4").reshape(len(logprobs), num_top).tolist()
        top_logprobs = np.frombuffer(opened.top_logprobs, dtype="<f4").reshape(len(logprobs), num_top).tolist()
        token_bytes = self._token_bytes
        entries = self.started.prompt_logprobs
        for token_id, logprob, ids, values in zip(self._prompt_ids[1:], logprobs, top_ids, top_logprobs, strict=True):
            entry = entries.add(token_id=token_id, logprob=logprob, token_bytes=token_bytes(token_id))
            for other, value in zip(ids, values, strict=True):
                entry.top.add(token_id=other, logprob=value, token_bytes=token_bytes(other))
