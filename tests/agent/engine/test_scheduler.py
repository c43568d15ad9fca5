from __future__ import annotations

from typing import Any

import pytest

from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.messages import Sampling, Start, Stop, Tune
from dragoman_agent.engine.request import Request, Status, new_request
from dragoman_agent.engine.scheduler import Scheduler
from dragoman_agent.engine.step_plan import StepPlan


def make(**plan: Any) -> Scheduler:
    defaults = {"num_blocks": 64, "page_size": 64, "max_num_seqs": 8, "max_batch_tokens": 256}
    return Scheduler(default_null_plan(NullModel(), **{**defaults, **plan}))


def add(
    scheduler: Scheduler, name: str, tokens: int = 100, now: float = 0.0, max_tokens: int = 1000, **fields: Any
) -> Request:
    message = Start(
        name,
        [sum(name.encode()) % 97] * tokens,
        Sampling(),
        Stop(max_output_tokens=max_tokens),
        credit=1 << 30,
        **fields,
    )
    request = new_request(message, now, b"root", scheduler.page_size, scheduler.capacity_tokens)
    scheduler.add(request, now)
    return request


def compute(scheduler: Scheduler, plan: StepPlan, now: float = 0.0) -> None:
    """What a device and the core do with a step: every computed sequence whose tokens are all in gets another."""
    for sequence, count in plan.prefills:
        sequence.num_computed += count
        if sequence.num_uncomputed == 0:
            scheduler.publish(sequence, sequence.num_computed)
            sequence.token_ids.append(1)
            scheduler.unblock(sequence.request, now)
    for sequence in plan.decodes:
        sequence.num_computed += 1
        scheduler.publish(sequence, sequence.num_computed)
        sequence.token_ids.append(1)


def names(plan: StepPlan) -> tuple[list[str], list[tuple[str, int]]]:
    return [s.request.request_id for s in plan.decodes], [(s.request.request_id, n) for s, n in plan.prefills]


def test_decode_first_then_prefill_under_way_then_new_within_the_budget() -> None:
    scheduler = make(max_batch_tokens=100)
    add(scheduler, "a", 60)
    compute(scheduler, scheduler.schedule(0.0))
    add(scheduler, "b", 150)
    plan = scheduler.schedule(0.0)
    assert names(plan) == (["a"], [("b", 99)])
    compute(scheduler, plan)
    add(scheduler, "c", 150)
    plan = scheduler.schedule(0.0)
    assert names(plan) == (["a"], [("b", 51), ("c", 48)])
    assert plan.num_tokens == 100


def test_more_decodes_than_budget_take_turns() -> None:
    scheduler = make(max_batch_tokens=16, max_num_seqs=8)
    requests = [add(scheduler, f"{i}", 1) for i in range(8)]
    compute(scheduler, scheduler.schedule(0.0))
    scheduler.tune(Tune(3, 8, 63))
    for _ in range(80):
        compute(scheduler, scheduler.schedule(0.0))
    progress = [len(r.sequences[0].token_ids) for r in requests]
    assert max(progress) - min(progress) <= 1 and sum(progress) == 2 * 8 + 3 * 80


@pytest.mark.parametrize("budget", [2, 5, 8])
def test_streams_that_would_fill_a_step_leave_room_for_prompts(budget: int) -> None:
    """And take turns in the rest of it; a step without prompts is all theirs."""
    scheduler = make(num_blocks=64, max_batch_tokens=8, max_num_seqs=10)
    streams = [add(scheduler, f"{i}", 1, max_tokens=900) for i in range(8)]
    compute(scheduler, scheduler.schedule(0.0))
    scheduler.tune(Tune(budget, 10, 63))
    late = add(scheduler, "late", 40)
    for _ in range(40):
        plan = scheduler.schedule(0.0)
        assert plan.num_tokens <= budget
        compute(scheduler, plan)
    assert len(late.sequences[0].token_ids) > 40, "its prompt is computed, and it writes"
    progress = [len(r.sequences[0].token_ids) for r in streams]
    assert max(progress) - min(progress) <= 1


def test_the_lowest_class_and_the_youngest_is_preempted() -> None:
    scheduler = make(num_blocks=7, max_batch_tokens=512)
    requests = {
        name: add(scheduler, name, 127, now, priority=priority)
        for name, now, priority in [("old", 0.0, 1), ("batch", 0.1, 2), ("young", 0.2, 1)]
    }
    compute(scheduler, scheduler.schedule(0.3))
    assert len(scheduler.running) == 3 and scheduler.pool.num_free == 0
    compute(scheduler, scheduler.schedule(0.3))
    plan = scheduler.schedule(0.3)
    assert [s.request.request_id for s in plan.preempted] == ["batch"]
    assert requests["batch"].sequences[0].status is Status.WAITING
    assert requests["batch"].sequences[0].block_table == []
    compute(scheduler, plan)
    preempted: list[str] = []
    while "young" not in preempted:
        plan = scheduler.schedule(0.3)
        preempted += [s.request.request_id for s in plan.preempted]
        compute(scheduler, plan)
    assert "old" not in preempted


def test_the_oldest_always_gets_on_so_a_tiny_pool_never_locks() -> None:
    scheduler = make(num_blocks=5, page_size=16, max_batch_tokens=64)
    requests = [add(scheduler, f"{i}", 20, float(i), max_tokens=40) for i in range(4)]
    finished: list[str] = []
    for _ in range(600):
        compute(scheduler, scheduler.schedule(4.0))
        for request in requests:
            sequence = request.sequences[0]
            if sequence.status is Status.RUNNING and len(sequence.token_ids) >= sequence.max_num_tokens:
                scheduler.leave([sequence], Status.ENDED)
                finished.append(request.request_id)
    assert finished == ["0", "1", "2", "3"]
    assert scheduler.num_preemptions > 0
    assert scheduler.pool.num_free == 4


def test_a_newcomer_leaves_room_for_those_who_run() -> None:
    scheduler = make(num_blocks=34, max_batch_tokens=4096, max_num_seqs=4)
    add(scheduler, "a", 64 * 16)
    compute(scheduler, scheduler.schedule(0.0))
    add(scheduler, "b", 64 * 17)
    plan = scheduler.schedule(0.0)
    assert names(plan) == (["a"], []), "17 pages would fit, but then the one running could not grow"


def test_the_next_in_line_is_not_overtaken_when_it_does_not_fit() -> None:
    scheduler = make(num_blocks=12, max_batch_tokens=4096)
    add(scheduler, "runs", 64 * 6)
    compute(scheduler, scheduler.schedule(0.0))
    add(scheduler, "big", 64 * 8, 0.1)
    add(scheduler, "small", 10, 0.2)
    assert names(scheduler.schedule(0.3))[1] == []


def test_waiting_interactive_goes_before_waiting_batch() -> None:
    scheduler = make(max_num_seqs=1)
    for name, priority in [("first", 1), ("batch", 2), ("chat", 0)]:
        add(scheduler, name, 10, priority=priority)
        if name == "first":
            compute(scheduler, scheduler.schedule(0.0))
    first = scheduler.running[0]
    scheduler.leave([first], Status.FINISHED)
    assert names(scheduler.schedule(0.1))[1] == [("chat", 10)]


@pytest.mark.parametrize("short_of", ["rows", "blocks"])
def test_a_waiting_person_preempts_batch_work_but_not_its_equals(short_of: str) -> None:
    limits = {"max_num_seqs": 2} if short_of == "rows" else {"num_blocks": 7}
    scheduler = make(max_batch_tokens=1024, **limits)
    for name, priority in [("batch", 2), ("standard", 1)]:
        add(scheduler, name, 150, priority=priority)
    compute(scheduler, scheduler.schedule(0.0))
    assert len(scheduler.running) == 2
    add(scheduler, "standard too", 100, 0.1)
    assert names(scheduler.schedule(0.1))[1] == []
    plan = scheduler.schedule(0.2)
    assert [s.request.request_id for s in plan.preempted] == ["batch"]
    assert names(plan) == (["standard"], [("standard too", 100)])
    compute(scheduler, plan)
    add(scheduler, "chat", 100, 0.3, priority=0)
    scheduler.schedule(0.3)
    plan = scheduler.schedule(0.4)
    assert [s.request.request_id for s in plan.preempted] == ["standard too"], "the younger of two equals"
    compute(scheduler, plan)
    add(scheduler, "chat too", 100, 0.5, priority=0)
    for _ in range(3):
        compute(scheduler, scheduler.schedule(0.6))
    assert [s.request.request_id for s in scheduler.running] == ["chat", "chat too"]
    assert [s.request.request_id for s in scheduler.schedule(0.7).preempted] == []


def test_nothing_is_preempted_for_what_would_not_fit_even_so() -> None:
    scheduler = make(num_blocks=12, max_batch_tokens=1024)
    for name, priority in [("batch", 2), ("chat", 0)]:
        add(scheduler, name, 64 * 4, priority=priority)
    compute(scheduler, scheduler.schedule(0.0))
    add(scheduler, "big chat", 64 * 8, 0.1, priority=0)
    for _ in range(3):
        assert not scheduler.schedule(0.2).preempted


def test_choices_wait_for_the_prompt_and_share_its_pages() -> None:
    scheduler = make()
    request = add(scheduler, "r", 200, num_choices=3)
    plan = scheduler.schedule(0.0)
    assert names(plan)[1] == [("r", 200)]
    assert [s.status for s in request.sequences] == [Status.RUNNING, Status.BLOCKED, Status.BLOCKED]
    compute(scheduler, plan)
    plan = scheduler.schedule(0.0)
    assert names(plan) == (["r"], [("r", 8), ("r", 8)])
    tables = [s.block_table for s in request.sequences]
    assert tables[0][:3] == tables[1][:3] == tables[2][:3]
    assert len({t[3] for t in tables}) == 3


@pytest.mark.parametrize(("tokens", "expected"), [(128, 64), (129, 128), (64, 0), (65, 64)])
def test_a_hit_always_leaves_the_last_token_to_compute(tokens: int, expected: int) -> None:
    scheduler = make()
    first = add(scheduler, "same", tokens)
    compute(scheduler, scheduler.schedule(0.0))
    scheduler.leave(first.sequences, Status.FINISHED)
    second = add(scheduler, "same", tokens)
    scheduler.schedule(0.0)
    assert second.sequences[0].num_computed == expected


def test_block_tables_only_grow_while_a_sequence_runs() -> None:
    scheduler = make(num_blocks=10, page_size=16, max_batch_tokens=32)
    requests = [add(scheduler, f"{i}", 30, float(i)) for i in range(3)]
    seen: dict[str, list[int]] = {}
    for _ in range(100):
        plan = scheduler.schedule(3.0)
        for sequence in plan.preempted:
            seen.pop(sequence.request.request_id, None)
        for request in requests:
            table = request.sequences[0].block_table
            before = seen.get(request.request_id, [])
            assert table[: len(before)] == before or not before
            if request.sequences[0].status is Status.RUNNING:
                seen[request.request_id] = list(table)
        compute(scheduler, plan)
    assert scheduler.num_preemptions


def test_the_decision_is_a_function_of_state_and_time() -> None:
    def play() -> list[Any]:
        scheduler = make(num_blocks=12, max_batch_tokens=50)
        plans = []
        for i in range(12):
            add(scheduler, f"{i % 5}-{i}", 40 + 13 * i, i * 0.3, priority=i % 3, tenant="ab"[i % 2])
        for step in range(80):
            plan = scheduler.schedule(4.0 + step * 0.2)
            plans.append(names(plan))
            compute(scheduler, plan)
        return plans

    assert play() == play()
