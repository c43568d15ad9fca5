from __future__ import annotations

from dataclasses import replace

from dragoman_agent.engine.messages import Sampling, Start, Stop
from dragoman_agent.engine.queue import QUANTUM_TOKENS, WaitingQueue
from dragoman_agent.engine.request import AGING_SECONDS, Sequence, new_request

_TEMPLATE = Start("", [1], Sampling(), Stop())


def waiting(
    name: str,
    now: float = 0.0,
    *,
    tenant: str = "",
    priority: int = 1,
    tokens: int = 100,
    deadline: float | None = None,
) -> Sequence:
    message = replace(
        _TEMPLATE,
        request_id=name,
        prompt_ids=[1] * tokens,
        tenant=tenant,
        priority=priority,
        deadline_seconds=None if deadline is None else deadline - now,
    )
    return new_request(message, now, b"root", 64, 10_000).sequences[0]


def drain(queue: WaitingQueue, now: float, count: int | None = None) -> list[str]:
    names = []
    while (sequence := queue.peek(now)) is not None and (count is None or len(names) < count):
        queue.take(sequence, len(sequence.token_ids))
        names.append(sequence.request.request_id)
    return names


def test_first_come_first_served_within_tenant_and_class() -> None:
    queue = WaitingQueue()
    for i in range(5):
        queue.push(waiting(f"{i}", float(i)), float(i))
    assert drain(queue, 5.0) == ["0", "1", "2", "3", "4"]
    assert len(queue) == 0 and queue.num_tokens == 0 and queue.peek(5.0) is None


def test_higher_class_goes_first_and_earlier_deadline_within_it() -> None:
    queue = WaitingQueue()
    queue.push(waiting("batch", priority=2), 0.0)
    queue.push(waiting("standard"), 0.0)
    queue.push(waiting("urgent", deadline=3.0), 0.0)
    queue.push(waiting("chat", priority=0), 0.0)
    assert drain(queue, 0.1) == ["chat", "urgent", "standard", "batch"]


def test_peek_is_stable_and_removal_takes_effect_anywhere() -> None:
    queue = WaitingQueue()
    first, second, third = (waiting(n, float(i)) for i, n in enumerate("abc"))
    for sequence in (first, second, third):
        queue.push(sequence, 0.0)
    assert queue.peek(0.0) is first and queue.peek(0.0) is first
    queue.remove(first)
    queue.remove(second)
    assert first not in queue and third in queue
    assert drain(queue, 0.0) == ["c"]


def test_waiting_raises_the_class_so_that_nobody_starves() -> None:
    queue = WaitingQueue()
    queue.push(waiting("old batch", 0.0, priority=2), 0.0)
    now = 0.0
    started: list[str] = []
    for i in range(400):
        now += 0.1
        queue.push(waiting(f"chat {i}", now, priority=0), now)
        started += drain(queue, now, 1)
        if started[-1] == "old batch":
            break
    assert started[-1] == "old batch"
    assert now <= 2 * AGING_SECONDS + 0.3


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue = WaitingQueue()
    for i in range(300):
        queue.push(waiting(f"big {i}", tenant="big", tokens=1000), 0.0)
        queue.push(waiting(f"small {i}", tenant="small", tokens=100), 0.0)
    tokens = {"big": 0, "small": 0}
    for name in drain(queue, 0.0, 220):
        tenant = name.split()[0]
        tokens[tenant] += 1000 if tenant == "big" else 100
    assert abs(tokens["big"] - tokens["small"]) <= 2 * QUANTUM_TOKENS + 1000


def test_a_flood_of_one_tenant_delays_another_by_one_round_only() -> None:
    queue = WaitingQueue()
    for i in range(500):
        queue.push(waiting(f"flood {i}", tenant="flood", tokens=500), 0.0)
    drain(queue, 0.0, 50)
    queue.push(waiting("guest", tenant="guest", tokens=500), 0.0)
    order = drain(queue, 0.0, 10)
    assert "guest" in order[: 1 + QUANTUM_TOKENS // 500 + 1]


def test_debts_end_when_nobody_waits() -> None:
    queue = WaitingQueue()
    queue.push(waiting("huge", tenant="a", tokens=9000), 0.0)
    drain(queue, 0.0)
    queue.push(waiting("a2", tenant="a"), 0.0)
    queue.push(waiting("b1", tenant="b"), 0.0)
    assert drain(queue, 0.0) == ["a2", "b1"]


def test_a_debt_lasts_while_others_wait() -> None:
    queue = WaitingQueue()
    queue.push(waiting("huge", tenant="a", tokens=9000), 0.0)
    for i in range(40):
        queue.push(waiting(f"b{i}", tenant="b", tokens=200), 0.0)
    assert drain(queue, 0.0, 1) == ["huge"]
    queue.push(waiting("a2", tenant="a", tokens=200), 0.0)
    order = drain(queue, 0.0)
    assert order.index("a2") >= 35


def test_pushed_again_after_preemption_it_comes_once() -> None:
    queue = WaitingQueue()
    other = waiting("other", 1.0)
    queue.push(other, 1.0)
    sequence = waiting("again", 0.0)
    for _ in range(3):
        queue.push(sequence, 0.0)
        queue.remove(sequence)
    queue.push(sequence, 0.0)
    assert drain(queue, 1.0) == ["again", "other"]
