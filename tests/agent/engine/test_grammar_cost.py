"""Grammars that are hard to follow: they cost their own request and nobody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.v1 import error_pb2
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine import grammar
from dragoman_agent.engine.grammar import (
    COMPILE_SECONDS,
    MAX_OWED_SECONDS,
    SPARE_SECONDS,
    Account,
    Form,
    GrammarCompiler,
    GrammarError,
    GrammarMasks,
)
from dragoman_agent.engine.messages import Cancel, Delta, Failed, GrammarSpec
from dragoman_text import TextTokenizer

TOKENIZER = TextTokenizer.from_files(NullModel().tokenizer)
EASY = GrammarSpec("regex", "[ab]+")


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (GrammarSpec("regex", "(?:(?:(?:a{100}){100}){100})"), "holds up all others"),
        (GrammarSpec("regex", "(a?){2000}a{2000}"), "too hard to follow after 1 tokens"),
    ],
)
def test_what_is_hard_from_the_beginning_is_refused(spec: GrammarSpec, word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        GrammarCompiler(TOKENIZER, 259).submit(spec).result(timeout=60)


def test_what_becomes_hard_later_ends_its_own_request(lab: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a long text that a form prescribes takes time by the length of what is left of it."""
    monkeypatch.setattr(grammar, "SPARE_SECONDS", 0.0005)
    monkeypatch.setattr(grammar, "MAX_OWED_SECONDS", 0.2)
    here = lab()
    late = GrammarSpec("regex", "[a-z]{9}" + "b" * 45_000)
    events = here.run(start("hard", "hello", 500, grammar=late), start("other", "hello", 500))
    (failed,) = [e for e in events if isinstance(e, Failed)]
    assert (failed.request_id, failed.reason) == ("hard", error_pb2.ERROR_REASON_INVALID_REQUEST)
    assert "held up all other requests" in failed.message and failed.param == "sampling.grammar.regex"
    assert 10 <= failed.output_tokens < 500
    assert sum(len(e.token_ids) for e in events if isinstance(e, Delta) and e.request_id == "other") == 500
    here.assert_idle()


class Matcher:
    """What a mask asks of a form's matcher, taking so many seconds of the clock."""

    now = 0.0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def unsafe_compute_mask_ptr(self, _address: int, _num_bytes: int) -> None:
        Matcher.now += self.seconds

    def is_error(self) -> bool:
        return False


def test_only_the_slow_one_is_to_blame_and_single_slow_masks_are_forgiven() -> None:
    masks = GrammarMasks(64, clock=lambda: Matcher.now)
    quick, once, slow = (
        Form(Matcher(seconds), [], Account())  # type: ignore[arg-type]
        for seconds in (SPARE_SECONDS / 2, 0.9 * MAX_OWED_SECONDS, 0.2)
    )
    masks._is_one_slow = True
    for step in range(6):
        assert not slow.failure, step
        masks.fill([quick, once, slow] if step == 0 else [quick, slow])
    assert slow.failure and not quick.failure and not once.failure
    assert masks._is_one_slow
    masks.fill([quick, Form(Matcher(SPARE_SECONDS / 2), [], Account())])  # type: ignore[arg-type]
    assert not masks._is_one_slow, "many quick ones are nobody's fault"
    once.matcher = Matcher(0.0)
    for _ in range(200):
        masks.fill([once])
    once.account.spend(0.9 * MAX_OWED_SECONDS)
    assert not once.failure


def test_choices_of_a_request_hold_up_others_together() -> None:
    masks, account = GrammarMasks(64, clock=lambda: Matcher.now), Account()
    forms = [Form(Matcher(SPARE_SECONDS), [], account) for _ in range(50)]  # type: ignore[arg-type]
    other = Form(Matcher(0.9 * SPARE_SECONDS), [], Account())  # type: ignore[arg-type]
    masks._is_one_slow = True
    for _ in range(5):
        masks.fill([*forms, other])
    assert forms[0].failure and forms[-1].failure and not other.failure


@pytest.fixture
def hold_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compiling a regular expression of h's takes until the test is over; what was compiled, in its order."""
    go_on, begun, compile_now = threading.Event(), [], GrammarCompiler._compile

    def held_up(self: GrammarCompiler, spec: GrammarSpec) -> Any:
        begun.append(spec.text)
        if spec.text.startswith("h"):
            go_on.wait(20)
        return compile_now(self, spec)

    monkeypatch.setattr(GrammarCompiler, "_compile", held_up)
    yield begun
    go_on.set()


def test_hard_grammars_do_not_keep_others_from_being_compiled(lab: Any, start: Any, hold_up: list[str]) -> None:
    here = lab()
    for index in range(4):
        here.core.receive(start(f"hard{index}", "hello", 5, grammar=GrammarSpec("regex", "h" * (index + 1))))
    here.core.receive(start("easy", "hello", 5, grammar=EASY))
    events: list[Any] = []
    deadline = time.monotonic() + 10
    while not any(e.request_id == "easy" and isinstance(e, Delta) for e in events) and time.monotonic() < deadline:
        events += here.turn()
        time.sleep(0.01)
    assert {e.request_id for e in events} == {"easy"}


def test_a_grammar_that_was_not_reached_is_not_to_blame(lab: Any, start: Any, hold_up: list[str]) -> None:
    here = lab()
    for index in range(3):
        here.core.receive(start(f"hard{index}", "hello", 5, grammar=GrammarSpec("regex", "h" * (index + 1))))
    here.core.receive(start("easy", "hello", 5, grammar=EASY))
    here.core.receive(start("gone", "hello", 5, grammar=GrammarSpec("regex", "[cd]+")))
    here.core.receive(Cancel("gone"))
    here.clock.now += COMPILE_SECONDS
    failed = {e.request_id: e for e in here.turn() if isinstance(e, Failed)}
    assert failed["hard0"].reason == error_pb2.ERROR_REASON_INVALID_REQUEST
    assert "over 2 s" in failed["hard0"].message
    assert failed["easy"].reason == error_pb2.ERROR_REASON_QUEUE_FULL
    assert "other requests" in failed["easy"].message
    time.sleep(0.1)
    assert set(hold_up) <= {"h", "hh"}, "what nobody waits for is not compiled"
    here.assert_idle()


def test_a_request_has_one_account_for_all_its_choices(lab: Any, start: Any) -> None:
    here = lab()
    for request_id in ("r", "other"):
        here.core.receive(start(request_id, "hello", 50, grammar=GrammarSpec("regex", "[a-z]{40}"), num_choices=3))
    deadline = time.monotonic() + 10
    while here.core.is_compiling and time.monotonic() < deadline:
        here.turn()
        time.sleep(0.005)
    here.turn()
    accounts = [{s.form.account for s in here.core._live.by_id[name].sequences} for name in ("r", "other")]
    assert [len(found) for found in accounts] == [1, 1] and accounts[0] != accounts[1]
