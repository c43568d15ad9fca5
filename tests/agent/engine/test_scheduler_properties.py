"""What holds for the scheduler whatever comes: budget, blocks, rows, progress, no starvation, deadlines, fair shares of tenants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from dragoman.v1 import error_pb2
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.block_account import account
from dragoman_agent.engine.messages import Failed, Finished, Sampling, Start, StartEmbed, Stop
from dragoman_agent.engine.queue import MIN_CHARGE_TOKENS, QUANTUM_TOKENS
from dragoman_agent.engine.request import AGING_SECONDS, Request, Sequence, Status, new_request
from dragoman_agent.engine.scheduler import Scheduler
from dragoman_agent.engine.step_plan import StepPlan

STEP_SECONDS = 0.05


@dataclass
class Play:
    """A scheduler and a device that computes what it is given; each step takes 50 ms."""

    scheduler: Scheduler
    now: float = 0.0
    live: list[Request] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)  # when
    served: Counter[str] = field(default_factory=Counter)  # prompt tokens computed and tokens written, by tenant

    def add(self, name: str, prompt: int, output: int, *, embed: bool = False, **fields: Any) -> Request:
        ids = [sum(name.encode()) % 251] * prompt
        message: Start | StartEmbed = (
            StartEmbed(name, ids, **fields)
            if embed
            else Start(name, ids, Sampling(), Stop(max_output_tokens=output), credit=1 << 30, **fields)
        )
        root = name.encode().ljust(32)  # nothing is shared by chance
        request = new_request(message, self.now, root, self.scheduler.page_size, self.scheduler.capacity_tokens)
        self.scheduler.add(request, self.now)
        self.live.append(request)
        return request

    def step(self) -> StepPlan:
        """Decide, compute, end what is done."""
        scheduler = self.scheduler
        plan = scheduler.schedule(self.now)
        check_step(scheduler, plan)
        complete = [s for s, count in plan.prefills if count == s.num_uncomputed]
        sampled = plan.decodes + [s for s in complete if not s.request.is_embedding]
        scheduler.launched(plan, sampled, scheduler.num_steps + 1)
        for sequence, count in plan.prefills:
            self.served[sequence.request.tenant] += count
        for sequence in sampled:
            self.served[sequence.request.tenant] += 1
            sequence.token_ids.append(1)
            sequence.future_step = 0
        for sequence in plan.decodes + complete:
            scheduler.publish(sequence, sequence.num_computed)
            scheduler.unblock(sequence.request, self.now)
            self._end_if_done(sequence)
        self.now += STEP_SECONDS
        check_blocks(scheduler)
        return plan

    def _end_if_done(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.is_embedding or len(sequence.token_ids) >= sequence.max_num_tokens:
            self.scheduler.leave([sequence], Status.FINISHED)
            if all(s.status is Status.FINISHED for s in request.sequences):
                self.live.remove(request)
                self.ended[request.request_id] = self.now


def check_step(scheduler: Scheduler, plan: StepPlan) -> None:
    """What a step may hold."""
    sequences = plan.sequences
    most = scheduler.max_step_tokens if plan.decodes else scheduler.plan.max_batch_tokens
    assert plan.num_tokens <= min(most, scheduler.memory_limit.max_step_tokens)
    assert len(set(map(id, sequences))) == len(sequences)
    assert all(s.status is Status.RUNNING for s in sequences)
    assert all(s.num_uncomputed == 1 and not s.request.is_embedding for s in plan.decodes)
    for sequence, count in plan.prefills:
        assert 1 <= count <= sequence.num_uncomputed
    for sequence in sequences:
        count = {id(s): n for s, n in plan.prefills}.get(id(sequence), 1)
        assert len(sequence.block_table) * scheduler.page_size >= sequence.num_computed + count
    if not sequences:
        assert not scheduler.running, "what runs must go on"


def check_blocks(scheduler: Scheduler) -> None:
    """No block is lost, none that is still written has two owners, and rows are one each."""
    assert account(scheduler).num_lost == 0
    written: Counter[int] = Counter()
    for sequence in scheduler.running:
        assert 0 not in sequence.block_table
        assert len(set(sequence.block_table)) == len(sequence.block_table)
        written.update(sequence.block_table[sequence.num_computed // scheduler.page_size :])
    assert all(count == 1 for count in written.values())
    rows = [s.row for s in scheduler.running]
    assert len(set(rows)) == len(rows) <= scheduler.plan.max_num_seqs and -1 not in rows


def make(**plan: Any) -> Play:
    defaults = {"num_blocks": 40, "page_size": 16, "max_num_seqs": 4, "max_batch_tokens": 48}
    return Play(Scheduler(default_null_plan(NullModel(), **{**defaults, **plan})))


def requests(max_prompt: int, max_output: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "prompt": st.integers(1, max_prompt),
            "output": st.integers(1, max_output),
            "priority": st.integers(0, 2),
            "tenant": st.sampled_from("abc"),
            "num_choices": st.integers(1, 3),
            "embed": st.booleans(),
            "wait": st.integers(0, 3),  # steps before it comes
        }
    )


@settings(max_examples=80)
@given(
    wanted=st.lists(requests(150, 40), min_size=1, max_size=14),
    num_blocks=st.integers(14, 40),
    max_batch_tokens=st.sampled_from([5, 16, 48, 200]),
    company_tokens=st.sampled_from([0, 5, 12]),
    max_num_seqs=st.integers(1, 6),
)
def test_every_step_is_sound_and_every_request_ends(
    wanted: list[dict[str, Any]], num_blocks: int, max_batch_tokens: int, company_tokens: int, max_num_seqs: int
) -> None:
    play = make(
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        company_tokens=company_tokens,
        max_num_seqs=max_num_seqs,
    )
    work = 0
    for index, fields in enumerate(wanted):
        for _ in range(fields.pop("wait")):
            play.step()
        if fields["embed"]:
            fields.pop("num_choices")
        work += (fields["prompt"] + fields["output"]) * fields.get("num_choices", 1)
        play.add(f"r{index}", **fields)
    # A preempted sequence is computed anew, but the oldest never: each of them ends after at most all work done again.
    for _ in range(len(wanted) * work + 50):
        if not play.live:
            break
        play.step()
    assert not play.live
    assert len(play.ended) == len(wanted)
    assert play.scheduler.pool.num_free == num_blocks - 1
    assert not play.scheduler.running and not play.scheduler.waiting and not play.scheduler.blocked
    assert play.scheduler.pending_prefill_tokens == 0


@settings(max_examples=25)
@given(
    prompt=st.integers(1, 300),
    output=st.integers(1, 60),
    priority=st.integers(0, 2),
    flood_prompt=st.integers(1, 300),
    flood_output=st.integers(1, 40),
    tenants=st.sampled_from([("a", "a"), ("a", "b")]),
)
def test_nobody_starves_though_higher_classes_keep_coming(
    prompt: int, output: int, priority: int, flood_prompt: int, flood_output: int, tenants: tuple[str, str]
) -> None:
    """The bound: two agings, then a round of the other tenant, then its own work at the rate that is left to it."""
    play = make(num_blocks=60)
    for index in range(8):
        play.add(f"early {index}", flood_prompt, flood_output, priority=0, tenant=tenants[0])
    old = play.add("old", prompt, output, priority=priority, tenant=tenants[1])
    per_request = -(-flood_prompt // 40) + flood_output  # steps; four of them run beside each other
    num_ahead = 8 + QUANTUM_TOKENS // MIN_CHARGE_TOKENS + 4
    own = -(-prompt // 40) + output
    bound = play.now + 2 * AGING_SECONDS + STEP_SECONDS * (num_ahead * per_request + own + 20)
    note(f"bound {bound:.1f} s")
    number = 0
    while old.request_id not in play.ended:
        number += 1
        if len(play.scheduler.waiting) < 12:
            play.add(f"flood {number}", flood_prompt, flood_output, priority=0, tenant=tenants[0])
        play.step()
        assert play.now <= bound, f"not even begun: {old.sequences[0].status.name}"


@settings(max_examples=20)
@given(
    sizes=st.lists(st.tuples(st.integers(MIN_CHARGE_TOKENS, 200), st.integers(1, 40)), min_size=2, max_size=3),
    num_steps=st.integers(60, 120),
)
@example(sizes=[(159, 10), (64, 14), (64, 3)], num_steps=111)
def test_equal_tenants_get_equal_shares(sizes: list[tuple[int, int]], num_steps: int) -> None:
    """Tokens of prompts and outputs, each tenant always with work to do: within one quantum, a request, one chunk, and
    what those who run may still write, which is charged when they end."""
    play = make(num_blocks=400, max_num_seqs=8, max_batch_tokens=200)
    # A round of one, a step with the first token of each of its prompts, and of both a request over its share and what ran
    # uncharged.
    slack = QUANTUM_TOKENS + 200 + 8 + 2 * (max(map(sum, sizes)) + 8 * max(output for _, output in sizes))
    number = 0
    for _ in range(num_steps):
        waiting = Counter(r.tenant for r in play.live if r.sequences[0].status is Status.WAITING)
        for index, (prompt, output) in enumerate(sizes):
            for _ in range(16 - waiting[f"t{index}"]):
                number += 1
                play.add(f"{number}", prompt, output, tenant=f"t{index}")
        play.step()
        served = [play.served[f"t{index}"] for index in range(len(sizes))]
        assert max(served) - min(served) <= slack


def test_a_tenant_that_writes_much_starts_less() -> None:
    """Short prompts with long answers against long prompts with short ones, of one class: nearly equal."""
    play = make(num_blocks=400, max_num_seqs=8, max_batch_tokens=200)
    number = 0
    for _ in range(1500):
        waiting = Counter(r.tenant for r in play.live if r.sequences[0].status is Status.WAITING)
        for tenant, prompt, output in (("writer", 70, 150), ("reader", 150, 5)):
            for _ in range(12 - waiting[tenant]):
                number += 1
                play.add(f"{number}", prompt, output, tenant=tenant, priority=0)
        play.step()
    assert play.served["writer"] / play.served["reader"] == pytest.approx(1.0, abs=0.15)


def test_tiny_prompts_do_not_hold_the_place_of_others_for_ever() -> None:
    play = make(max_num_seqs=1)
    for index in range(200):
        play.add(f"tiny {index}", 1, 2, tenant="many")
    play.step()
    play.add("guest", 1, 2, tenant="one")
    while "guest" not in play.ended:
        play.step()
    assert len(play.ended) <= 2 + QUANTUM_TOKENS // MIN_CHARGE_TOKENS


# The fixtures are functions without state, so examples may share them.
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 60), st.floats(0.05, 3.0)), min_size=1, max_size=8),
    moves=st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 0.5)), min_size=1, max_size=20),
)
def test_no_request_lives_past_its_deadline(
    lab: Any, start: Any, wanted: list[tuple[int, int, float]], moves: list[tuple[int, float]]
) -> None:
    engine = lab(num_blocks=20, page_size=16, max_num_seqs=2, max_batch_tokens=24)
    begun = engine.clock.now
    deadlines = {f"r{i}": begun + seconds for i, (_, _, seconds) in enumerate(wanted)}
    for index, (prompt, output, seconds) in enumerate(wanted):
        engine.core.receive(start(f"r{index}", [index + 1] * prompt, output, deadline_seconds=seconds))
    ends: dict[str, tuple[float, Any]] = {}
    for turns, seconds in [*moves, *[(1, 0.2)] * 400]:
        for _ in range(turns):
            for event in engine.turn():
                if isinstance(event, Finished | Failed):
                    ends[event.request_id] = (engine.clock.now, event)
            assert all(r.deadline is None or r.deadline > engine.clock.now for r in engine.core.requests.values())
        engine.clock.now += seconds
        if len(ends) == len(wanted):
            break
    assert ends.keys() == deadlines.keys()
    for name, (when, event) in ends.items():
        if isinstance(event, Failed):
            assert event.reason == error_pb2.ERROR_REASON_DEADLINE_EXCEEDED and when >= deadlines[name]
        else:
            assert when < deadlines[name]
    engine.assert_idle()


def test_of_two_deadlines_the_earlier_goes_first() -> None:
    play = make(max_num_seqs=1)
    for name, seconds in (("late", 50.0), ("soon", 5.0), ("none", None)):
        play.add(name, 10, 3, deadline_seconds=seconds)
    while play.live:
        play.step()
    assert list(play.ended) == ["soon", "late", "none"]


@pytest.mark.parametrize("preempted_by", ["growth", "class"])
def test_what_is_preempted_is_not_charged_twice(preempted_by: str) -> None:
    play = make(num_blocks=14, max_num_seqs=4)
    first = play.add("first", 90, 60, priority=2, tenant="a")
    play.step()
    play.step()
    play.add("second", 90, 60, priority=0 if preempted_by == "class" else 2, tenant="b")
    while play.live:
        play.step()
    assert play.scheduler.num_preemptions
    assert first.sequences[0].num_charged == 90
