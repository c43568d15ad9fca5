"""The prefix index against the agents' own sets, under gaps, reordering, duplicates and restarts (fault F19)."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.controller.held import held_by

from dragoman_controller.prefix_index import PrefixIndex

Message = tuple[int, int, tuple[int, ...], tuple[int, ...], bool]


@dataclass
class Agent:
    """What an agent holds, and the messages it would send."""

    epoch: int = 1
    sequence: int = 0
    held: set[int] = field(default_factory=set)

    def change(self, stored: set[int], removed: set[int]) -> Message:
        stored, removed = stored - self.held, removed & self.held - stored
        self.held = (self.held - removed) | stored
        self.sequence += 1
        return self.epoch, self.sequence, tuple(stored), tuple(removed), False

    def snapshot(self) -> Message:
        self.sequence += 1
        return self.epoch, self.sequence, tuple(self.held), (), True

    def restart(self) -> Message:
        self.epoch, self.sequence, self.held = self.epoch + 1, 0, set()
        return self.snapshot()


hashes = st.sets(st.integers(1, 12), max_size=4)
events = st.lists(
    st.one_of(
        st.tuples(st.just("change"), hashes, hashes),
        st.tuples(st.just("lose"), hashes, hashes),
        st.tuples(st.just("twice"), hashes, hashes),
        st.tuples(st.just("swap"), hashes, hashes),
        st.tuples(st.just("restart"), st.just(set()), st.just(set())),
    ),
    max_size=40,
)


@given(events)
@settings(max_examples=300, deadline=None)
def test_the_index_equals_the_agents_own_after_a_snapshot_where_one_was_asked_for(
    log: list[tuple[str, set[int], set[int]]],
) -> None:
    index, agent, bystander = PrefixIndex(), Agent(), {98, 99}
    index.apply("bystander", 5, 1, bystander, (), snapshot=True)

    def deliver(message: Message) -> None:
        epoch, sequence, stored, removed, snapshot = message
        if epoch == agent.epoch and index.apply("a", epoch, sequence, stored, removed, snapshot).snapshot_wanted:
            deliver(agent.snapshot())

    deliver(agent.snapshot())
    for kind, stored, removed in log:
        if kind == "restart":
            index.start_stream("a", agent.epoch + 1)
            deliver(agent.restart())
            continue
        message = agent.change(stored, removed)
        if kind == "change":
            deliver(message)
        elif kind == "twice":
            deliver(message)
            deliver(message)
        elif kind == "swap":
            deliver(agent.change(removed, stored))
            deliver(message)
    deliver(agent.change(set(), set()))
    assert held_by(index, "a") == agent.held
    assert held_by(index, "bystander") == bystander
    assert len(index) == len(agent.held | bystander)
    for block_hash in range(1, 13):
        assert ("a" in index.lookup([block_hash])) == (block_hash in agent.held)


def test_after_a_gap_only_a_snapshot_is_taken_and_it_is_asked_for_once() -> None:
    index = PrefixIndex()
    assert index.apply("a", 1, 1, (1, 2), ()) == (1, False)
    assert index.apply("a", 1, 3, (3,), ()) == (1, True)
    assert index.apply("a", 1, 4, (4,), ()) == (1, False)
    assert held_by(index, "a") == {1, 2}
    index.start_stream("a", 1)
    assert index.apply("a", 1, 5, (5,), ()) == (1, True)
    assert index.apply("a", 1, 6, (7,), (), snapshot=True) == (6, False)
    assert held_by(index, "a") == {7}
    assert index.apply("a", 1, 7, (8,), (7,)) == (7, False)
    assert held_by(index, "a") == {8}


def test_a_message_that_was_taken_already_changes_nothing_and_asks_for_nothing() -> None:
    index = PrefixIndex()
    index.apply("a", 1, 1, (1, 2), ())
    index.apply("a", 1, 2, (3,), (1,))
    assert index.apply("a", 1, 1, (1, 2), ()) == (2, False)
    assert index.apply("a", 1, 2, (), (), snapshot=True) == (2, False)
    assert held_by(index, "a") == {2, 3}
    assert index.apply("a", 1, 3, (4,), ()) == (3, False)


def test_lookup_finds_the_longest_prefix_of_each_agent() -> None:
    index = PrefixIndex()
    index.apply("all", 1, 1, (10, 20, 30), ())
    index.apply("two", 1, 1, (10, 20), ())
    index.apply("hole", 1, 1, (10, 30), ())
    index.apply("tail", 1, 1, (20, 30), ())
    assert index.lookup([10, 20, 30]) == {"all": 3, "two": 2, "hole": 1}
    assert index.lookup([10, 20, 30, 40]) == {"all": 3, "two": 2, "hole": 1}
    assert index.lookup([40]) == {}
    assert index.lookup([]) == {}


def test_a_removed_agents_place_is_used_again_without_mixing() -> None:
    index = PrefixIndex()
    index.apply("a", 1, 1, (1, 2), ())
    index.apply("b", 1, 1, (2,), ())
    index.remove_agent("a")
    index.apply("c", 1, 1, (3,), ())
    assert index.lookup([2]) == {"b": 1}
    assert index.lookup([3]) == {"c": 1}
    assert index.lookup([1]) == {}


def test_300_agents_fit() -> None:
    index = PrefixIndex()
    for number in range(300):
        index.apply(f"agent-{number}", 1, 1, (7, number + 100), ())
    assert len(index.lookup([7])) == 300
    assert index.lookup([7, 399]) == {**{f"agent-{n}": 1 for n in range(299)}, "agent-299": 2}
