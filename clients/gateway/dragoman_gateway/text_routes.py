"""POST /tokenize, /detokenize and /apply-template: what the model makes of a text."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from dragoman.limits import MAX_DETOKENIZE_TOKENS, MAX_TOKENIZE_BYTES
from dragoman_gateway.backend import Backend
from dragoman_gateway.errors import invalid
from dragoman_gateway.http import json_reply, unless_gone
from dragoman_gateway.logprobs import token_text
from dragoman_gateway.models import ModelText
from dragoman_gateway.prompts import template_ids, template_text
from dragoman_gateway.sampling import check_ids
from dragoman_gateway.schema import DetokenizeBody, TemplateBody, TokenizeBody, ignored_header, parse_body

B = TypeVar("B", TokenizeBody, DetokenizeBody, TemplateBody)


async def tokenize(request: Request, backend: Backend, value: dict[str, Any]) -> Response:
    """Token ids of `prompt`, or of `messages` through the chat template."""
    body, ignored, model = await _read(TokenizeBody, backend, value)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt" if body.prompt is None else "messages")

    # The reply is written in the thread as well: beside long texts it is long.
    headers = ignored_header(ignored)
    return await unless_gone(
        request.receive, backend.models.in_thread(lambda: json_reply(_tokenized(body, model), headers=headers))
    )


def _tokenized(body: TokenizeBody, model: ModelText) -> dict[str, Any]:
    """The reply of /tokenize. Raises ApiError 400."""
    _check_size(body)
    if body.messages is not None:
        ids = template_ids(body, model)
    else:
        try:
            ids = model.tokenizer.encode(
                body.prompt or "",
                add_special_tokens=body.add_special_tokens is not False,
                parse_special=body.parse_special_tokens is not False,
            )
        except ValueError as error:
            raise invalid(str(error), "prompt") from None
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.max_context_tokens}
    if body.with_pieces:
        pieces = [model.tokenizer.token_bytes(token_id) for token_id in ids]
        answer["pieces"] = [
            {"id": i, "piece": token_text(b), "bytes": list(b)} for i, b in zip(ids, pieces, strict=True)
        ]
    return answer


def _check_size(body: TokenizeBody) -> None:
    """Raises ApiError 400 for more text than is tokenized in one request; of messages their JSON counts."""
    param, data = ("prompt", body.prompt) if body.messages is None else ("messages", orjson.dumps(body.messages))
    num_bytes = len(data if isinstance(data, bytes) else (data or "").encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_TOKENIZE_BYTES:
        raise invalid(
            f"{param} has {num_bytes} bytes, at most {MAX_TOKENIZE_BYTES} are tokenized in one request; send it in parts",
            param,
        )


async def detokenize(request: Request, backend: Backend, value: dict[str, Any]) -> Response:
    """Text of `tokens`; bytes that form no character appear as U+FFFD."""
    body, ignored, model = await _read(DetokenizeBody, backend, value)
    if not isinstance(body.tokens, list):
        raise invalid("tokens must be a list of token ids", "tokens")
    if len(body.tokens) > MAX_DETOKENIZE_TOKENS:
        raise invalid(f"tokens has {len(body.tokens)} ids, at most {MAX_DETOKENIZE_TOKENS} go in one request", "tokens")

    def work() -> Response:
        # The model's logits may be wider than its tokenizer; ids without a token have no text.
        check_ids(body.tokens, "tokens", min(model.vocabulary_size, model.tokenizer.vocab_size))
        text = model.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_reply({"prompt": text}, headers=ignored_header(ignored))

    return await unless_gone(request.receive, backend.models.in_thread(work))


async def apply_template(request: Request, backend: Backend, value: dict[str, Any]) -> Response:
    """The prompt text that the model's chat template makes of `messages`."""
    body, ignored, model = await _read(TemplateBody, backend, value)
    text = await unless_gone(request.receive, backend.models.in_thread(lambda: template_text(body, model)))
    return json_reply({"prompt": text}, headers=ignored_header(ignored))


async def _read(kind: type[B], backend: Backend, value: dict[str, Any]) -> tuple[B, list[str], ModelText]:
    body, ignored = parse_body(kind, value, strict=backend.settings.strict_params)
    model = await backend.models.text(backend.models.resolve(body.model))
    return body, ignored, model
