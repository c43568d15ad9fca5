"""Requests of vLLM's gRPC interface in our own terms, and refusals in theirs. Pure."""

from __future__ import annotations

import uuid
from typing import NoReturn

from dragoman.compat import vllm_engine_pb2 as vllm
from dragoman.errors import DragomanError
from dragoman.v1 import embedding_service_pb2, error_pb2, generation_service_pb2
from dragoman.v1.tokens_pb2 import TokenIds
from dragoman_agent.rpc.refusal import invalid

_SEED_MASK = (1 << 64) - 1
_DRAW_A_SEED = -1
# Where a field of ours comes from, the more exact first.
_THEIR_NAMES = (
    ("sampling.grammar.json_schema", "sampling_params.json_schema"),
    ("sampling.grammar.json_object", "sampling_params.json_object"),
    ("sampling.grammar.regex", "sampling_params.regex"),
    ("sampling.grammar.choices", "sampling_params.choice"),
    ("sampling.grammar.lark", "sampling_params.grammar"),
    ("sampling.num_choices", "sampling_params.n"),
    ("sampling.num_logprobs", "sampling_params.logprobs"),
    ("sampling.num_prompt_logprobs", "sampling_params.prompt_logprobs"),
    ("sampling.", "sampling_params."),
    ("stop.max_output_tokens", "sampling_params.max_tokens"),
    ("stop.min_output_tokens", "sampling_params.min_tokens"),
    ("stop.strings", "sampling_params.stop"),
    ("stop.token_ids", "sampling_params.stop_token_ids"),
    ("inputs[0].token_ids.ids", "tokenized.input_ids"),
    ("inputs[0]", "tokenized.input_ids"),
    ("token_ids.ids", "tokenized.input_ids"),
)


def generate_request(request: vllm.GenerateRequest) -> generation_service_pb2.GenerateRequest:
    """The same generation as a request of ours. Raises DragomanError for what this server does not do.

    Every sampling value is set, as that interface has defaults of its own: the model's never apply.
    """
    _refuse_what_we_have_not(request)
    params = request.sampling_params
    made = generation_service_pb2.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(params),
        stop=_stop(params),
        text_options=generation_service_pb2.TextOptions(skip_special_tokens=params.skip_special_tokens),
    )
    kind = request.WhichOneof("input")
    if kind is None:
        invalid("input", "is missing; send tokenized or text")
    if kind == "text":
        made.text = request.text
    else:
        made.token_ids.CopyFrom(TokenIds(ids=_prompt_ids(request)))
    return made


def _prompt_ids(request: vllm.GenerateRequest) -> list[int]:
    ids, params = list(request.tokenized.input_ids), request.sampling_params
    return ids[-params.truncate_prompt_tokens :] if params.HasField("truncate_prompt_tokens") else ids


def _refuse_what_we_have_not(request: vllm.GenerateRequest) -> None:
    params = request.sampling_params
    if request.HasField("mm_inputs"):
        _unsupported("mm_inputs", "is set, and this server takes text and token ids only; leave it out")
    if request.HasField("kv_transfer_params") or request.kv_transfer_params_json:
        param = "kv_transfer_params" if request.HasField("kv_transfer_params") else "kv_transfer_params_json"
        _unsupported(
            param,
            "is set, and agents of this server pass KV blocks among themselves by their own protocol; leave it out",
        )
    if request.data_parallel_rank:
        invalid("data_parallel_rank", f"is {request.data_parallel_rank}, and an agent is one rank, 0; leave it out")
    if params.WhichOneof("constraint") == "structural_tag":
        _unsupported(
            "sampling_params.structural_tag", "is not one of the forms here; use json_schema, regex, choice or grammar"
        )
    if params.HasField("truncate_prompt_tokens"):
        param = "sampling_params.truncate_prompt_tokens"
        if params.truncate_prompt_tokens < 1:
            invalid(param, f"is {params.truncate_prompt_tokens}, must be at least 1; say how many tokens to keep")
        if request.WhichOneof("input") == "text":
            _unsupported(param, "is for tokenized input here; send token ids, or shorten the text")


def _sampling(params: vllm.SamplingParams) -> generation_service_pb2.SamplingParameters:
    made = generation_service_pb2.SamplingParameters(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        num_choices=params.n or 1,
    )
    if params.HasField("seed") and params.seed != _DRAW_A_SEED:
        made.seed = params.seed & _SEED_MASK
    for name, count in (("logprobs", "num_logprobs"), ("prompt_logprobs", "num_prompt_logprobs")):
        if params.HasField(name):
            value = getattr(params, name)
            if value < 0:
                invalid(f"sampling_params.{name}", f"is {value}, must be 0 to 20; the whole vocabulary is not sent")
            setattr(made, count, value)
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            invalid(f"sampling_params.logit_bias[{token_id}]", "is no token id; ids begin at 0")
        made.logit_bias[token_id] = bias
    _fill_grammar(params, made)
    return made


def _fill_grammar(params: vllm.SamplingParams, made: generation_service_pb2.SamplingParameters) -> None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            made.grammar.json_schema = params.json_schema
        case "json_object":
            made.grammar.json_object = params.json_object
        case "regex":
            made.grammar.regex = params.regex
        case "grammar":
            made.grammar.lark = params.grammar
        case "choice":
            made.grammar.choices.SetInParent()
            made.grammar.choices.texts.extend(params.choice.choices)


def _stop(params: vllm.SamplingParams) -> generation_service_pb2.StopCriteria:
    made = generation_service_pb2.StopCriteria(
        strings=params.stop,
        token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_string=params.include_stop_str_in_output,
    )
    if params.HasField("max_tokens"):
        made.max_output_tokens = params.max_tokens
    if params.min_tokens:
        made.min_output_tokens = params.min_tokens
    return made


def embed_request(request: vllm.EmbedRequest) -> embedding_service_pb2.EmbedRequest:
    """The same embedding as a request of ours. Raises DragomanError."""
    if not request.HasField("tokenized"):
        invalid("tokenized", "is missing; send the token ids of the prompt")
    ids = TokenIds(ids=request.tokenized.input_ids)
    return embedding_service_pb2.EmbedRequest(
        request_id=request.request_id or str(uuid.uuid4()),
        inputs=[embedding_service_pb2.EmbedInput(token_ids=ids)],
    )


def in_their_names(error: DragomanError) -> DragomanError:
    """The same refusal, naming the field that the caller sent."""
    param = error.metadata.get("param", "")
    theirs = next((new + param[len(old) :] for old, new in _THEIR_NAMES if param.startswith(old)), param)
    if theirs == param:
        return error
    message = error.message
    if message.startswith(param):
        message = theirs + message[len(param) :]
    return DragomanError(
        error.reason, message, retry_delay=error.retry_delay, metadata={**error.metadata, "param": theirs}
    )


def _unsupported(param: str, message: str) -> NoReturn:
    raise DragomanError(error_pb2.ERROR_REASON_UNSUPPORTED_PARAMETER, f"{param}: {message}", metadata={"param": param})
