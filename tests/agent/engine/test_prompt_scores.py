"""Scores of prompts in the engine: complete, in any chunking, cache or not, preempted or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dragoman_agent.engine.frames import decode, encode
from dragoman_agent.engine.messages import Finished, Opened
from dragoman_agent.engine.prompt_scores import PromptScores, score_rows

PROMPT = "the quick brown fox jumps over the lazy dog " * 6


def opened(events: list[Any], request_id: str = "r") -> tuple[np.ndarray, np.ndarray]:
    """Logprobs and ids of the alternatives."""
    found = [event for event in events if isinstance(event, Opened) and event.request_id == request_id]
    assert len(found) == 1
    values = np.frombuffer(found[0].logprobs, "<f4")
    return values, np.frombuffer(found[0].top_ids, "<i4").reshape(len(values), found[0].num_top)


def test_every_token_but_the_first_is_scored_before_the_first_delta(lab: Any, start: Any) -> None:
    here = lab()
    events = here.run(start("r", PROMPT, 3, num_prompt_logprobs=2))
    assert isinstance(events[0], Opened)
    values, ids = opened(events)
    assert len(values) == len(PROMPT) - 1 and (values <= 0).all() and np.isfinite(values).all()
    assert ids[:, 0].tolist() == list(PROMPT.encode()[1:]), "the null device ranks the given token first"
    here.assert_idle()


@pytest.mark.parametrize("budget", [7, 64, 100])
def test_chunks_do_not_matter(lab: Any, start: Any, budget: int) -> None:
    whole, _ = opened(lab().run(start("r", PROMPT, 1, num_prompt_logprobs=0)))
    parts, _ = opened(lab(max_batch_tokens=budget).run(start("r", PROMPT, 1, num_prompt_logprobs=0)))
    assert (whole == parts).all()


def test_a_cached_prompt_is_computed_again(lab: Any, start: Any) -> None:
    here = lab()
    first, _ = opened(here.run(start("r", PROMPT, 1, num_prompt_logprobs=0)))
    events = here.run(start("r", PROMPT, 1, num_prompt_logprobs=0))
    assert (opened(events)[0] == first).all()
    assert isinstance(events[-1], Finished) and events[-1].cached_tokens == 0
    plain = here.run(start("plain", PROMPT, 1))
    assert isinstance(plain[-1], Finished) and plain[-1].cached_tokens > 0


def test_b04_a_position_is_what_a_run_to_it_reports(lab: Any, start: Any) -> None:
    values, _ = opened(lab().run(start("r", PROMPT, 1, num_prompt_logprobs=0)))
    for end in (1, 40, 64, 200):
        events = lab().run(start("r", PROMPT[:end], 1, num_logprobs=0))
        assert events[0].logprobs[0].logprob == pytest.approx(float(values[end - 1]))


def test_scores_survive_preemption(lab: Any, start: Any) -> None:
    alone, _ = opened(lab(page_size=16).run(start("scored", PROMPT, 20, num_prompt_logprobs=1)), "scored")
    here = lab(page_size=16, num_blocks=30, max_batch_tokens=40, max_num_seqs=8)
    events = here.run(
        *(start(f"r{i}", "x" * 40 + str(i), 60) for i in range(5)),
        start("scored", PROMPT, 20, num_prompt_logprobs=1),
    )
    assert here.core.scheduler.num_preemptions > 0
    assert (opened(events, "scored")[0] == alone).all()
    here.assert_idle()


def test_choices_share_one_scored_prompt(lab: Any, start: Any, answers: Any) -> None:
    events = lab().run(start("r", PROMPT, 4, num_prompt_logprobs=0, num_choices=3, temperature=1.0, seed=1))
    assert len(opened(events)[0]) == len(PROMPT) - 1
    found = answers(event for event in events if not isinstance(event, Opened))
    assert [len(found["r", choice].token_ids) for choice in range(3)] == [4, 4, 4]


def test_a_prompt_of_one_token_has_no_scores(lab: Any, start: Any) -> None:
    events = lab().run(start("r", "a", 2, num_prompt_logprobs=1))
    assert isinstance(events[0], Opened) and events[0].logprobs == b""


def test_rows_and_positions() -> None:
    scores = PromptScores(num_prompt=10, num_top=0)
    assert scores.due(0, 4) == range(4)
    assert scores.due(6, 4) == range(6, 9), "the last position predicts the first output token"
    scores.num_done = 5
    assert scores.due(3, 4) == range(5, 7)
    assert score_rows(100, 3, range(5, 7)).tolist() == [102, 103]


def test_the_message_survives_its_frame() -> None:
    message = Opened("r", b"\x00\x00\x80?", 1, b"\x01\x00\x00\x00", b"\x00\x00\x80?")
    assert decode(encode(message)[4:]) == message
