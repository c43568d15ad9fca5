"""Grammars in the engine: every output has its form, however it was interrupted; bad grammars end their own request only."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.v1 import error_pb2
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine import compiling
from dragoman_agent.engine.grammar import GrammarCompiler, GrammarError, GrammarMasks
from dragoman_agent.engine.messages import Cancel, Delta, Failed, Finished, GrammarSpec, Opened
from dragoman_text import TextTokenizer

TOKENIZER = TextTokenizer.from_files(NullModel().tokenizer)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
PERSON_SPEC = GrammarSpec("json_schema", json.dumps(PERSON))


def text_of(events: list[Any], request_id: str, choice: int = 0) -> tuple[str, str]:
    """Text and finish of a choice."""
    deltas = [e for e in events if isinstance(e, Delta) and (e.request_id, e.choice) == (request_id, choice)]
    return "".join(delta.text for delta in deltas), deltas[-1].finish


SCALARS = st.sampled_from(
    [{"type": "string", "maxLength": 6}, {"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"enum": ["a", 2]}]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, inner),
        st.builds(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields),
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b c", 'd"']), inner, max_size=3),
        ),
        st.builds(lambda first, second: {"anyOf": [first, second]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_output_parses(lab: Any, start: Any, schema: dict[str, Any], seed: int) -> None:
    spec = GrammarSpec("json_schema", json.dumps(schema))
    events = lab().run(start("r", "hello", 600, grammar=spec, temperature=1.0, seed=seed, eos_token_ids=[258]))
    text, finish = text_of(events, "r")
    assert finish == "stop"
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec("regex", "[a-c]{3}x?"), "[a-c]{3}x?"),
        (GrammarSpec("choices", choices=["red", "a.b\\n\n", "réd"]), "red|a\\.b\\\\n\n|réd"),
        (GrammarSpec("lark", 'start: "a" start | "b"'), "a*b"),
        (GrammarSpec("regex", ""), ""),
    ],
)
def test_other_kinds(lab: Any, start: Any, spec: GrammarSpec, pattern: str) -> None:
    for seed in range(4):
        events = lab().run(start("r", "hello", 60, grammar=spec, temperature=1.0, seed=seed))
        text, finish = text_of(events, "r")
        assert finish == "stop" and re.fullmatch(pattern, text)


def test_choices_follow_the_grammar_each_for_itself(lab: Any, start: Any) -> None:
    here = lab()
    events = here.run(start("r", "hello", 300, grammar=PERSON_SPEC, num_choices=4, temperature=1.0, seed=2))
    texts = [text_of(events, "r", choice)[0] for choice in range(4)]
    assert len(set(texts)) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert isinstance(events[0], Opened) and isinstance(events[-1], Finished)
    here.assert_idle()


def test_a_preempted_output_has_its_form(lab: Any, start: Any) -> None:
    """Too few blocks for all: some are computed again in the middle of their form."""
    alone = lab().run(start("r0", "x" * 70, 200, grammar=PERSON_SPEC, temperature=1.0, seed=0))
    here = lab(num_blocks=9, page_size=16, max_num_seqs=8)
    commands = [start(f"r{i}", "x" * 70, 60, grammar=PERSON_SPEC, temperature=1.0, seed=i) for i in range(4)]
    events = here.run(*commands)
    assert here.core.scheduler.num_preemptions > 0
    assert text_of(alone, "r0")[0].startswith(text_of(events, "r0")[0])
    for i in range(4):
        text, finish = text_of(events, f"r{i}")
        if finish == "stop":
            jsonschema.validate(json.loads(text), PERSON)
    here.assert_idle()


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_resumed_output_goes_on_where_it_was(lab: Any, start: Any, answers: Any, cut: int) -> None:
    command = start("r", "hello", 300, grammar=PERSON_SPEC, temperature=1.0, seed=4)
    whole = answers(e for e in lab().run(command) if not isinstance(e, Opened))["r", 0]
    resumed = start("r", "hello", 300, grammar=PERSON_SPEC, temperature=1.0, seed=4, delivered=[whole.token_ids[:cut]])
    rest = answers(e for e in lab().run(resumed) if not isinstance(e, Opened))["r", 0]
    assert rest.token_ids == whole.token_ids[cut:]
    assert rest.finish == "stop"


def test_a_resume_that_does_not_fit_is_refused(lab: Any, start: Any) -> None:
    events = lab().run(start("r", "hello", 300, grammar=PERSON_SPEC, delivered=[[ord("x")]]))
    assert [type(e) for e in events] == [Failed]
    assert (events[0].reason, events[0].param) == (error_pb2.ERROR_REASON_RESUME_REFUSED, "resume.choices")


def test_stop_strings_and_least_tokens(lab: Any, start: Any) -> None:
    stopped = lab().run(start("r", "hello", 300, grammar=GrammarSpec("regex", "[a-z]{200}"), strings=["a", "e"]))
    text, finish = text_of(stopped, "r")
    assert finish == "stop" and 0 < len(text) < 200 and "a" not in text
    # A form that is complete ends before the least number of tokens; one that may go on does.
    short = lab().run(start("r", "hello", 9, grammar=GrammarSpec("regex", "ab"), min_output_tokens=5))
    assert text_of(short, "r") == ("ab", "stop")
    long = lab().run(
        start("r", "hello", 30, grammar=GrammarSpec("regex", "[ab]+"), min_output_tokens=20, masked_until_min=[258],
              eos_token_ids=[258])
    )  # fmt: skip
    assert len(text_of(long, "r")[0]) >= 20


def test_the_end_comes_only_where_the_form_may_end(lab: Any, start: Any) -> None:
    bias = {258: 100.0}
    ended = lab().run(start("r", "hello", 30, grammar=GrammarSpec("regex", "[a-z]{3,9}"), logit_bias=bias,
                            eos_token_ids=[258]))  # fmt: skip
    assert len(text_of(ended, "r")[0]) == 3
    on = lab().run(start("r", "hello", 30, grammar=GrammarSpec("regex", "[a-z]{3,9}"), logit_bias=bias,
                         eos_token_ids=[]))  # fmt: skip
    assert text_of(on, "r")[1] == "stop" and len(text_of(on, "r")[0]) == 9


def test_completing_the_form_wins_over_the_length(lab: Any, start: Any) -> None:
    assert text_of(lab().run(start("r", "x", 3, grammar=GrammarSpec("regex", "abc"))), "r") == ("abc", "stop")
    assert text_of(lab().run(start("r", "x", 2, grammar=GrammarSpec("regex", "abc"))), "r") == ("ab", "length")


BAD = [
    ({"not": {}}, "not"),
    ({"$ref": "http://127.0.0.1:1/a"}, "127.0.0.1"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ({"$ref": "#"}, "contradict"),
]


@pytest.mark.parametrize(("schema", "word"), BAD)
def test_a_bad_grammar_ends_its_own_request(lab: Any, start: Any, schema: dict[str, Any], word: str) -> None:
    here = lab()
    events = here.run(
        start("good", "hello", 20), start("bad", "hello", 20, grammar=GrammarSpec("json_schema", json.dumps(schema)))
    )
    bad = [e for e in events if e.request_id == "bad"]
    assert [type(e) for e in bad] == [Failed]
    assert (bad[0].reason, bad[0].param) == (error_pb2.ERROR_REASON_INVALID_REQUEST, "sampling.grammar.json_schema")
    assert word in bad[0].message and len(bad[0].message) <= 350
    assert len(text_of(events, "good")[0]) == 20
    here.assert_idle()


def test_others_stream_while_a_grammar_compiles(lab: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile that never ends: tokens of others come meanwhile, and after 2 s its own request is refused."""
    slow = GrammarCompiler._compile

    def compile_slowly(self: GrammarCompiler, spec: GrammarSpec) -> Any:
        time.sleep(0.5)
        return slow(self, spec)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)
    here = lab()
    for command in (start("slow", "hello", 5, grammar=GrammarSpec("regex", "a+")), start("other", "hello", 50)):
        here.core.receive(command)
    assert here.core.tick().load.waiting == 2
    events = here.turn(20)
    assert {e.request_id for e in events} == {"other"} and len(events) > 15
    here.clock.now += compiling.COMPILE_SECONDS
    failed = [e for e in here.turn(2) if isinstance(e, Failed)]
    assert failed[0].request_id == "slow" and "over 2 s" in failed[0].message


def test_a_request_cancelled_while_it_compiles_is_over(lab: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, spec: time.sleep(0.2))
    here = lab()
    here.core.receive(start("r", "hello", 5, grammar=GrammarSpec("regex", "a+")))
    here.core.receive(Cancel("r"))
    events = here.turn(2)
    assert isinstance(events[-1], Finished) and events[-1].cancelled
    here.turn()
    assert not here.core.is_compiling
    here.assert_idle()


def test_parts_that_leave_no_token_say_so(lab: Any, start: Any) -> None:
    here = lab()
    events = here.run(start("r", "hello", 5, grammar=GrammarSpec("regex", "a+"), allowed_token_ids=[98]))
    assert isinstance(events[-1], Failed) and events[-1].reason == error_pb2.ERROR_REASON_INVALID_REQUEST
    assert "leave no token" in events[-1].message
    here.assert_idle()


def wait(compiler: GrammarCompiler, spec: GrammarSpec) -> Any:
    return compiler.submit(spec).result(timeout=10)


def test_white_space_and_control_tokens_are_bounded() -> None:
    form = wait(GrammarCompiler(TOKENIZER, 300), GrammarSpec("json_schema", json.dumps(PERSON))).start()
    form.take(list(b"{" + b" " * 16))
    assert form.allowed_ids() == {ord('"')}
    form.take(list(b'"name":"'))
    assert not form.failure and not form.allowed_ids() & set(range(256, 300)), "control tokens are no text"
    form.take(list(b'x","tags":[1]}'))
    assert form.is_complete and form.allowed_ids() <= TOKENIZER.eos_ids | {258}


def test_masks_of_many_are_those_of_each() -> None:
    compiler, masks = GrammarCompiler(TOKENIZER, 300), GrammarMasks(300)
    forms = [wait(compiler, GrammarSpec("regex", f"[{c}-{c}x]+")).start() for c in "abcde"]
    together = masks.fill(forms)
    assert together.shape == (5, 10)
    for form, row in zip(forms, together, strict=True):
        assert (masks.fill([form])[0] == row).all()


def test_a_grammar_of_late_is_ready_at_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, 259)
    first = wait(compiler, PERSON_SPEC)
    again = compiler.submit(PERSON_SPEC)
    assert again.done() and again.result() is first
    one, other = first.start(), first.start()
    one.take(list(b"{"))
    assert other.allowed_ids() == {ord("{")}, "forms of one grammar are independent"


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (GrammarSpec("json_schema", "["), "not JSON"), (GrammarSpec("json_schema", "[]"), "must be a JSON object"),
        (GrammarSpec("json_schema", "false"), "allows nothing"), (GrammarSpec("regex", "("), "unclosed"),
        (GrammarSpec("lark", "root ::= ("), "`::=` is none: .*Expected"), (GrammarSpec("lark", "start: ("), "Expected"),
        (GrammarSpec("yaml", "x"), "not known"),
        (GrammarSpec("json_schema", '{"a":' * 3000 + "1" + "}" * 3000), "deep"),
        (GrammarSpec("regex", "(" + "x" * 5000), "unclosed"),
    ],
)  # fmt: skip
def test_reasons_are_short(spec: GrammarSpec, word: str) -> None:
    with pytest.raises(GrammarError, match=word) as caught:
        wait(GrammarCompiler(TOKENIZER, 259), spec)
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_true_allows_any_json() -> None:
    form = wait(GrammarCompiler(TOKENIZER, 259), GrammarSpec("json_schema", "true")).start()
    form.take(list(b"[1]"))
    assert not form.failure
