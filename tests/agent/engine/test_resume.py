"""A stream that was cut goes on with the same tokens and text, wherever it was cut."""

from __future__ import annotations

from typing import Any

import pytest

from dragoman_agent.engine.messages import Failed, Finished, GrammarSpec, Opened

PROMPT = [i % 250 for i in range(70)]


def without_opened(events: list[Any]) -> list[Any]:
    """All but the word that a request with a grammar was taken."""
    return [event for event in events if not isinstance(event, Opened)]


@pytest.mark.parametrize(
    "overrides",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1234567890123},
        {"temperature": 1.0, "seed": 7, "strings": ["e ", "aa", "ths", "o"]},
        {"temperature": 1.0, "seed": 8, "min_output_tokens": 6, "strings": ["a", "e", "t"]},
        {"temperature": 0.0, "num_logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"temperature": 0.9, "seed": 3, "top_p": 0.8, "top_k": 40, "repetition_penalty": 1.3, "strings": ["th", "a"]},
        {"temperature": 1.0, "seed": 4, "logit_bias": {101: 8.0, 32: 6.0}, "bad_word_ids": [[101, 32], [120]]},
        {
            "temperature": 1.0,
            "seed": 5,
            "grammar": GrammarSpec("regex", "[a-f]{3}(-[0-9]{2})+ ok"),
            "eos_token_ids": [258],
        },
    ],
)
def test_cut_after_every_token(lab: Any, start: Any, answers: Any, overrides: Any) -> None:
    whole_events = without_opened(lab().run(start("r", PROMPT, 24, **overrides)))
    whole = answers(whole_events)["r", 0]
    for cut in range(len(whole.token_ids)):
        engine = lab(page_size=64 if cut % 2 else 16)
        events = without_opened(engine.run(start("r", PROMPT, 24, delivered=[whole.token_ids[:cut]], **overrides)))
        rest = answers(events)["r", 0]
        assert rest.token_ids == whole.token_ids[cut:]
        assert rest.pieces == whole.pieces[cut:], "text goes on where it was, held-back text included"
        assert (rest.finish, rest.last.stop_string) == (whole.finish, whole.last.stop_string)
        assert events[0].cursor == cut
        assert events[-1].output_tokens == whole_events[-1].output_tokens
        engine.assert_idle()


def test_several_choices_each_from_where_it_was(lab: Any, start: Any, answers: Any) -> None:
    request = {"num_choices": 3, "temperature": 1.0, "seed": 5, "strings": ["ee", "an"]}
    whole_events = lab().run(start("r", PROMPT, 30, **request))
    whole = {c: answers(whole_events)["r", c] for c in range(3)}
    for cuts in [(0, 5, 11), (29, 0, 3), (10, 10, 10), (1, 28, 0)]:
        counts = [min(cut, len(whole[c].token_ids)) for c, cut in enumerate(cuts)]
        over = [c for c in range(3) if counts[c] == len(whole[c].token_ids)]
        engine = lab()
        delivered = [whole[c].token_ids[: counts[c]] for c in range(3)]
        events = engine.run(start("r", PROMPT, 30, delivered=delivered, finished_choices=over, **request))
        found = answers(events)
        for c in range(3):
            if c not in over:
                assert found["r", c].pieces == whole[c].pieces[counts[c] :]
                assert found["r", c].token_ids == whole[c].token_ids[counts[c] :]
        assert isinstance(events[-1], Finished) and events[-1].output_tokens == whole_events[-1].output_tokens
        engine.assert_idle()


def test_a_choice_ahead_of_its_credit_does_not_hold_up_the_others(lab: Any, start: Any, answers: Any) -> None:
    whole = answers(lab().run(start("r", PROMPT, 40, num_choices=2, temperature=1.0)))
    engine = lab()
    delivered = [whole["r", 0].token_ids[:30], []]
    engine.core.receive(start("r", PROMPT, 40, num_choices=2, temperature=1.0, delivered=delivered, credit=20))
    found = answers(engine.turn(30))
    assert found["r", 1].token_ids == whole["r", 1].token_ids[:20]
    assert ("r", 0) not in found


def test_when_all_had_ended_only_the_end_is_told(lab: Any, start: Any) -> None:
    engine = lab()
    delivered = [[65, 66], [67]]
    (finished,) = engine.run(start("r", PROMPT, 9, num_choices=2, delivered=delivered, finished_choices=[0, 1]))
    assert isinstance(finished, Finished) and finished.output_tokens == 3
    engine.assert_idle()


def test_delivered_tokens_that_already_ended_the_choice_end_it_at_once(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(oracle="alphabet")
    events = engine.run(
        start("length", "A", 3, delivered=[list(b"BCD")]),
        start("stop", "A", 30, delivered=[list(b"BCD")], strings=["D"]),
    )
    found = answers(events)
    assert (found["length", 0].finish, found["length", 0].last.cursor) == ("length", 3)
    assert (found["stop", 0].finish, found["stop", 0].last.stop_string) == ("stop", "D")
    assert not any(isinstance(e, Failed) for e in events)
    engine.assert_idle()
