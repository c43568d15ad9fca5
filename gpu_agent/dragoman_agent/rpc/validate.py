"""The one validator of generation requests: message in, engine command out, every default resolved. Pure."""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from google.protobuf import duration_pb2

from dragoman.errors import DragomanError
from dragoman.limits import MAX_ID_BYTES, MAX_NUM_CHOICES, MAX_RESUMES
from dragoman.v1 import admission_service_pb2, error_pb2, generation_service_pb2
from dragoman_agent.engine.messages import Sampling, Start, Stop
from dragoman_agent.rpc.constraints import EncodeWord, bad_word_ids, cannot_encode, grammar_spec, num_prompt_logprobs
from dragoman_agent.rpc.refusal import invalid
from dragoman_agent.tickets import OPEN_GRANT, Grant, check_choices, check_output_tokens, check_prompt_tokens
from dragoman_text import validate_stops

MAX_NUM_LOGPROBS = 20
MAX_NUM_LOGIT_BIAS = 4096
MAX_NUM_STOP_TOKEN_IDS = 1024
MAX_CACHE_SALT_CHARS = 256
MAX_DEADLINE_SECONDS = 30 * 86400.0
CALL_GRACE_SECONDS = 0.1  # a call ends at its deadline with gRPC's own status, which the engine must not forestall
DEFAULT_CREDIT = 256
# Tighter values overflow float32 logits; looser ones change nothing any more.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
PRIORITIES: dict[int, int] = {  # of a ticket -> the engine's classes
    admission_service_pb2.PRIORITY_INTERACTIVE: 0,
    admission_service_pb2.PRIORITY_UNSPECIFIED: 1,
    admission_service_pb2.PRIORITY_STANDARD: 1,
    admission_service_pb2.PRIORITY_BATCH: 2,
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling that a model's own files ask for; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What of a model decides whether a request is valid."""

    vocab_size: int
    max_context_tokens: int
    hidden_size: int  # values of an embedding
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def check_request_id(request_id: str) -> None:
    """Raises DragomanError unless the id is there, short and printable: it appears in logs and messages."""
    if not request_id:
        invalid("request_id", "is empty; send a UUID of your own")
    if (num_bytes := len(request_id.encode())) > MAX_ID_BYTES:
        invalid("request_id", f"has {num_bytes} bytes, at most {MAX_ID_BYTES} are allowed; send a UUID")
    if not request_id.isprintable():
        invalid("request_id", "holds a character that cannot be printed, and it appears in logs; send a UUID")


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises DragomanError naming the first id outside the vocabulary."""
    if ids and max(ids) >= vocab_size:
        index = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        invalid(f"{param}[{index}]", f"is {ids[index]}, outside the vocabulary (0 to {vocab_size - 1})")


def context_exceeded(
    prompt_tokens: int, limit: int, max_output_tokens: int | None, *, at_least: bool = False
) -> DragomanError:
    """The refusal of a prompt that leaves no room for one token. `at_least`: the prompt was not counted to its end."""
    count = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    asked = "" if max_output_tokens is None else f" and {max_output_tokens} were asked for"
    return DragomanError(
        error_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
        f"the prompt has {count} tokens{asked}; prompt and at least one output token must fit the context of {limit} tokens; "
        "shorten the prompt",
        metadata={
            "prompt_tokens": str(prompt_tokens),
            "limit": str(limit),
            "max_output_tokens": "" if max_output_tokens is None else str(max_output_tokens),
            "param": "prompt",
        },
    )


def asked_output_tokens(request: generation_service_pb2.GenerateRequest) -> int | None:
    """What the request itself asks for, None when it leaves it open."""
    return request.stop.max_output_tokens if request.stop.HasField("max_output_tokens") else None


def build_start(
    request: generation_service_pb2.GenerateRequest,
    prompt_ids: list[int],
    model: ModelLimits,
    grant: Grant = OPEN_GRANT,
    call_seconds_left: float | None = None,
    encode_word: EncodeWord = cannot_encode,
) -> Start:
    """The engine command of a request whose prompt is already tokens.

    `max_output_tokens` is clamped to the room that the prompt leaves in the context; the ticket must allow it, and the number
    of choices. A value comes from the request, else from the model's files, else it is the OpenAI default. The deadline is
    the least of the request's, the ticket's and the call's own. `encode_word` makes tokens of a bad word. Raises
    DragomanError with metadata "param", or "claim" where the ticket allows less.
    """
    check_request_id(request.request_id)
    if not prompt_ids:
        param = request.WhichOneof("prompt") or "prompt"
        invalid("token_ids.ids" if param == "token_ids" else param, "is empty; send at least one token")
    check_token_ids(prompt_ids, model.vocab_size, "token_ids.ids")
    if len(prompt_ids) >= model.max_context_tokens:
        raise context_exceeded(len(prompt_ids), model.max_context_tokens, asked_output_tokens(request))
    check_prompt_tokens(grant, len(prompt_ids))
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
        invalid("cache_salt", f"has {len(request.cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS} are allowed")
    num_choices = _num_choices(request.sampling, grant)
    sampling = _sampling(request.sampling, model)
    sampling.num_prompt_logprobs = num_prompt_logprobs(request.sampling, len(prompt_ids))
    stop = _stop(request.stop, sampling, model, grant, room=model.max_context_tokens - len(prompt_ids))
    start = Start(
        request_id=request.request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stop=stop,
        num_choices=num_choices,
        priority=PRIORITIES.get(grant.priority, 1),
        tenant=grant.tenant,
        deadline_seconds=_deadline(request, grant, call_seconds_left),
        credit=request.initial_credit if request.HasField("initial_credit") else DEFAULT_CREDIT,
        cache_salt=request.cache_salt,
        skip_special_tokens=_or_true(request.text_options, "skip_special_tokens"),
    )
    sampling.bad_word_ids = bad_word_ids(request.sampling.bad_words, encode_word)
    sampling.grammar = grammar_spec(request.sampling)
    if request.HasField("resume"):
        sampling.num_prompt_logprobs = -1  # the stream that is continued has them
        _apply_resume(start, request, model)
    return start


def _or_true(options: generation_service_pb2.TextOptions, name: str) -> bool:
    return bool(getattr(options, name)) if options.HasField(name) else True


def _num_choices(sampling: generation_service_pb2.SamplingParameters, grant: Grant) -> int:
    if not sampling.HasField("num_choices"):
        return 1
    if not 1 <= sampling.num_choices <= MAX_NUM_CHOICES:
        invalid("sampling.num_choices", f"is {sampling.num_choices}, must be 1 to {MAX_NUM_CHOICES}")
    check_choices(grant, sampling.num_choices)
    return sampling.num_choices


def _number(
    message: generation_service_pb2.SamplingParameters,
    name: str,
    default: float,
    low: float,
    high: float,
    *,
    over_low: bool = False,
) -> float:
    """A float field within its bounds; NaN and infinities are in none."""
    if not message.HasField(name):
        return default
    value = float(getattr(message, name))
    least = _float32(low)  # as a client's own bound arrives
    if not math.isfinite(value) or value < least or value > high or (over_low and value == least):
        span = f"over {low:g} and at most {high:g}" if over_low else f"{low:g} to {high:g}"
        invalid(f"sampling.{name}", f"is {_digits(value)}, must be {span}")
    return value + 0.0  # -0.0 becomes 0.0


def _sampling(message: generation_service_pb2.SamplingParameters, model: ModelLimits) -> Sampling:
    defaults = model.defaults
    top_k = message.top_k if message.HasField("top_k") else defaults.top_k or 0
    num_logprobs = -1
    if message.HasField("num_logprobs"):
        num_logprobs = message.num_logprobs
        if num_logprobs > MAX_NUM_LOGPROBS:
            invalid("sampling.num_logprobs", f"is {num_logprobs}, must be 0 to {MAX_NUM_LOGPROBS}")
    allowed = sorted(set(message.allowed_token_ids))
    check_token_ids(message.allowed_token_ids, model.vocab_size, "sampling.allowed_token_ids")
    return Sampling(
        temperature=_number(message, "temperature", _first(defaults.temperature, 1.0), 0.0, 2.0),
        top_k=0 if top_k >= model.vocab_size else top_k,
        top_p=_number(message, "top_p", _first(defaults.top_p, 1.0), 0.0, 1.0, over_low=True),
        min_p=_number(message, "min_p", _first(defaults.min_p, 0.0), 0.0, 1.0),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        repetition_penalty=_number(
            message,
            "repetition_penalty",
            _first(defaults.repetition_penalty, 1.0),
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=_number(message, "presence_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(message, model.vocab_size),
        allowed_token_ids=allowed,
        num_logprobs=num_logprobs,
    )


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _digits(value: float) -> str:
    """A float32 in as few digits as tell it from every other, six at least: 1.0000001 is not 1."""
    shorter = (f"{value:.{num_digits}g}" for num_digits in range(6, 9))
    return next((digits for digits in shorter if _float32(float(digits)) == value), f"{value:.9g}")


def _logit_bias(message: generation_service_pb2.SamplingParameters, vocab_size: int) -> dict[int, float]:
    if len(message.logit_bias) > MAX_NUM_LOGIT_BIAS:
        invalid(
            "sampling.logit_bias", f"has {len(message.logit_bias)} entries, at most {MAX_NUM_LOGIT_BIAS} are allowed"
        )
    for token_id, bias in message.logit_bias.items():
        param = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            invalid(param, f"names a token outside the vocabulary (0 to {vocab_size - 1})")
        if not math.isfinite(bias) or abs(bias) > 100.0:
            invalid(param, f"is {_digits(bias)}, must be -100 to 100")
    return dict(message.logit_bias)


def _stop(
    message: generation_service_pb2.StopCriteria, sampling: Sampling, model: ModelLimits, grant: Grant, room: int
) -> Stop:
    try:
        strings = list(validate_stops(list(message.strings)))
    except ValueError as error:
        invalid("stop.strings", str(error))
    if len(message.token_ids) > MAX_NUM_STOP_TOKEN_IDS:
        invalid("stop.token_ids", f"has {len(message.token_ids)} ids, at most {MAX_NUM_STOP_TOKEN_IDS} are allowed")
    check_token_ids(message.token_ids, model.vocab_size, "stop.token_ids")
    stop_ids = sorted(set(message.token_ids))
    eos_ids = [] if message.ignore_eos else list(model.eos_token_ids)
    max_output = room
    if message.HasField("max_output_tokens"):
        if message.max_output_tokens < 1:
            invalid("stop.max_output_tokens", "is 0, must be at least 1")
        max_output = min(max_output, message.max_output_tokens)
        check_output_tokens(grant, max_output)
    if grant.max_output_tokens:
        max_output = min(max_output, grant.max_output_tokens)
    min_output = message.min_output_tokens
    if message.HasField("max_output_tokens") and min_output > message.max_output_tokens:
        invalid("stop.min_output_tokens", f"is {min_output}, over max_output_tokens of {message.max_output_tokens}")
    masked = sorted({*eos_ids, *stop_ids}) if min_output else []
    if masked and sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(masked):
        invalid(
            "stop.min_output_tokens", "leaves no token to sample: all allowed_token_ids end the output; allow another"
        )
    return Stop(
        max_output_tokens=max_output,
        min_output_tokens=min(min_output, max_output),
        strings=strings,
        include_stop_string=message.include_stop_string,
        stop_token_ids=stop_ids,
        eos_token_ids=eos_ids,
        masked_until_min=masked,
    )


def seconds_of(duration: duration_pb2.Duration, param: str, *, maximum: float) -> float:
    """A duration over 0 and at most `maximum` seconds. Raises DragomanError."""
    if abs(duration.nanos) > 999_999_999 or duration.seconds * duration.nanos < 0:
        invalid(param, "is not a valid duration: nanos must be within a second and of the sign of seconds")
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 < seconds <= maximum:
        invalid(param, f"is {seconds:g} s, must be over 0 and at most {maximum:g} s")
    return seconds


def _deadline(
    request: generation_service_pb2.GenerateRequest, grant: Grant, call_seconds_left: float | None
) -> float | None:
    limits: list[float] = []
    if request.HasField("deadline"):
        limits.append(seconds_of(request.deadline, "deadline", maximum=MAX_DEADLINE_SECONDS))
    if grant.deadline_seconds is not None:
        limits.append(grant.deadline_seconds)
    if call_seconds_left is not None and call_seconds_left < MAX_DEADLINE_SECONDS:
        limits.append(call_seconds_left + CALL_GRACE_SECONDS)
    return min(limits) if limits else None


def _resume_refused(message: str, param: str) -> NoReturn:
    raise DragomanError(error_pb2.ERROR_REASON_RESUME_REFUSED, f"{param}: {message}", metadata={"param": param})


def _apply_resume(start: Start, request: generation_service_pb2.GenerateRequest, model: ModelLimits) -> None:
    """Put what was delivered into the command. Raises DragomanError where it does not fit the request."""
    resume = request.resume
    if not 1 <= resume.attempt <= MAX_RESUMES:
        _resume_refused(f"is {resume.attempt}, must be 1 to {MAX_RESUMES}", "resume.attempt")
    if request.sampling.HasField("seed") and request.sampling.seed != resume.seed:
        _resume_refused("is not the seed of the request; send both as they were", "resume.seed")
    start.sampling.seed = resume.seed
    delivered: list[list[int]] = [[] for _ in range(start.num_choices)]
    seen: set[int] = set()
    for index, progress in enumerate(resume.choices):
        param = f"resume.choices[{index}]"
        choice = progress.choice_index
        if choice >= start.num_choices or choice in seen:
            _resume_refused(f"choice_index {choice} is not one of {start.num_choices} choices, each named once", param)
        seen.add(choice)
        ids = list(progress.token_ids.ids)
        check_token_ids(ids, model.vocab_size, f"{param}.token_ids.ids")
        if progress.HasField("finish"):
            start.finished_choices.append(choice)
        elif len(ids) >= start.stop.max_output_tokens:
            _resume_refused(
                f"has {len(ids)} tokens of {start.stop.max_output_tokens} and no finish; it had ended", param
            )
        if len(ids) > start.stop.max_output_tokens:
            _resume_refused(f"has {len(ids)} tokens, over the budget of {start.stop.max_output_tokens}", param)
        delivered[choice] = ids
    start.delivered = delivered
    start.credit += _least_open(start)


def _least_open(start: Start) -> int:
    """Cursor of the open choice that is furthest behind: credit counts from there."""
    open_lengths: Iterable[int] = (
        len(ids) for choice, ids in enumerate(start.delivered) if choice not in start.finished_choices
    )
    return min(open_lengths, default=0)
