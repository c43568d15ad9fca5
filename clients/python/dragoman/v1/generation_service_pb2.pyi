import datetime

from dragoman.v1 import error_pb2 as _error_pb2
from dragoman.v1 import tokens_pb2 as _tokens_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "ticket_token", "model", "text", "token_ids", "sampling", "stop", "text_options", "resume", "deadline", "cache_salt", "initial_credit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TEXT_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CREDIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket_token: bytes
    model: str
    text: str
    token_ids: _tokens_pb2.TokenIds
    sampling: SamplingParameters
    stop: StopCriteria
    text_options: TextOptions
    resume: ResumeState
    deadline: _duration_pb2.Duration
    cache_salt: str
    initial_credit: int
    def __init__(self, request_id: _Optional[str] = ..., ticket_token: _Optional[bytes] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_tokens_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., stop: _Optional[_Union[StopCriteria, _Mapping]] = ..., text_options: _Optional[_Union[TextOptions, _Mapping]] = ..., resume: _Optional[_Union[ResumeState, _Mapping]] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cache_salt: _Optional[str] = ..., initial_credit: _Optional[int] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "num_logprobs", "num_prompt_logprobs", "num_choices", "allowed_token_ids", "bad_words", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    num_logprobs: int
    num_prompt_logprobs: int
    num_choices: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., num_choices: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choices", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choices: GrammarChoices
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choices: _Optional[_Union[GrammarChoices, _Mapping]] = ..., lark: _Optional[str] = ...) -> None: ...

class GrammarChoices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class StopCriteria(_message.Message):
    __slots__ = ("max_output_tokens", "strings", "ignore_eos", "token_ids", "min_output_tokens", "include_stop_string")
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    max_output_tokens: int
    strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_output_tokens: int
    include_stop_string: bool
    def __init__(self, max_output_tokens: _Optional[int] = ..., strings: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., token_ids: _Optional[_Iterable[int]] = ..., min_output_tokens: _Optional[int] = ..., include_stop_string: _Optional[bool] = ...) -> None: ...

class TextOptions(_message.Message):
    __slots__ = ("add_special_tokens", "parse_special_tokens", "skip_special_tokens")
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    add_special_tokens: bool
    parse_special_tokens: bool
    skip_special_tokens: bool
    def __init__(self, add_special_tokens: _Optional[bool] = ..., parse_special_tokens: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class ResumeState(_message.Message):
    __slots__ = ("attempt", "origin_epoch", "seed", "choices")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    origin_epoch: int
    seed: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceProgress]
    def __init__(self, attempt: _Optional[int] = ..., origin_epoch: _Optional[int] = ..., seed: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceProgress, _Mapping]]] = ...) -> None: ...

class ChoiceProgress(_message.Message):
    __slots__ = ("choice_index", "token_ids", "finish")
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    choice_index: int
    token_ids: _tokens_pb2.TokenIds
    finish: ChoiceFinish
    def __init__(self, choice_index: _Optional[int] = ..., token_ids: _Optional[_Union[_tokens_pb2.TokenIds, _Mapping]] = ..., finish: _Optional[_Union[ChoiceFinish, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished", "failed")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    started: GenerationStarted
    delta: GenerationDelta
    finished: GenerationFinished
    failed: GenerationFailed
    def __init__(self, started: _Optional[_Union[GenerationStarted, _Mapping]] = ..., delta: _Optional[_Union[GenerationDelta, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ..., failed: _Optional[_Union[GenerationFailed, _Mapping]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("prompt_tokens", "epoch", "seed", "prompt_logprobs")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    epoch: int
    seed: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, prompt_tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., seed: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class GenerationDelta(_message.Message):
    __slots__ = ("token_ids", "text", "cursor", "choice_index", "logprobs", "finish")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    cursor: int
    choice_index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish: ChoiceFinish
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., cursor: _Optional[int] = ..., choice_index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[ChoiceFinish, _Mapping]] = ...) -> None: ...

class ChoiceFinish(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token_bytes", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token_bytes: bytes
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token_bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("usage", "time_to_first_token", "queue_time", "total_time")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    time_to_first_token: _duration_pb2.Duration
    queue_time: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class GenerationFailed(_message.Message):
    __slots__ = ("error", "usage")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    error: _error_pb2.ErrorDetail
    usage: Usage
    def __init__(self, error: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("start", "credit", "cancel")
    START_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    start: AttachStart
    credit: AttachCredit
    cancel: AttachCancel
    def __init__(self, start: _Optional[_Union[AttachStart, _Mapping]] = ..., credit: _Optional[_Union[AttachCredit, _Mapping]] = ..., cancel: _Optional[_Union[AttachCancel, _Mapping]] = ...) -> None: ...

class AttachStart(_message.Message):
    __slots__ = ("stream_id", "request")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request: GenerateRequest
    def __init__(self, stream_id: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class AttachCredit(_message.Message):
    __slots__ = ("stream_id", "until_cursor")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_CURSOR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    until_cursor: int
    def __init__(self, stream_id: _Optional[int] = ..., until_cursor: _Optional[int] = ...) -> None: ...

class AttachCancel(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    def __init__(self, stream_id: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("events", "epoch")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[AttachEvent]
    epoch: int
    def __init__(self, events: _Optional[_Iterable[_Union[AttachEvent, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class AttachEvent(_message.Message):
    __slots__ = ("stream_id", "response", "refused")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    response: GenerateResponse
    refused: _error_pb2.ErrorDetail
    def __init__(self, stream_id: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., refused: _Optional[_Union[_error_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class CancelGenerationRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelGenerationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
