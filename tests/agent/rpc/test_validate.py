from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import admission_service_pb2
from dragoman.v1.generation_service_pb2 import (
    ChoiceFinish,
    ChoiceProgress,
    GenerateRequest,
    Grammar,
    GrammarChoices,
    ResumeState,
    SamplingParameters,
    StopCriteria,
    TextOptions,
)
from dragoman.v1.tokens_pb2 import TokenIds
from dragoman_agent.engine.messages import GrammarSpec, Start
from dragoman_agent.rpc.validate import ModelLimits, SamplingDefaults, build_start
from dragoman_agent.tickets import Grant

MODEL = ModelLimits(vocab_size=300, max_context_tokens=64, hidden_size=16, eos_token_ids=(258,))
PROMPT = [1, 2, 3]
NAN, INF = math.nan, math.inf


def build(
    request: GenerateRequest | None = None,
    prompt: list[int] | None = None,
    model: ModelLimits = MODEL,
    **options: object,
) -> Start:
    request = request or GenerateRequest()
    request.request_id = request.request_id or "r1"
    return build_start(request, PROMPT if prompt is None else prompt, model, **options)  # type: ignore[arg-type]


def sampling(**fields: object) -> GenerateRequest:
    return GenerateRequest(sampling=SamplingParameters(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> GenerateRequest:
    return GenerateRequest(stop=StopCriteria(**fields))  # type: ignore[arg-type]


def refused(action: Callable[[], object]) -> DragomanError:
    with pytest.raises(DragomanError) as caught:
        action()
    return caught.value


def test_defaults_are_those_of_openai_and_the_room_left() -> None:
    start = build()
    assert (start.sampling.temperature, start.sampling.top_p, start.sampling.top_k) == (1.0, 1.0, 0)
    assert (start.sampling.min_p, start.sampling.repetition_penalty, start.sampling.num_logprobs) == (0.0, 1.0, -1)
    assert (start.num_choices, start.credit, start.deadline_seconds) == (1, 256, None)
    assert start.stop.max_output_tokens == 64 - 3
    assert start.stop.eos_token_ids == [258]
    assert start.skip_special_tokens


def test_model_defaults_come_before_openai_and_after_the_request() -> None:
    model = ModelLimits(300, 64, 16, (), SamplingDefaults(temperature=0.2, top_p=0.9, top_k=50, repetition_penalty=1.1))
    start = build(model=model)
    assert (start.sampling.temperature, start.sampling.top_p, start.sampling.top_k) == (0.2, 0.9, 50)
    start = build(sampling(temperature=0.0, top_k=0), model=model)
    assert (start.sampling.temperature, start.sampling.top_k) == (0.0, 0)


def test_unset_seed_is_drawn_and_zero_is_a_seed() -> None:
    seeds = {build().sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert build(sampling(seed=0)).sampling.seed == 0
    assert build(sampling(seed=2**64 - 1)).sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -3.0, 1e30])
def test_b07_numbers_that_are_none(name: str, value: float) -> None:
    error = refused(lambda: build(sampling(**{name: value})))
    assert (error.reason_name, error.metadata["param"]) == ("invalid_request", f"sampling.{name}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"temperature": 2.01}, "sampling.temperature"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"num_choices": 0}, "sampling.num_choices"),
        ({"num_choices": 5_000_000}, "sampling.num_choices"),
        ({"num_logprobs": 21}, "sampling.num_logprobs"),
        ({"num_logprobs": 1_000_000_000}, "sampling.num_logprobs"),
        ({"logit_bias": {300: 1.0}}, "sampling.logit_bias[300]"),
        ({"logit_bias": {9_999_999: 5.0}}, "sampling.logit_bias[9999999]"),
        ({"logit_bias": {5: 101.0}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: NAN}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: INF}}, "sampling.logit_bias[5]"),
        ({"logit_bias": dict.fromkeys(range(5000), 1.0)}, "sampling.logit_bias"),
        ({"allowed_token_ids": [5, 300]}, "sampling.allowed_token_ids[1]"),
    ],
)
def test_b05_b07_sampling_out_of_range(fields: dict[str, object], param: str) -> None:
    begun = time.perf_counter()
    error = refused(lambda: build(sampling(**fields)))
    assert time.perf_counter() - begun < 0.05
    assert (error.reason_name, error.metadata["param"]) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("top_p", 1.0000001, "is 1.0000001, must be over 0 and at most 1"),
        ("temperature", 2.1, "is 2.1, must be 0 to 2"),
        ("repetition_penalty", 0.00999, "is 0.00999, must be 0.01 to 100"),
        ("repetition_penalty", 3.4028235e38, "is 3.4028235e+38, must be 0.01 to 100"),
        ("min_p", NAN, "is nan, must be 0 to 1"),
    ],
)
def test_a_value_out_of_range_is_told_from_its_bound(name: str, value: float, told: str) -> None:
    assert told in refused(lambda: build(sampling(**{name: value}))).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_prompt_logprobs": 21}, "sampling.num_prompt_logprobs"),
        ({"bad_words": ["x", " "]}, "sampling.bad_words[1]"),
        ({"bad_words": ["x" * 257]}, "sampling.bad_words[0]"),
        ({"bad_words": ["x"] * 257}, "sampling.bad_words"),
        ({"grammar": Grammar()}, "sampling.grammar"),
        ({"grammar": Grammar(json_object=False)}, "sampling.grammar.json_object"),
        ({"grammar": Grammar(regex="")}, "sampling.grammar.regex"),
        ({"grammar": Grammar(lark="x" * ((1 << 20) + 1))}, "sampling.grammar.lark"),
        ({"grammar": Grammar(choices=GrammarChoices())}, "sampling.grammar.choices"),
        ({"grammar": Grammar(choices=GrammarChoices(texts=["a", ""]))}, "sampling.grammar.choices.texts[1]"),
    ],
)
def test_constraints_that_cannot_be(fields: dict[str, object], param: str) -> None:
    error = refused(lambda: build(sampling(**fields), encode_word=lambda text: list(text.encode())))
    assert (error.reason_name, error.metadata["param"]) == ("invalid_request", param)


def test_constraints_reach_the_engine() -> None:
    asked = sampling(bad_words=["no", " go "], num_prompt_logprobs=3, grammar=Grammar(json_object=True))
    made = build(asked, encode_word=lambda text: list(text.encode())).sampling
    assert made.bad_word_ids == [list(b"no"), list(b" no"), list(b"go"), list(b" go")]
    assert made.num_prompt_logprobs == 3
    assert made.grammar == GrammarSpec("json_schema", '{"type": "object"}')


def test_a_long_prompt_gets_no_more_alternatives_than_a_message_holds() -> None:
    param = "sampling.num_prompt_logprobs"
    limits = replace(MODEL, max_context_tokens=50_000)
    error = refused(lambda: build(sampling(num_prompt_logprobs=20), prompt=[1] * 40_000, model=limits))
    assert error.metadata["param"] == param and "at most 9" in error.message


def test_edges_that_are_legal() -> None:
    start = build(sampling(temperature=-0.0, top_p=1.0, top_k=4_000_000_000, num_choices=128, num_logprobs=20))
    assert math.copysign(1.0, start.sampling.temperature) == 1.0
    assert start.sampling.top_k == 0
    assert build(sampling(temperature=1e-30)).sampling.temperature > 0
    # Both bounds are legal, though a float32 of 0.01 is less than 0.01.
    assert build(sampling(repetition_penalty=0.01)).sampling.repetition_penalty == pytest.approx(0.01)
    assert build(sampling(repetition_penalty=100.0)).sampling.repetition_penalty == 100.0
    assert build(sampling(logit_bias={299: -100.0})).sampling.logit_bias == {299: -100.0}


@pytest.mark.parametrize(
    ("prompt", "param"), [([], "prompt"), ([1, 300], "token_ids.ids[1]"), ([2**31], "token_ids.ids[0]")]
)
def test_b06_prompt_ids(prompt: list[int], param: str) -> None:
    error = refused(lambda: build(prompt=prompt))
    assert (error.reason_name, error.metadata["param"]) == ("invalid_request", param)


@pytest.mark.parametrize(
    ("length", "asked", "given"), [(63, 1, 1), (63, 10, 1), (63, None, 1), (1, 63, 63), (1, 2**32 - 1, 63)]
)
def test_b14_exact_fit_is_clamped_to_the_room_left(length: int, asked: int | None, given: int) -> None:
    request = GenerateRequest() if asked is None else stop(max_output_tokens=asked)
    assert build(request, [1] * length).stop.max_output_tokens == given


@pytest.mark.parametrize("length", [64, 65, 640])
def test_b14_over_the_context(length: int) -> None:
    error = refused(lambda: build(stop(max_output_tokens=10), [1] * length))
    assert error.reason_name == "context_exceeded"
    assert error.metadata["prompt_tokens"] == str(length)
    assert (error.metadata["limit"], error.metadata["max_output_tokens"]) == ("64", "10")
    assert f"{length} tokens and 10 were asked for" in error.message


def test_b03_stop_strings() -> None:
    five = ["a1", "b2", "c3", "d4", "e5"]
    assert build(stop(strings=five)).stop.strings == five
    assert len(build(stop(strings=[f"{i:020}" for i in range(1000)])).stop.strings) == 1000
    for bad in ([""], ["x" * 100_000], ["x"] * 2000):
        assert refused(lambda bad=bad: build(stop(strings=bad))).metadata["param"] == "stop.strings"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "stop.max_output_tokens"),
        ({"token_ids": [300]}, "stop.token_ids[0]"),
        ({"token_ids": [1] * 2000}, "stop.token_ids"),
        ({"max_output_tokens": 3, "min_output_tokens": 4}, "stop.min_output_tokens"),
    ],
)
def test_stop_out_of_range(fields: dict[str, object], param: str) -> None:
    assert refused(lambda: build(stop(**fields))).metadata["param"] == param


def test_ignore_eos_leaves_the_users_own_stop_ids() -> None:
    start = build(stop(ignore_eos=True, token_ids=[7], min_output_tokens=2))
    assert (start.stop.eos_token_ids, start.stop.stop_token_ids) == ([], [7])
    assert start.stop.masked_until_min == [7]
    assert build(stop(min_output_tokens=2, token_ids=[7])).stop.masked_until_min == [7, 258]


def test_nothing_left_to_sample_is_refused() -> None:
    request = sampling(allowed_token_ids=[258])
    request.stop.min_output_tokens = 1
    assert refused(lambda: build(request)).metadata["param"] == "stop.min_output_tokens"


def test_deadline_is_the_least_of_all() -> None:
    request = GenerateRequest()
    request.deadline.FromMilliseconds(2500)
    assert build(request).deadline_seconds == 2.5
    assert build(request, grant=Grant(deadline_seconds=2.0), call_seconds_left=9.0).deadline_seconds == 2.0
    assert build(request, call_seconds_left=1.0).deadline_seconds == 1.1, "the call's own status comes first"
    assert build(call_seconds_left=9e18).deadline_seconds is None


@pytest.mark.parametrize(("seconds", "nanos"), [(0, 0), (-1, 0), (1, -5), (0, 2_000_000_000), (10**12, 0)])
def test_deadline_that_is_none(seconds: int, nanos: int) -> None:
    request = GenerateRequest()
    request.deadline.seconds, request.deadline.nanos = seconds, nanos
    assert refused(lambda: build(request)).metadata["param"] == "deadline"


@pytest.mark.parametrize("request_id", ["x" * 129, "ä" * 65, "a\nb", "\x00"])
def test_request_id_must_be_short_and_printable(request_id: str) -> None:
    assert refused(lambda: build(GenerateRequest(request_id=request_id))).metadata["param"] == "request_id"


def test_cache_salt_is_bounded() -> None:
    assert refused(lambda: build(GenerateRequest(cache_salt="s" * 257))).metadata["param"] == "cache_salt"


def test_ticket_limits_the_output_and_gives_tenant_and_class() -> None:
    grant = Grant(tenant="acme", priority=admission_service_pb2.PRIORITY_INTERACTIVE, max_output_tokens=5)
    start = build(grant=grant)
    assert (start.stop.max_output_tokens, start.tenant, start.priority) == (5, "acme", 0)
    assert build(grant=Grant(priority=99)).priority == 1
    assert build(stop(max_output_tokens=5), grant=grant).stop.max_output_tokens == 5
    error = refused(lambda: build(stop(max_output_tokens=50), grant=grant))
    assert (error.reason_name, error.metadata["claim"]) == ("ticket_mismatch", "max_output_tokens")
    assert "asks for 50 output tokens, the ticket allows 5" in error.message
    # The controller clamps to the room in the context as well: asking for more than fits is no mismatch.
    room = Grant(max_output_tokens=64 - 3)
    assert build(stop(max_output_tokens=5000), [1, 2, 3], grant=room).stop.max_output_tokens == 64 - 3
    error = refused(lambda: build(grant=Grant(max_prompt_tokens=2)))
    assert error.reason_name == "ticket_mismatch"


def test_ticket_limits_the_choices() -> None:
    one, three, unsaid = Grant(max_choices=1), Grant(max_choices=3), Grant(jti=b"j" * 16, max_output_tokens=5)
    for asked, grant in ((2, one), (9, one), (4, three), (128, three)):
        error = refused(lambda asked=asked, grant=grant: build(sampling(num_choices=asked), grant=grant))  # type: ignore[misc]
        assert (error.reason_name, error.metadata["claim"]) == ("ticket_mismatch", "max_choices")
        assert f"asks for {asked} choices, the ticket allows {grant.max_choices}; ask the controller" in error.message
    for asked, grant in ((1, one), (3, three), (2, three), (128, unsaid)):
        assert build(sampling(num_choices=asked), grant=grant).num_choices == asked
    assert build(grant=one).num_choices == 1, "a request that does not say is for one"
    assert refused(lambda: build(sampling(num_choices=129), grant=one)).reason_name == "invalid_request"


def test_ticket_limits_the_choices_of_a_resume_too() -> None:
    request = resumed(progress(1, [5, 6], finished=True), progress(0, [7]), n=2)
    assert build(request, grant=Grant(max_choices=2)).delivered == [[7], [5, 6]]
    assert refused(lambda: build(request, grant=Grant(max_choices=1))).reason_name == "ticket_mismatch"


def test_text_options() -> None:
    assert not build(GenerateRequest(text_options=TextOptions(skip_special_tokens=False))).skip_special_tokens


def resumed(*choices: ChoiceProgress, n: int = 1, attempt: int = 1, seed: int = 9) -> GenerateRequest:
    request = sampling(num_choices=n)
    request.stop.max_output_tokens = 4
    request.resume.CopyFrom(ResumeState(attempt=attempt, origin_epoch=3, seed=seed, choices=choices))
    return request


def progress(choice: int, ids: list[int], finished: bool = False) -> ChoiceProgress:
    message = ChoiceProgress(choice_index=choice, token_ids=TokenIds(ids=ids))
    if finished:
        message.finish.CopyFrom(ChoiceFinish(reason=1))
    return message


def test_resume_carries_tokens_seed_and_credit() -> None:
    start = build(resumed(progress(1, [5, 6], finished=True), progress(0, [7, 8, 9]), n=2))
    assert start.delivered == [[7, 8, 9], [5, 6]]
    assert start.finished_choices == [1]
    assert start.sampling.seed == 9
    assert start.credit == 256 + 3


def test_resume_that_does_not_fit() -> None:
    wrong = {
        "attempt 0": resumed(attempt=0),
        "attempt 4": resumed(attempt=4),
        "choice unknown": resumed(progress(1, [1])),
        "choice twice": resumed(progress(0, [1]), progress(0, [1])),
        "over budget": resumed(progress(0, [1] * 5, finished=True)),
        "had ended": resumed(progress(0, [1] * 4)),
    }
    for name, request in wrong.items():
        assert refused(lambda request=request: build(request)).reason_name == "resume_refused", name  # type: ignore[misc]
    other_seed = resumed(progress(0, [1]))
    other_seed.sampling.seed = 8
    assert refused(lambda: build(other_seed)).metadata["param"] == "resume.seed"
    bad_id = refused(lambda: build(resumed(progress(0, [1, 300]))))
    assert bad_id.metadata["param"] == "resume.choices[0].token_ids.ids[1]"
