"""F19: whatever happens to KV events on the way, the index ends up as what the agent holds: its real feed against the real index."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.controller.held import held_by

from dragoman.v1.agent_registry_service_pb2 import PublishKvEventsRequest
from dragoman_agent.kv_journal import KvFeed, KvJournal
from dragoman_controller.prefix_index import ASK_AGAIN_MESSAGES, PrefixIndex

UNITS = [unit.to_bytes(8, "little") for unit in range(1, 5)]


@dataclass
class Wire:
    """An agent's feed, an index, and what may happen between them."""

    index: PrefixIndex
    agent_id: str = "a"
    epoch: int = 1
    journal: KvJournal = field(default_factory=KvJournal)
    waiting: list[PublishKvEventsRequest] = field(default_factory=list)
    sent: list[PublishKvEventsRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.feed = KvFeed(self.journal)
        self.connect()

    def connect(self) -> None:
        """A new stream: what was under way is lost, and the agent begins with a snapshot."""
        self.waiting.clear()
        self.index.start_stream(self.agent_id, self.epoch)
        self.feed.want_snapshot()

    def restart(self) -> None:
        """A new life: nothing is held, and the numbers begin again at one."""
        self.epoch += 1
        self.journal = KvJournal()
        self.feed = KvFeed(self.journal)
        self.sent.clear()
        self.connect()

    def publish(self) -> None:
        message = self.feed.next_message("lease", self.epoch)
        if message is not None:
            self.waiting.append(message)
            self.sent.append(message)

    def deliver(self, message: PublishKvEventsRequest) -> None:
        applied = self.index.apply(
            self.agent_id,
            message.epoch,
            message.sequence,
            message.stored_block_hashes,
            message.removed_block_hashes,
            message.snapshot,
            stored_below=message.lower_stored_block_hashes,
            removed_below=message.lower_removed_block_hashes,
        )
        if applied.snapshot_wanted:
            self.feed.want_snapshot()

    def send(self, unit: int, is_stored: bool, fate: str) -> None:
        """One change, and what becomes of its message."""
        self.journal.take([UNITS[unit]] if is_stored else [], [] if is_stored else [UNITS[unit]])
        if unit % 2:  # what leaves the device comes below it
            self.journal.take_below([] if is_stored else [UNITS[unit]], [UNITS[unit]] if is_stored else [])
        self.publish()
        if fate == "lost" and self.waiting:
            self.waiting.pop()
        elif fate == "overtaken" and len(self.waiting) > 1:
            self.deliver(self.waiting.pop())
        elif fate in ("arrives", "arrives twice"):
            arriving, self.waiting = self.waiting, []
            for message in arriving * (2 if fate == "arrives twice" else 1):
                self.deliver(message)

    def do(self, action: tuple[Any, ...]) -> None:
        kind, *values = action
        if kind == "send":
            self.send(*values)
        elif kind == "repeat" and self.sent:
            self.deliver(self.sent[values[0] % len(self.sent)])
        elif kind == "reconnect":
            self.connect()
        elif kind == "restart":
            self.restart()

    def settle(self) -> None:
        """The wire is well again: what waits arrives, what is asked for is sent, and changes go on."""
        for number in range(2 * ASK_AGAIN_MESSAGES + 4):
            while self.waiting:
                self.deliver(self.waiting.pop(0))
            self.journal.take([UNITS[number % 2]], [UNITS[1 - number % 2]])
            self.publish()
        while self.waiting:
            self.deliver(self.waiting.pop(0))


FATES = st.sampled_from(["arrives", "arrives", "arrives", "lost", "waits", "overtaken", "arrives twice"])
ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 3), st.booleans(), FATES),
    st.tuples(st.just("send"), st.integers(2, 3), st.booleans(), FATES),
    st.tuples(st.just("repeat"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["reconnect", "restart"])),
)


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(st.tuples(st.booleans(), ACTIONS), min_size=10, max_size=40))
def test_f19_the_index_equals_what_the_agents_hold(actions: list[tuple[bool, tuple[Any, ...]]]) -> None:
    index = PrefixIndex()
    wires = [Wire(index, "a"), Wire(index, "b")]
    for which, action in actions:
        wires[which].do(action)
    for wire in wires:
        wire.settle()
        assert held_by(index, wire.agent_id) == wire.journal.held
        assert index._holders[wire.agent_id].below == wire.journal.held_below
    expected = {unit: {w.agent_id for w in wires if unit in w.journal.held} for unit in range(1, 5)}
    assert {unit: set(index.lookup((unit,))) for unit in range(1, 5)} == expected
    assert len(index) == sum(bool(holders) for holders in expected.values())
    anywhere = {
        unit: {w.agent_id for w in wires if unit in w.journal.held | w.journal.held_below} for unit in range(1, 5)
    }
    assert {unit: set(index.lookup_all_tiers((unit,))) for unit in range(1, 5)} == anywhere
    for wire in wires:
        index.remove_agent(wire.agent_id)
    assert not index._masks_below and not len(index)


def test_a_snapshot_that_was_lost_itself_is_asked_for_again() -> None:
    wire = Wire(PrefixIndex())
    for fate in ("arrives", "lost", "arrives", "lost"):  # the last is the snapshot that the gap asked for
        wire.send(3, True, fate)
        wire.send(2, fate == "lost", "waits")
        wire.waiting.clear()
    wire.settle()
    assert held_by(wire.index, "a") == wire.journal.held
