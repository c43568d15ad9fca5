"""Events of one generation as messages of vLLM's gRPC interface. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dragoman.channel import MAX_MESSAGE_BYTES
from dragoman.compat import vllm_engine_pb2 as vllm
from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2, generation_service_pb2
from dragoman_agent.engine.messages import Delta, Failed, Finished, LogprobEntry, Start

_FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}


class VllmReplies:
    """Chunks as they come where the request streams, and a complete message a choice at the end of them all.

    Only the end knows how much of the prompt was cached, so a choice that ends early waits for it.
    """

    def __init__(self, stream: bool) -> None:
        """`stream`: whether chunks are wanted."""
        self._stream = stream
        self._num_prompt = 0
        self._input_logprobs: vllm.InputLogProbs | None = None
        self._own_stops: frozenset[int] = frozenset()
        self._num_top = -1
        self._begun: set[int] = set()
        self._ends: list[vllm.GenerateComplete] = []

    def of_start(self, start: Start, started: generation_service_pb2.GenerationStarted) -> list[vllm.GenerateResponse]:
        """Nothing is sent, much is noted."""
        self._num_prompt = len(start.prompt_ids)
        self._own_stops = frozenset(start.stop.stop_token_ids)
        self._num_top = start.sampling.num_logprobs
        if start.sampling.num_prompt_logprobs >= 0:
            self._input_logprobs = _input_logprobs(
                start.prompt_ids, started.prompt_logprobs, start.sampling.num_prompt_logprobs
            )
        self._ends = [
            vllm.GenerateComplete(index=index, prompt_tokens=self._num_prompt) for index in range(start.num_choices)
        ]
        return []

    def of_event(self, event: Delta | Finished | Failed) -> list[vllm.GenerateResponse]:
        """The messages for one event. Raises DragomanError for a request that failed."""
        match event:
            case Delta():
                return self._of_delta(event)
            case Failed():
                metadata = {"param": event.param} if event.param else None
                raise DragomanError(event.reason, event.message, metadata=metadata)  # type: ignore[arg-type]
            case Finished():
                return [self._of_end(end, event) for end in self._ends]

    def _of_delta(self, delta: Delta) -> list[vllm.GenerateResponse]:
        end = self._ends[delta.choice]
        end.output_ids.extend(delta.token_ids)
        if delta.finish:
            end.finish_reason = _FINISH[delta.finish]
            if delta.stop_string is not None:
                end.matched_stop_str = delta.stop_string
            elif delta.stop_token_id in self._own_stops:
                end.matched_token_id = delta.stop_token_id
        if not self._stream:
            if self._num_top >= 0:
                _add_logprobs(end.output_logprobs, delta.logprobs, self._num_top)
            return []
        return [vllm.GenerateResponse(chunk=self._chunk(delta))] if delta.token_ids else []

    def _chunk(self, delta: Delta) -> vllm.GenerateStreamChunk:
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._num_prompt,
            completion_tokens=len(delta.token_ids),
            index=delta.choice,
        )
        if self._num_top >= 0:
            _add_logprobs(chunk.output_logprobs, delta.logprobs, self._num_top)
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            if self._input_logprobs is not None:
                chunk.input_logprobs.CopyFrom(self._input_logprobs)
        return chunk

    def _of_end(self, end: vllm.GenerateComplete, event: Finished) -> vllm.GenerateResponse:
        end.completion_tokens = len(end.output_ids)
        end.cached_tokens = event.cached_tokens
        if not end.finish_reason:
            end.finish_reason = "abort" if event.cancelled else "stop"
        if self._input_logprobs is not None and end.index not in self._begun:
            end.input_logprobs.CopyFrom(self._input_logprobs)
        if (size := end.ByteSize()) > MAX_MESSAGE_BYTES:
            raise DragomanError(
                error_pb2.ERROR_REASON_REQUEST_TOO_LARGE,
                f"sampling_params.logprobs: the reply to choice {end.index} has {size} bytes and a message holds "
                f"{MAX_MESSAGE_BYTES}; set stream, or ask for fewer log-probabilities or tokens",
                metadata={"param": "sampling_params.logprobs", "limit": str(MAX_MESSAGE_BYTES)},
            )
        return vllm.GenerateResponse(complete=end)


def _add_logprobs(message: vllm.OutputLogProbs, entries: Sequence[LogprobEntry], num_top: int) -> None:
    for entry in entries:
        message.token_ids.append(entry.token_id)
        message.token_logprobs.append(entry.logprob)
        if num_top:
            message.top_logprobs.add(
                token_ids=[token_id for token_id, _ in entry.top], values=[value for _, value in entry.top]
            )


def _input_logprobs(
    prompt_ids: Sequence[int], entries: Sequence[generation_service_pb2.TokenLogprob], num_top: int
) -> vllm.InputLogProbs:
    """One entry a prompt token; that of the first is empty, and `entries` begin with the second."""
    message = vllm.InputLogProbs(token_ids=prompt_ids)
    message.token_logprobs.add()
    for entry in entries:
        message.token_logprobs.add(value=entry.logprob)
    if num_top:
        message.top_logprobs.add()
        for entry in entries:
            message.top_logprobs.add(
                token_ids=[top.token_id for top in entry.top], values=[top.logprob for top in entry.top]
            )
    return message
