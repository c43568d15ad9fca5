"""The engine from command to events on the null device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dragoman.v1 import error_pb2
from dragoman_agent.device.base import StepBatch, StepHandle, StepResult
from dragoman_agent.device.null import NullDevice
from dragoman_agent.engine.messages import Cancel, Credit, Delta, Embedded, Failed, Finished, StartEmbed


def test_tokens_come_one_a_step_with_their_text_and_end_at_the_length(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(oracle="alphabet")
    events = engine.run(start("r", "say X", 5))
    answer = answers(events)["r", 0]
    assert (answer.text, answer.finish, answer.token_ids) == ("YZABC", "length", list(b"YZABC"))
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.prompt_tokens, finished.cached_tokens, finished.output_tokens) == (5, 0, 5)
    assert len([s for s in engine.steps if s.events]) == 5
    engine.assert_idle()


def test_stop_string_is_cut_and_what_was_held_back_comes_before_it(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(oracle="alphabet")
    answer = answers(engine.run(start("r", "A", 50, strings=["FGH", "EFX"])))["r", 0]
    assert (answer.text, answer.finish) == ("BCDE", "stop")
    assert answer.last.stop_string == "FGH"
    assert answer.token_ids == list(b"BCDEFGH"), "the tokens of the stop string count, whatever the text shows"
    assert answer.pieces == ["B", "C", "D", "", "", "E", ""], "E and F may begin a stop string, so they wait"
    engine.assert_idle()


def test_stop_string_may_stay(lab: Any, start: Any, answers: Any) -> None:
    answer = answers(lab(oracle="alphabet").run(start("r", "A", 50, strings=["FGH"], include_stop_string=True)))["r", 0]
    assert answer.text == "BCDEFGH"


def test_stop_wins_over_length_and_held_text_comes_out_at_the_length(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(oracle="alphabet")
    events = engine.run(start("stop", "A", 7, strings=["FGH"]), start("length", "A", 6, strings=["FGH"]))
    assert (answers(events)["stop", 0].finish, answers(events)["stop", 0].text) == ("stop", "BCDE")
    assert (answers(events)["length", 0].finish, answers(events)["length", 0].text) == ("length", "BCDEFG")


def test_stop_token_ends_without_its_text(lab: Any, start: Any, answers: Any) -> None:
    events = lab(oracle="alphabet").run(start("r", "A", 50, stop_token_ids=[ord("E")]))
    answer = answers(events)["r", 0]
    assert (answer.text, answer.token_ids, answer.finish) == ("BCD", list(b"BCDE"), "stop")
    assert answer.last.stop_token_id == ord("E")
    assert events[-1].output_tokens == 4


def test_no_stop_before_the_minimum(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(oracle="alphabet")
    ids = [ord("C")]
    events = engine.run(
        start("string", "A", 30, strings=["C"], min_output_tokens=5),
        start("token", "A", 30, stop_token_ids=ids, min_output_tokens=5),
        start("masked", "A", 6, stop_token_ids=ids, masked_until_min=ids, min_output_tokens=5),
    )
    assert answers(events)["string", 0].text == "BCDEFGHIJKLMNOPQRSTUVWXYZAB"
    assert len(answers(events)["token", 0].token_ids) == 28
    assert ord("C") not in answers(events)["masked", 0].token_ids[:5]


def test_eos_of_a_script_ends_the_answer(lab: Any, start: Any, answers: Any, tmp_path: Any) -> None:
    script = tmp_path / "script.json"
    script.write_text('"héllo"')
    engine = lab(oracle=f"script:{script}")
    events = engine.run(start("r", "hi", 50, eos_token_ids=[258]), start("ignore", "hi", 10))
    answer = answers(events)["r", 0]
    assert (answer.text, answer.finish, answer.last.stop_token_id) == ("héllo", "stop", 258)
    assert answer.pieces == ["h", "", "é", "l", "l", "o", ""]
    assert answers(events)["ignore", 0].finish == "length"


def test_choices_share_the_prompt_and_end_as_one_request(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(page_size=64)
    prompt = [i % 200 for i in range(200)]
    events = engine.run(start("r", prompt, 5, num_choices=3, temperature=1.0, seed=11))
    found = answers(events)
    assert len({tuple(found["r", c].token_ids) for c in range(3)}) == 3
    assert isinstance(events[-1], Finished) and events[-1].output_tokens == 15
    computed = sum(step.load.prefill_tokens for step in engine.steps)
    assert computed == 200 + 2 * (200 - 192), "the other choices compute only the last, partial page"
    engine.assert_idle()


def test_logprobs_are_finite_and_the_tokens_own_is_there(lab: Any, start: Any) -> None:
    events = lab().run(start("r", "x", 4, num_logprobs=3), start("own", "x", 4, num_logprobs=0), start("none", "x", 4))
    for event in events:
        if isinstance(event, Delta):
            expected = {"r": 3, "own": 0, "none": None}[event.request_id]
            assert len(event.logprobs) == (0 if expected is None else 1)
            for entry in event.logprobs:
                assert entry.token_id == event.token_ids[0] and np.isfinite(entry.logprob)
                assert len(entry.top) == expected and all(np.isfinite(v) for _, v in entry.top)


def test_embedding_of_a_long_input_does_not_depend_on_chunks_or_cache(lab: Any) -> None:
    prompt = [i % 250 for i in range(300)]
    whole = lab(max_batch_tokens=512).run(StartEmbed("e", prompt))
    engine = lab(max_batch_tokens=100)
    chunked = engine.run(StartEmbed("e", prompt))
    cached = engine.run(StartEmbed("e", prompt))
    assert isinstance(whole[0], Embedded)
    assert whole[0].values == chunked[0].values == cached[0].values
    assert abs(np.square(np.frombuffer(whole[0].values, "<f4")).sum() - 1) < 1e-5
    engine.assert_idle()


def test_a_cached_prompt_computes_its_last_token_again_and_says_what_it_found(
    lab: Any, start: Any, answers: Any
) -> None:
    engine = lab(page_size=64)
    prompt = [i % 199 for i in range(192)]
    first = engine.run(start("a", prompt, 8))
    second = engine.run(start("b", prompt, 8))
    assert answers(first)["a", 0].token_ids == answers(second)["b", 0].token_ids
    assert (first[-1].cached_tokens, second[-1].cached_tokens) == (0, 128)
    salted = engine.run(start("c", prompt, 8, cache_salt="other tenant"))
    assert salted[-1].cached_tokens == 0


def test_stored_units_are_told_by_their_first_eight_bytes(lab: Any, start: Any) -> None:
    from dragoman.prefix_hash import prefix_hashes, root_hash

    engine = lab(page_size=128)
    prompt = [i % 199 for i in range(300)]
    engine.run(start("a", prompt, 4))
    digest = bytes.fromhex(engine.core._live._model_digest.hex())
    expected = [h[:8] for h in prefix_hashes(root_hash(digest), prompt)]
    assert [u for step in engine.steps for u in step.stored_hashes] == expected[:4]


@pytest.mark.parametrize("turns", range(6))
def test_cancel_frees_within_two_steps_wherever_it_hits(lab: Any, start: Any, answers: Any, turns: int) -> None:
    engine = lab(max_batch_tokens=64)
    for i in range(4):
        engine.core.receive(start(f"r{i}", [i] * 100, 1000, num_choices=2))
    events = engine.turn(turns)
    for i in range(4):
        engine.core.receive(Cancel(f"r{i}"))
    events += engine.turn(2)
    assert engine.core.scheduler.pool.num_free == engine.plan.num_blocks - 1
    finished = [e for e in events if isinstance(e, Finished)]
    assert len(finished) == 4 and all(e.cancelled for e in finished)
    assert all(a.finish == "cancelled" for a in answers(events).values())
    engine.core.receive(Cancel("r0"))
    engine.core.receive(Cancel("unknown"))
    assert engine.run() == []
    engine.assert_idle()


def test_deadline_fails_a_request_that_waits_or_runs(lab: Any, start: Any, terminals: Any) -> None:
    engine = lab(max_num_seqs=1)
    engine.core.receive(start("runs", "a", 10_000, deadline_seconds=5.0))
    engine.turn(1)
    engine.core.receive(start("waits", "a", 10, deadline_seconds=3.0))
    engine.turn(3)
    engine.clock.now += 3.5
    events = engine.turn(2)
    engine.clock.now += 2.0
    events += engine.turn(2)
    ends = terminals(events)
    assert [(e.request_id, e.reason) for r in ("waits", "runs") for e in ends[r]] == [
        ("waits", error_pb2.ERROR_REASON_DEADLINE_EXCEEDED),
        ("runs", error_pb2.ERROR_REASON_DEADLINE_EXCEEDED),
    ]
    assert "3.5 s" in ends["waits"][0].message and "while it waited" in ends["waits"][0].message
    engine.assert_idle()


def test_deadlines_of_requests_that_ended_are_forgotten(lab: Any, start: Any) -> None:
    engine = lab()
    for i in range(300):
        engine.run(start(f"r{i}", "a", 1, deadline_seconds=1000.0))
    assert len(engine.core._live._deadlines) < 100


def test_no_token_beyond_the_credit_then_parked_then_failed(lab: Any, start: Any) -> None:
    engine = lab()
    engine.core.receive(start("r", "abc", 100, credit=3, num_choices=2))
    events = engine.turn(20)
    assert max(e.cursor for e in events if isinstance(e, Delta)) == 2
    assert engine.core.scheduler.pool.num_free < engine.plan.num_blocks - 1
    engine.clock.now += 10.1
    engine.turn(2)
    assert engine.core.scheduler.pool.num_free == engine.plan.num_blocks - 1
    engine.core.receive(Credit("r", 5))
    events = engine.turn(10)
    assert sorted({e.cursor for e in events if isinstance(e, Delta)}) == [3, 4]
    engine.clock.now += 59.0
    assert not engine.turn(2)
    engine.clock.now += 2.0
    (failed,) = engine.turn(2)
    assert isinstance(failed, Failed) and failed.reason == error_pb2.ERROR_REASON_CREDIT_TIMEOUT
    assert failed.output_tokens == 10
    engine.assert_idle()


def test_parking_does_not_change_the_tokens(lab: Any, start: Any, answers: Any) -> None:
    engine = lab()
    undisturbed = answers(engine.run(start("r", "abc", 30)))["r", 0].token_ids
    engine.core.receive(start("r", "abc", 30, credit=0))
    events = []
    for until in range(1, 31):
        engine.clock.now += 11.0
        events += engine.turn(3)
        engine.core.receive(Credit("r", until))
    events += engine.run()
    assert answers(events)["r", 0].token_ids == undisturbed


def test_a_stalled_reader_gives_way_when_its_memory_is_needed(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(num_blocks=9, max_num_seqs=2, page_size=64)
    engine.core.receive(start("stalled", [1] * 400, 50, credit=1))
    engine.turn(4)
    engine.core.receive(start("other", [2] * 300, 5))
    events = engine.turn(20)
    assert answers(events)["other", 0].finish == "length"


@pytest.mark.parametrize(
    ("overrides", "reason", "words"),
    [
        ({"prompt": [1] * 2000}, error_pb2.ERROR_REASON_CONTEXT_EXCEEDED, "2000 tokens"),
        ({"prompt": []}, error_pb2.ERROR_REASON_INVALID_REQUEST, "no tokens"),
        ({"max_tokens": 0}, error_pb2.ERROR_REASON_INVALID_REQUEST, "max_output_tokens is 0"),
        ({"num_choices": 0}, error_pb2.ERROR_REASON_INVALID_REQUEST, "num_choices is 0"),
        ({"delivered": [[1], [2]]}, error_pb2.ERROR_REASON_INVALID_REQUEST, "2 choices were delivered"),
        ({"finished_choices": [4]}, error_pb2.ERROR_REASON_INVALID_REQUEST, "choice 4"),
    ],
)
def test_what_can_never_run_is_refused_at_once(lab: Any, start: Any, overrides: Any, reason: int, words: str) -> None:
    engine = lab(max_context_tokens=1000)
    (failed,) = engine.run(start("r", **{"prompt": "a", **overrides}))
    assert isinstance(failed, Failed) and failed.reason == reason and words in failed.message
    engine.assert_idle()


def test_a_second_request_of_the_same_id_is_refused_and_a_full_engine_says_so(lab: Any, start: Any) -> None:
    engine = lab(max_num_seqs=1, max_num_waiting=1)
    for request_id in ("a", "a", "b", "c"):
        engine.core.receive(start(request_id, "x", 50))
    refused = [(e.request_id, e.reason) for e in engine.turn(1) if isinstance(e, Failed)]
    assert refused == [("a", error_pb2.ERROR_REASON_DUPLICATE_REQUEST), ("c", error_pb2.ERROR_REASON_QUEUE_FULL)]


def test_the_context_ends_an_answer_with_length(lab: Any, start: Any, answers: Any) -> None:
    engine = lab(num_blocks=3, page_size=64, max_context_tokens=1000)
    answer = answers(engine.run(start("r", "x" * 100, 500)))["r", 0]
    assert (answer.finish, len(answer.token_ids)) == ("length", 28)
    engine.assert_idle()


class SickDevice(NullDevice):
    """Gives a non-finite logit to the row whose last token is `poison`, from a given cursor on."""

    def __init__(self, poison: int, cursor: int) -> None:
        super().__init__()
        self.poison, self.cursor = poison, cursor

    def submit(self, batch: StepBatch) -> StepHandle:
        result: StepResult = super().submit(batch).result()
        first = batch.token_ids[0]
        for i, seq in enumerate(batch.sample_seqs.tolist()):
            slot = batch.block_tables[seq, 0] * self._plan.page_size
            if self._tokens[slot] == self.poison and batch.sampling.cursors[i] >= self.cursor:
                result.finite[i] = False
        if len(batch.pool_seqs) and first == self.poison:
            result.embeddings[0, 0] = np.nan
        return _Done(result)


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


@pytest.mark.parametrize("cursor", [0, 100])
def test_non_finite_logits_fail_that_request_only_and_leave_no_block_in_the_cache(
    lab: Any, start: Any, answers: Any, terminals: Any, cursor: int
) -> None:
    healthy = lab().run(start("good", [5] * 150, 200))
    engine = lab(device=SickDevice(7, cursor))
    events = engine.run(start("good", [5] * 150, 200), start("bad", [7] * 150, 200))
    (failed,) = terminals(events)["bad"]
    assert failed.reason == error_pb2.ERROR_REASON_NON_FINITE_LOGITS and failed.output_tokens == cursor
    assert answers(events)["good", 0].token_ids == answers(healthy)["good", 0].token_ids
    held = set()
    for step in engine.steps:
        held |= set(step.stored_hashes)
        held -= set(step.removed_hashes)
    pool = engine.core.scheduler.pool
    pages = [pool._page_of[block] for block in pool._block_of.values()]
    assert held == {unit[:8] for page in pages if page is not None for unit in page.units}
    again = engine.run(start("bad2", [7] * 150, 1 if cursor else 5), start("good2", [5] * 150, 5))
    assert {e.request_id: e.cached_tokens for e in again if not isinstance(e, Delta)} == {"bad2": 0, "good2": 128}


def test_a_bad_embedding_fails(lab: Any) -> None:
    (failed,) = lab(device=SickDevice(7, 0)).run(StartEmbed("e", [7] * 70))
    assert isinstance(failed, Failed) and failed.reason == error_pb2.ERROR_REASON_NON_FINITE_LOGITS
    assert "dragoman models verify" in failed.message


def test_load_counts_what_runs_and_waits(lab: Any, start: Any) -> None:
    engine = lab(max_num_seqs=2, max_batch_tokens=64)
    for i in range(5):
        engine.core.receive(start(f"r{i}", [i] * 100, 500))
    engine.turn(2)
    load = engine.steps[-1].load
    assert (load.running, load.waiting, load.total_blocks) == (2, 3, 255)
    assert load.pending_prefill_tokens == 500 - (64 + 64 + 63), "a third step is under way: one decodes"
    assert load.prefill_tokens == 64 and load.step_count == 3
    engine.turn(20)
    load = engine.steps[-1].load
    assert load.pending_prefill_tokens == 300 and load.decode_tokens == 2
    assert load.running_context_tokens > 200


@pytest.mark.parametrize(
    ("received", "waited"),
    [(97.5, 2.5), (None, 0.0), (100.5, 0.0), (10.0, 0.0), (float("nan"), 0.0), (float("-inf"), 0.0)],
)
def test_times_count_from_when_the_agent_got_the_request(
    lab: Any, start: Any, received: float | None, waited: float
) -> None:
    """The engine's clock says 100; what it reads after a long step was received before. A time that cannot be is not taken."""
    finished = lab().run(start("r", "ab", 3, received=received))[-1]
    assert isinstance(finished, Finished)
    assert (finished.queue_seconds, finished.first_token_seconds, finished.total_seconds) == (waited,) * 3


def test_a_deadline_counts_from_when_the_agent_got_the_request(lab: Any, start: Any) -> None:
    engine = lab()
    failed = engine.run(start("late", "ab", 3, received=97.5, deadline_seconds=2.0))[-1]
    assert isinstance(failed, Failed) and failed.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert isinstance(engine.run(start("in time", "ab", 3, received=97.5, deadline_seconds=3.0))[-1], Finished)
    short = engine.run(start("short", "ab", 3, received=99.96, deadline_seconds=0.03))[-1]
    assert isinstance(short, Failed) and "was over 40.0 ms after it came" in short.message
