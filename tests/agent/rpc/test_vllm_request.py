"""Requests of vLLM's interface in our words."""

from __future__ import annotations

from dragoman.compat import vllm_engine_pb2 as vllm
from dragoman.errors import DragomanError
from dragoman.v1.generation_service_pb2 import (
    GenerateRequest,
    Grammar,
    GrammarChoices,
    SamplingParameters,
    StopCriteria,
    TextOptions,
)
from dragoman_agent.rpc.vllm_request import embed_request, generate_request, in_their_names


def test_defaults_are_those_of_the_interface() -> None:
    made = generate_request(vllm.GenerateRequest(request_id="r", text="x")).sampling
    assert (made.temperature, made.top_p, made.top_k, made.repetition_penalty, made.num_choices) == (1, 1, 0, 1, 1)
    assert made.HasField("top_k") and made.HasField("min_p") and not made.HasField("seed")
    for seed, expected in ((7, 7), (-2, 2**64 - 2)):
        request = vllm.GenerateRequest(request_id="r", text="x", sampling_params=vllm.SamplingParams(seed=seed))
        assert generate_request(request).sampling.seed == expected
    request.sampling_params.seed = -1
    assert not generate_request(request).sampling.HasField("seed")


def test_every_field_goes_where_it_belongs() -> None:
    params = vllm.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, frequency_penalty=0.75, presence_penalty=1.5,
        repetition_penalty=1.25, max_tokens=9, min_tokens=2, stop=["x"], stop_token_ids=[4], skip_special_tokens=True,
        ignore_eos=True, n=3, logprobs=5, prompt_logprobs=6, seed=8, include_stop_str_in_output=True, logit_bias={1: -2.0},
        json_schema="{}",
    )  # fmt: skip
    made = generate_request(
        vllm.GenerateRequest(request_id="r", text="hi", sampling_params=params, data_parallel_rank=0)
    )
    assert made == GenerateRequest(
        request_id="r",
        text="hi",
        sampling=SamplingParameters(
            temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, frequency_penalty=0.75, presence_penalty=1.5,
            repetition_penalty=1.25, num_choices=3, num_logprobs=5, num_prompt_logprobs=6, seed=8, logit_bias={1: -2.0},
            grammar=Grammar(json_schema="{}"),
        ),
        stop=StopCriteria(
            max_output_tokens=9, min_output_tokens=2, strings=["x"], token_ids=[4], ignore_eos=True, include_stop_string=True
        ),
        text_options=TextOptions(skip_special_tokens=True),
    )  # fmt: skip
    for form, grammar in (
        ({"regex": "a+"}, Grammar(regex="a+")),
        ({"grammar": "start: A"}, Grammar(lark="start: A")),
        ({"json_object": True}, Grammar(json_object=True)),
        ({"choice": vllm.ChoiceConstraint(choices=["a", "b"])}, Grammar(choices=GrammarChoices(texts=["a", "b"]))),
    ):
        request = vllm.GenerateRequest(request_id="r", text="hi", sampling_params=vllm.SamplingParams(**form))  # type: ignore[arg-type]
        assert generate_request(request).sampling.grammar == grammar


def test_a_refusal_of_no_field_keeps_its_words() -> None:
    error = DragomanError(1, "full", retry_delay=2.0)
    assert in_their_names(error) is error
    assert embed_request(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=[1]))).request_id
