"""The fair queue: order, shares, classes, starvation, removal."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_controller.queue import MAX_NUM_BYPASSES, QUANTUM_TOKENS, Entry, FairQueue
from dragoman_controller.requests import Priority

STANDARD = Priority.STANDARD


def serve(queue: FairQueue[str]) -> Entry[str]:
    entry = queue.select()
    assert entry is not None
    queue.take(entry)
    return entry


def test_one_tenant_is_served_in_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push(name, STANDARD, "t", 100, 1)
    assert [serve(queue).item for _ in range(3)] == ["a", "b", "c"]
    assert queue.select() is None
    assert len(queue) == 0


@given(
    costs=st.dictionaries(st.sampled_from("xyz"), st.integers(1, 20_000), min_size=2),
    shares=st.fixed_dictionaries({name: st.integers(1, 4) for name in "xyz"}),
    rounds=st.integers(1, 120),
)
@settings(max_examples=150, deadline=None)
def test_tenants_that_always_wait_get_their_share_of_tokens(
    costs: dict[str, int], shares: dict[str, int], rounds: int
) -> None:
    queue: FairQueue[str] = FairQueue()
    served: Counter[str] = Counter()
    for tenant, cost in costs.items():
        for _ in range(2):
            queue.push(tenant, STANDARD, tenant, cost, shares[tenant])
    for _ in range(rounds):
        entry = serve(queue)
        served[entry.tenant] += entry.cost
        queue.push(entry.tenant, STANDARD, entry.tenant, costs[entry.tenant], shares[entry.tenant])
    # Deficit round robin: in each round a tenant gets quantum * share, give or take one request of its own.
    per_share = [served[tenant] / shares[tenant] for tenant in costs]
    bound = QUANTUM_TOKENS + 2 * max(costs[tenant] / shares[tenant] for tenant in costs)
    assert max(per_share) - min(per_share) <= bound


def test_a_tenant_with_ten_times_the_requests_gets_half_of_the_tokens() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(200):
        queue.push("flood", STANDARD, "flood", 500, 1)
    for _ in range(20):
        queue.push("quiet", STANDARD, "quiet", 500, 1)
    first = Counter(serve(queue).tenant for _ in range(40))
    assert abs(first["flood"] - first["quiet"]) <= QUANTUM_TOKENS // 500 + 1


def test_a_higher_class_goes_first_and_a_lower_one_is_not_starved() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(60):
        queue.push(f"i{index}", Priority.INTERACTIVE, "t", 10, 1)
    for index in range(5):
        queue.push(f"b{index}", Priority.BATCH, "t", 10, 1)
    order = [serve(queue).priority for _ in range(40)]
    assert order[:MAX_NUM_BYPASSES] == [Priority.INTERACTIVE] * MAX_NUM_BYPASSES
    waits = [index for index, priority in enumerate(order) if priority is Priority.BATCH]
    assert len(waits) >= 4
    assert all(b - a <= MAX_NUM_BYPASSES + 1 for a, b in zip([-1, *waits], waits, strict=False))


@given(st.lists(st.sampled_from(list(Priority)), min_size=1, max_size=60), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_no_waiting_class_is_passed_over_for_long(pushes: list[Priority], seed: int) -> None:
    queue: FairQueue[str] = FairQueue()
    for priority in pushes:
        queue.push("x", priority, f"t{seed}", 1, 1)
    passed: Counter[Priority] = Counter()
    while queue:
        waiting = [priority for priority in Priority if queue.num_waiting(priority)]
        taken = serve(queue).priority
        for priority in waiting:
            passed[priority] = 0 if priority is taken else passed[priority] + 1
            assert passed[priority] <= MAX_NUM_BYPASSES + len(Priority) - 1


def test_a_held_tenant_is_passed_over_and_is_next_when_released() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a1", STANDARD, "a", 10, 1)
    queue.push("b1", STANDARD, "b", 10, 1)
    first = queue.select()
    assert first is not None and first.item == "a1"
    queue.hold(first)
    queue.push("a2", STANDARD, "a", 10, 1)
    second = queue.select()
    assert second is not None and second.item == "b1"
    queue.hold(second)
    assert queue.select() is None and len(queue) == 3
    queue.release("b")
    queue.release("a")
    queue.release("a")
    queue.release("never held")
    assert [serve(queue).item for _ in range(3)] == ["a1", "a2", "b1"]


def test_a_held_tenant_that_leaves_and_comes_back_waits_like_any_other() -> None:
    queue: FairQueue[str] = FairQueue()
    entry = queue.push("a1", STANDARD, "a", 10, 1)
    queue.select()
    queue.hold(entry)
    queue.remove(entry)
    queue.push("a2", STANDARD, "a", 10, 1)
    assert serve(queue).item == "a2" and len(queue) == 0


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_request_that_is_not_removed_is_served_once(data: st.DataObject) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, Entry[int]] = {}
    held: set[str] = set()
    for number in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["push", "push", "remove", "serve", "hold", "release"])):
            case "push":
                name = data.draw(st.sampled_from("abcde"))
                priority = data.draw(st.sampled_from(list(Priority)))
                waiting[number] = queue.push(number, priority, name, data.draw(st.integers(1, 9000)), 1)
            case "remove" if waiting:
                queue.remove(waiting.pop(data.draw(st.sampled_from(sorted(waiting)))))
            case "serve":
                if (entry := queue.select()) is not None:
                    queue.take(entry)
                    assert waiting.pop(entry.item) is entry
            case "hold":
                if (entry := queue.select()) is not None:
                    queue.hold(entry)
                    held.add(entry.tenant)
            case "release":
                for name in held:
                    queue.release(name)
                held.clear()
        assert len(queue) == len(waiting)
    for name in held:
        queue.release(name)
    assert {serve(queue).item for _ in range(len(waiting))} == set(waiting)
    assert queue.select() is None and len(queue) == 0


def test_ten_thousand_tenants_that_come_and_go_leave_nothing_behind() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10_000):
        queue.remove(queue.push(number, STANDARD, f"t{number}", 1, 1))
    entries = [queue.push(number, STANDARD, f"t{number}", 1, 1) for number in range(10_000)]
    assert queue.num_ahead(entries[-1]) == 9_999 and queue.num_ahead(entries[0]) <= 9_999
    for entry in entries[:9_990]:
        queue.remove(entry)
    standard = queue._classes[STANDARD]
    assert len(standard.tenants) == 10 and len(standard._turns) <= 20
    assert {serve(queue).item for _ in range(10)} == set(range(9_990, 10_000))


def test_removed_requests_are_never_served_and_no_longer_counted() -> None:
    queue: FairQueue[str] = FairQueue()
    entries = [queue.push(name, STANDARD, "t", 10, 1) for name in "abcd"]
    queue.remove(entries[0])
    queue.remove(entries[2])
    queue.remove(entries[2])
    assert len(queue) == 2
    assert [serve(queue).item for _ in range(2)] == ["b", "d"]
    assert queue.select() is None


def test_a_request_of_many_quanta_is_served_in_its_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("huge", STANDARD, "a", QUANTUM_TOKENS * 1_000_000, 1)
    assert serve(queue).item == "huge"


def test_an_idle_tenant_saves_up_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a", STANDARD, "a", 1, 1)
    serve(queue)
    for _ in range(10):
        queue.push("a", STANDARD, "a", QUANTUM_TOKENS, 1)
        queue.push("b", STANDARD, "b", QUANTUM_TOKENS, 1)
    assert Counter(serve(queue).tenant for _ in range(10)) == {"a": 5, "b": 5}


def test_the_position_counts_higher_classes_and_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("i", Priority.INTERACTIVE, "t", 1, 1)
    first = queue.push("a1", STANDARD, "a", 1, 1)
    for _ in range(5):
        queue.push("b", STANDARD, "b", 1, 1)
    second = queue.push("a2", STANDARD, "a", 1, 1)
    assert queue.num_ahead(first) == 1 + 1
    assert queue.num_ahead(second) == 1 + 1 + 2
