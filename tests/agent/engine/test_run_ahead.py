"""Steps under way behind the one that is waited for: when they are launched, and that nobody can tell from the answers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman_agent.device.base import LateStep, SamplingBatch, StepBatch, StepHandle, StepResult
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import run_all
from dragoman_agent.engine.messages import Cancel, Delta, GrammarSpec, Opened
from dragoman_text import TextTokenizer


class Recorder(NullDevice):
    """Notes in which order steps are handed over and waited for."""

    def __init__(self, oracle: str = "hash") -> None:
        super().__init__(oracle)
        self.log: list[tuple[str, int]] = []

    def submit(self, batch: StepBatch) -> StepHandle:
        self.log.append(("submit", batch.step))
        return Waited(super().submit(batch), batch.step, self.log)


class Waited:
    """A handle that notes when its result is asked for."""

    def __init__(self, handle: StepHandle, step: int, log: list[tuple[str, int]]) -> None:
        self._handle, self._step, self._log = handle, step, log

    def supply(self, sampling: SamplingBatch) -> None:
        self._log.append(("supply", self._step))
        assert isinstance(self._handle, LateStep)
        self._handle.supply(sampling)

    def result(self) -> StepResult:
        self._log.append(("result", self._step))
        return self._handle.result()


KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.1},
    {"grammar": GrammarSpec("regex", "[a-z]{3,20}"), "eos_token_ids": [258]},
    {"bad_word_ids": [[101], [97, 98]]},
    {"masked_until_min": [97, 101], "min_output_tokens": 5},
]


def lead(device: Recorder) -> list[int]:
    """Steps handed over beyond each one that was waited for, while there was more to do."""
    seen, found = 0, []
    for what, step in device.log:
        if what == "submit":
            seen = step
        elif what == "result":
            found.append(seen - step)
    return found


def test_the_next_step_is_handed_over_before_the_last_is_waited_for(lab: Any, start: Any) -> None:
    device = Recorder()
    lab(device=device).run(*[start(f"r{i}", [i] * 30, 20) for i in range(4)])
    assert lead(device)[:-1] == [1] * (len(lead(device)) - 1) and lead(device)[-1] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"bad_word_ids": [[5, 6]]},
        {"grammar": GrammarSpec("regex", "[a-z]{1,12}")},
        {"masked_until_min": [258], "min_output_tokens": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_that_draws_by_its_text_is_run_ahead_of_and_supplied_late(
    lab: Any, start: Any, fields: dict[str, Any]
) -> None:
    """The model runs ahead; how the tokens are drawn follows once those of the step before are known."""
    device = Recorder("alphabet")
    lab(device=device).run(start("r", "abc", 8, **fields))
    assert lead(device)[:-1] == [1] * (len(lead(device)) - 1)
    results = [step for what, step in device.log if what == "result"]
    assert [step for what, step in device.log if what == "supply"] == results[1:]
    for before, after in itertools.pairwise(device.log):
        assert after[0] != "supply" or before == ("result", after[1] - 1)


def test_a_device_that_cannot_sample_late_is_waited_for(lab: Any, start: Any) -> None:
    device = Recorder("alphabet")
    device.samples_late = False
    lab(device=device).run(start("r", "abc", 8, repetition_penalty=1.2))
    assert set(lead(device)) == {0} and len(device.log) > 8


def test_a_prompt_whose_logprobs_are_asked_for_is_not_run_ahead_of(lab: Any, start: Any) -> None:
    device = Recorder("alphabet")
    lab(device=device).run(start("r", "abc", 8, num_prompt_logprobs=0))
    assert set(lead(device)) == {0} and len(device.log) > 8


def test_a_length_costs_no_step_and_a_stop_costs_one(lab: Any, start: Any, answers: Any) -> None:
    by_length = Recorder("alphabet")
    lab(device=by_length).run(start("r", "A", 6))
    assert sum(what == "submit" for what, _ in by_length.log) == 6
    by_stop = Recorder("alphabet")
    events = lab(device=by_stop).run(start("r", "A", 50, stop_token_ids=[ord("G")]))
    assert answers(events)["r", 0].token_ids == list(b"BCDEFG")
    assert sum(what == "submit" for what, _ in by_stop.log) == 7


def test_cancelled_with_two_steps_under_way_leaves_nothing(lab: Any, start: Any) -> None:
    engine = lab()
    engine.core.receive(start("gone", [1] * 40, 50))
    engine.core.receive(start("stays", [2] * 40, 6))
    engine.turn(3)
    engine.core.receive(Cancel("gone"))
    events = engine.run()
    assert [e for e in events if isinstance(e, Delta) and e.request_id == "gone" and e.token_ids] == []
    engine.assert_idle()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 30), st.integers(0, 2), st.sampled_from(KINDS)),
        min_size=1,
        max_size=9,
    ),
    num_blocks=st.integers(10, 24),
    max_batch_tokens=st.integers(20, 64),
)
def test_answers_are_the_same_as_when_each_step_is_waited_for(
    lab: Any,
    start: Any,
    answers: Any,
    requests: list[tuple[int, int, int, dict[str, Any]]],
    num_blocks: int,
    max_batch_tokens: int,
) -> None:
    """Preemption, chunks, stops, grammars and all that hangs on the text included: a pool this small preempts."""
    commands = [
        start(
            f"r{i}", [(i + j) % 250 for j in range(num_prompt)], max_tokens, priority=priority,
            temperature=0.9, seed=i, stop_token_ids=[i * 7 % 250], **kind,
        )
        for i, (num_prompt, max_tokens, priority, kind) in enumerate(requests)
    ]  # fmt: skip
    ahead = lab(page_size=16, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=4)
    found = answers(e for e in ahead.run(*commands) if not isinstance(e, Opened))
    ahead.assert_idle()
    model, device = NullModel(), NullDevice()
    device.load(model, ahead.plan, lambda progress: None)
    tokenizer = TextTokenizer.from_files(model.tokenizer)
    waiting = EngineCore(device, tokenizer, bytes.fromhex(model.digest), ahead.plan, run_ahead=False)
    expected = answers(e for e in run_all(waiting, commands) if not isinstance(e, Opened))
    assert {key: a.token_ids for key, a in found.items()} == {key: a.token_ids for key, a in expected.items()}


def test_a_new_prompt_is_with_the_device_before_its_pages_are_hashed(lab: Any, start: Any) -> None:
    """All but the first, which nothing is cached for; the device works while the others get their names."""
    here = lab(max_batch_tokens=256)
    hashed: list[int] = []
    submit = here.device.submit

    def noting(batch: Any) -> Any:
        hashed.append(len(sequence.hasher.pages))
        return submit(batch)

    here.device.submit = noting
    here.core.receive(start("r", [7 + i % 90 for i in range(600)], 4))
    (sequence,) = here.core.requests["r"].sequences
    here.core.launch()
    page_size = here.plan.page_size
    assert hashed == [1, 256 // page_size], "two steps are under way, one behind the other"
    assert len(sequence.hasher.pages) == 512 // page_size
