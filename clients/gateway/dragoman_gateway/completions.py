"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dragoman_gateway.answer import Choice, JobSource, answer_stream, answer_whole
from dragoman_gateway.backend import Backend
from dragoman_gateway.errors import unsupported
from dragoman_gateway.forms import form_of, refuse_streamed_scores, restrict
from dragoman_gateway.http import unless_gone
from dragoman_gateway.logprobs import CompletionLogprobs, prompt_arrays, prompt_entries
from dragoman_gateway.prompts import Prompt, completion_prompts
from dragoman_gateway.requests import Job, build_specs, check_stream_options, finish_of, usage_of
from dragoman_gateway.schema import CompletionBody, ignored_header, parse_body
from dragoman_gateway.sse import Chunks

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request, backend: Backend, value: dict[str, Any]) -> Response:
    """Answers a completions request: one or several prompts, n choices each."""
    settings = backend.settings
    body, ignored = parse_body(CompletionBody, value, strict=settings.strict_params)
    _refuse(body)
    grammar, param_names = form_of(body)
    include_usage = check_stream_options(body, lenient=settings.lenient_stream_options)
    model = await backend.models.text(backend.models.resolve(body.model))
    salt = body.cache_salt or ""
    prompts = await unless_gone(
        request.receive,
        backend.models.in_thread(lambda: completion_prompts(body, model, salt, settings.max_prompts)),
    )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    specs = build_specs(
        body,
        prompts,
        model,
        backend,
        max_tokens=max(max_tokens, 1),
        num_logprobs=body.logprobs,
        tenant=request.state.tenant,
    )
    scores = _num_scores(body)
    for spec in specs:
        restrict(spec, grammar, param_names)
        if scores is not None:
            spec.generate.sampling.num_prompt_logprobs = scores
    if ignored:
        backend.metrics.ignored.inc()
    # Zero tokens need no agent unless the prompt is to be scored; an agent then makes one token, which is not shown.
    needed = specs if max_tokens or scores is not None else []
    job = Job(backend, "completions", request.state.request_id, model, needed)
    answer = _Answer(job, body, body.model or model.name, prompts, is_empty=not max_tokens)
    headers = ignored_header(ignored)
    if body.stream:
        return await answer_stream(request, job, lambda: CompletionSource(answer, include_usage=include_usage), headers)
    return await answer_whole(request, job, answer.num_choices, answer.whole, headers)


def _refuse(body: CompletionBody) -> None:
    refuse_streamed_scores(body)
    if body.suffix:
        raise unsupported("suffix", "this model cannot fill in the middle; leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "only best_of equal to n is served; leave it out")


def _num_scores(body: CompletionBody) -> int | None:
    """Alternatives wanted with each prompt token; None when the prompt is not to be scored."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((count for count in wanted if count is not None), default=None)


class _Answer:
    """How the choices of one request are written."""

    def __init__(
        self, job: Job, body: CompletionBody, shown_model: str, prompts: list[Prompt], *, is_empty: bool
    ) -> None:
        self.job = job
        self.body = body
        self.shown_model = shown_model
        self.is_empty = is_empty
        self._prompts = prompts
        self._per_prompt = body.n or 1
        self.num_choices = len(prompts) * self._per_prompt

    def echo(self, index: int) -> str:
        """The prompt's text before the choice, where asked for."""
        return (self._prompts[index // self._per_prompt].text or "") if self.body.echo else ""

    def scores_echo(self) -> bool:
        """Whether the echoed prompt comes with its log-probabilities."""
        return bool(self.body.echo) and self.body.logprobs is not None

    def echo_logprobs(self, index: int) -> dict[str, list[Any]]:
        """The arrays of the echoed prompt before a choice; its generation has started."""
        at = index // self._per_prompt
        entries = self.job.outcomes[at].prompt_logprobs
        num_top = self.body.logprobs or 0
        return prompt_arrays(self.job.model.tokenizer, self._prompts[at].token_ids, entries, self.echo(index), num_top)

    def logprob_writer(self, index: int) -> CompletionLogprobs:
        """Writes the logprobs of one choice."""
        skip = self.body.skip_special_tokens is not False
        return CompletionLogprobs(self.job.model.tokenizer, len(self.echo(index)), skip_special_tokens=skip)

    def usage(self) -> dict[str, Any]:
        """The totals; a request for no tokens has only its prompts."""
        if self.is_empty:
            return usage_of(sum(len(prompt.token_ids) for prompt in self._prompts), 0, 0)
        return self.job.usage()

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The JSON answer."""
        return {
            "id": self.job.response_id,
            "object": "text_completion",
            "created": self.job.created,
            "model": self.shown_model,
            "system_fingerprint": self.job.fingerprint,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self.usage(),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self.echo(index) + ("" if self.is_empty else "".join(choice.text))
        logprobs = None
        if self.body.logprobs is not None:
            entries = [] if self.is_empty else choice.logprobs
            logprobs = self.logprob_writer(index).arrays(entries, end=len(text))
            if self.scores_echo():
                logprobs = {name: [*values, *logprobs[name]] for name, values in self.echo_logprobs(index).items()}
        value: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self.is_empty else choice.finish_reason,
            "stop_reason": None if self.is_empty else choice.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            at = index // self._per_prompt
            value["prompt_logprobs"] = prompt_entries(
                self._prompts[at].token_ids, self.job.outcomes[at].prompt_logprobs
            )
        if self.body.return_token_ids:
            value["token_ids"] = [] if self.is_empty else choice.token_ids
        return value


class CompletionSource(JobSource):
    """The chunks of a completions stream."""

    def __init__(self, answer: _Answer, *, include_usage: bool) -> None:
        chunks = Chunks(
            response_id=answer.job.response_id,
            object_name="text_completion",
            created=answer.job.created,
            model=answer.shown_model,
            fingerprint=answer.job.fingerprint,
            include_usage=include_usage,
            is_chat=False,
        )
        super().__init__(answer.job, chunks, include_usage=include_usage)
        self._answer = answer
        self._wants_logprobs = answer.body.logprobs is not None
        self._wants_ids = bool(answer.body.return_token_ids)
        self._writers: dict[int, CompletionLogprobs] = {}
        self._num_chars: dict[int, int] = {}
        self._unscored = set(range(answer.num_choices)) if answer.scores_echo() else set()

    def first(self) -> bytes:
        """The echoed prompts, unless they wait for their scores; for a request of no tokens also the ends."""
        if self._unscored:
            return b""
        parts = []
        for index in range(self._answer.num_choices):
            echo = self._answer.echo(index)
            if echo:
                parts.append(self.chunks.text(index, echo))
            if self._answer.is_empty:
                parts.append(self.chunks.finish(index, "length", None))
        return b"".join(parts)

    def encode(self, deltas: list[tuple[int, Any]]) -> bytes:
        """Text and finish chunks."""
        parts = []
        for index, delta in deltas:
            ended = delta.HasField("finish")
            if index in self._unscored:
                self._unscored.discard(index)
                parts.append(self.chunks.text(index, self._answer.echo(index), self._answer.echo_logprobs(index)))
            if self._answer.is_empty:
                if ended:
                    parts.append(self.chunks.finish(index, "length", None))
                continue
            if self._wants_logprobs and delta.logprobs:
                logprobs = self._logprobs(index, delta, ended=ended)
                ids = list(delta.token_ids) if self._wants_ids else None
                parts.append(self.chunks.text(index, delta.text, logprobs, ids))
            elif self._wants_ids and delta.token_ids:
                parts.append(self.chunks.text(index, delta.text, None, list(delta.token_ids)))
            elif delta.text:
                parts.append(self.chunks.text(index, delta.text))
            if ended:
                parts.append(self.chunks.finish(index, *finish_of(delta)))
        return b"".join(parts)

    def usage(self) -> dict[str, Any]:
        """The totals."""
        return self._answer.usage()

    def _logprobs(self, index: int, delta: Any, *, ended: bool) -> dict[str, Any]:
        writer = self._writers.get(index)
        if writer is None:
            writer = self._writers[index] = self._answer.logprob_writer(index)
        known = self._num_chars.get(index, len(self._answer.echo(index))) + len(delta.text)
        self._num_chars[index] = known
        # Text cut off by a stop string is gone only with the last delta; until then an offset may point past it.
        return writer.arrays(delta.logprobs, end=known if ended else None)
