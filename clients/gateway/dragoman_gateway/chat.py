"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dragoman_gateway.answer import Choice, JobSource, answer_stream, answer_whole
from dragoman_gateway.backend import Backend
from dragoman_gateway.errors import invalid
from dragoman_gateway.forms import form_of, refuse_streamed_scores, restrict
from dragoman_gateway.http import unless_gone
from dragoman_gateway.logprobs import chat_entries, prompt_entries
from dragoman_gateway.prompts import chat_prompt, check_messages
from dragoman_gateway.requests import Job, build_specs, check_stream_options, finish_of
from dragoman_gateway.schema import ChatBody, ignored_header, parse_body, refuse_later_features
from dragoman_gateway.sse import Chunks


async def chat_completions(request: Request, backend: Backend, value: dict[str, Any]) -> Response:
    """Answers a chat request. Everything that can be wrong with it is found before the headers go out."""
    settings = backend.settings
    body, ignored = parse_body(ChatBody, value, strict=settings.strict_params)
    check_messages(body.messages)
    refuse_later_features(body)
    refuse_streamed_scores(body)
    grammar, param_names = form_of(body)
    num_logprobs = _num_logprobs(body)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    include_usage = check_stream_options(body, lenient=settings.lenient_stream_options)
    model = await backend.models.text(backend.models.resolve(body.model))
    salt = body.cache_salt or ""
    prompt = await unless_gone(
        request.receive, backend.models.in_thread(lambda: chat_prompt(body, model, salt, max_tokens))
    )
    specs = build_specs(
        body, [prompt], model, backend, max_tokens=max_tokens, num_logprobs=num_logprobs, tenant=request.state.tenant
    )
    for spec in specs:
        restrict(spec, grammar, param_names)
    if ignored:
        backend.metrics.ignored.inc()
    job = Job(backend, "chat", request.state.request_id, model, specs)
    shown_model = body.model or model.name
    headers = ignored_header(ignored)
    if body.stream:
        return await answer_stream(
            request, job, lambda: ChatSource(job, body, shown_model, include_usage=include_usage), headers
        )
    return await answer_whole(
        request, job, body.n or 1, lambda choices: _whole(job, body, shown_model, choices, prompt.token_ids), headers
    )


def _num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None and (body.top_logprobs > 0 or body.logprobs is None):
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return None


def _whole(job: Job, body: ChatBody, shown_model: str, choices: list[Choice], prompt_ids: list[int]) -> dict[str, Any]:
    value = {
        "id": job.response_id,
        "object": "chat.completion",
        "created": job.created,
        "model": shown_model,
        "system_fingerprint": job.fingerprint,
        "choices": [_choice(index, choice, body) for index, choice in enumerate(choices)],
        "usage": job.usage(),
    }
    if body.prompt_logprobs is not None:
        value["prompt_logprobs"] = prompt_entries(prompt_ids, job.outcomes[0].prompt_logprobs)
    return value


def _choice(index: int, choice: Choice, body: ChatBody) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
        "logprobs": {"content": chat_entries(choice.logprobs), "refusal": None} if body.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        value["token_ids"] = choice.token_ids
    return value


class ChatSource(JobSource):
    """The chunks of a chat: all roles first, in order of the index, then text, then each choice's finish."""

    def __init__(self, job: Job, body: ChatBody, shown_model: str, *, include_usage: bool) -> None:
        chunks = Chunks(
            response_id=job.response_id,
            object_name="chat.completion.chunk",
            created=job.created,
            model=shown_model,
            fingerprint=job.fingerprint,
            include_usage=include_usage,
            is_chat=True,
        )
        super().__init__(job, chunks, include_usage=include_usage)
        self._num_choices = body.n or 1
        self._wants_logprobs = bool(body.logprobs)
        self._wants_ids = bool(body.return_token_ids)

    def first(self) -> bytes:
        """The role chunks."""
        return b"".join(self.chunks.role(index) for index in range(self._num_choices))

    def encode(self, deltas: list[tuple[int, Any]]) -> bytes:
        """Text and finish chunks."""
        parts = []
        for index, delta in deltas:
            if self._wants_logprobs and delta.logprobs:
                logprobs = {"content": chat_entries(delta.logprobs), "refusal": None}
                ids = list(delta.token_ids) if self._wants_ids else None
                parts.append(self.chunks.text(index, delta.text, logprobs, ids))
            elif self._wants_ids and delta.token_ids:
                parts.append(self.chunks.text(index, delta.text, None, list(delta.token_ids)))
            elif delta.text:
                parts.append(self.chunks.text(index, delta.text))
            if delta.HasField("finish"):
                parts.append(self.chunks.finish(index, *finish_of(delta)))
        return b"".join(parts)
