"""Readers that grant a token only once they have all they granted, where blocks are short: nobody dies, waits for ever, or gets other text."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dragoman_agent.engine.events import Event
from dragoman_agent.engine.messages import Credit, Delta, Finished

PLAN = {"num_blocks": 14, "page_size": 4, "max_num_seqs": 4, "max_context_tokens": 32, "max_batch_tokens": 16}
TURN_SECONDS = 0.01  # all are over long before anybody lacks credit for ten seconds

Reader = tuple[
    int, int, int, int, int
]  # tokens of its prompt and answer, tokens a grant, priority, turns before it comes

readers = st.tuples(st.integers(1, 9), st.integers(2, 19), st.integers(1, 6), st.integers(0, 2), st.integers(0, 4))


def read_all(engine: Any, start: Any, wanted: list[Reader]) -> list[Event]:
    """Let all come, and grant as they read; the events until all are over."""
    events: list[Event] = []
    granted: dict[str, int] = {}
    received: dict[str, int] = {}
    due = [(sum(reader[4] for reader in wanted[: index + 1]), index) for index in range(len(wanted))]
    # A turn makes a token at least of one of those that may send, each of which may be computed anew for each of another.
    for turn in range(40 * sum(reader[1] for reader in wanted) + due[-1][0] + 200):
        while due and due[0][0] <= turn:
            _, index = due.pop(0)
            num_prompt, num_output, window, priority, _ = wanted[index]
            name = f"r{index}"
            granted[name], received[name] = window, 0
            prompt = [index + 1] * num_prompt
            engine.core.receive(
                start(name, prompt, num_output, credit=window, priority=priority, seed=index, temperature=0.7)
            )
        for event in engine.turn():
            events.append(event)
            if isinstance(event, Delta):
                received[event.request_id] += len(event.token_ids)
        for name, count in received.items():
            if count == granted[name]:
                granted[name] += wanted[int(name[1:])][2]
                engine.core.receive(Credit(name, granted[name]))
        engine.clock.now += TURN_SECONDS
        if not due and not engine.core.requests:
            break
    return events


# The fixtures are functions without state, so examples may share them.
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(readers, min_size=2, max_size=14))
@example(
    wanted=[(9, 19, 1, 0, 0), (9, 19, 1, 0, 0), (9, 19, 2, 1, 0), (9, 19, 1, 1, 0), (9, 12, 1, 2, 1), (9, 12, 1, 2, 0)]
)
def test_slow_readers_get_all_of_their_text(lab: Any, start: Any, answers: Any, wanted: list[Reader]) -> None:
    engine = lab(**PLAN)
    events = read_all(engine, start, wanted)
    assert not engine.core.requests, "somebody waits for ever"
    engine.assert_idle()
    ends = [event for event in events if not isinstance(event, Delta)]
    assert all(isinstance(event, Finished) for event in ends) and len(ends) == len(wanted)
    found = answers(events)
    alone = lab()
    for index, (num_prompt, num_output, _, _, _) in enumerate(wanted):
        prompt = [index + 1] * num_prompt
        expected = answers(alone.run(start(f"r{index}", prompt, num_output, seed=index, temperature=0.7)))
        assert found[f"r{index}", 0].token_ids == expected[f"r{index}", 0].token_ids
