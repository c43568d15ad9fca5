"""A simulated agent: by hand where it can be reckoned, and against the real engine in virtual time."""

from __future__ import annotations

import heapq
import math
import statistics
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.step_model import StepModel
from dragoman_agent.device.null import NullDevice, _step_seconds
from dragoman_agent.device.null_model import default_null_plan, open_null_model
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.messages import Finished, Sampling, Start, Stop
from dragoman_controller.simulate.agent import SimulatedAgent
from dragoman_controller.simulate.profiles import AgentProfile
from dragoman_controller.simulate.streams import Stream
from dragoman_controller.steps import StepTable
from dragoman_text import TextTokenizer

NUM_REPLAYED = 60
MODEL = StepModel(
    (1, 8, 64), (0, 1024, 8192), (0.01, 0.011, 0.018, 0.012, 0.02, 0.07, 0.03, 0.09, 0.5), 10_000.0, 0.005
)
PROFILE = AgentProfile("test", StepTable(MODEL), max_running_requests=8, max_waiting_requests=4, max_batch_tokens=512)


def stream(number: int, prompt: int, output: int, priority: int = 2) -> Stream:
    return Stream(number, 0.0, 0, priority, prompt, output, -1, 0, ())


def run(agent: SimulatedAgent, offers: list[tuple[float, Stream]]) -> dict[int, tuple[float, float]]:
    """(first token, end) of each stream that was taken, in seconds."""
    waiting = [(at, one.number, one) for at, one in offers]
    heapq.heapify(waiting)
    ended: dict[int, tuple[float, float]] = {}
    while waiting or agent.next_at < math.inf:
        if waiting and waiting[0][0] < agent.next_at:
            at, _, one = heapq.heappop(waiting)
            agent.offer(one, at)
            continue
        now = agent.next_at
        for one in agent.step():
            ended[one.number] = one.run_first_at, now
    return ended


def test_a_lone_request_takes_its_prefill_and_its_steps() -> None:
    first, end = run(SimulatedAgent(PROFILE, "a", 1), [(1.0, stream(0, 300, 50))])[0]
    assert first == pytest.approx(1.0 + 300 / 10_000)
    steps = sum(MODEL.decode_step_seconds(1, 301 + index) for index in range(49))
    assert end - first == pytest.approx(steps, rel=1e-6)


def test_a_long_prompt_is_computed_in_chunks_of_a_step() -> None:
    first, _ = run(SimulatedAgent(PROFILE, "a", 1), [(0.0, stream(0, 1200, 2))])[0]
    assert first == pytest.approx(512 / 10_000 * 2 + 176 / 10_000)


def test_a_newcomer_waits_for_the_step_under_way_and_the_one_behind_it() -> None:
    agent = SimulatedAgent(PROFILE, "a", 1)
    ended = run(agent, [(0.0, stream(0, 100, 200)), (0.5, stream(1, 100, 2))])
    step = MODEL.decode_step_seconds(1, 140)
    waited = ended[1][0] - 0.5 - 100 / 10_000 - step
    assert step < waited < 2 * step


def test_the_final_word_is_by_slots_and_a_draining_agent_takes_nothing() -> None:
    agent = SimulatedAgent(PROFILE, "a", 1)
    taken = [agent.offer(stream(number, 10, 100), 0.0) for number in range(14)]
    assert taken == [True] * 12 + [False] * 2
    other = SimulatedAgent(PROFILE, "b", 1)
    other.is_draining = True
    assert not other.offer(stream(0, 10, 10), 0.0)


def test_a_higher_class_is_started_first() -> None:
    profile = replace(PROFILE, max_running_requests=1)
    ended = run(SimulatedAgent(profile, "a", 1), [(0.0, stream(n, 10, 20, 3 if n == 1 else 1)) for n in range(3)])
    assert ended[2][1] < ended[1][0]


def test_sequences_that_outgrow_the_arena_are_computed_again_and_all_end() -> None:
    profile = replace(PROFILE, kv_tokens=600, max_context_tokens=500)
    agent = SimulatedAgent(profile, "a", 1)
    for number in range(8):
        assert agent.offer(stream(number, 60, 200), 0.0)
    ended = []
    while agent.next_at < math.inf:
        at_its_end = agent._kv_used() + agent._run_steps * len(agent._decoding)
        assert at_its_end <= profile.kv_tokens
        ended += agent.step()
    assert len(ended) == 8 and agent.num_preemptions > 0
    assert agent.num_requests == 0 and agent.load(9e9).running_context_tokens == 0


def test_a_killed_agent_tells_what_its_clients_have() -> None:
    agent = SimulatedAgent(PROFILE, "a", 1)
    agent.offer(stream(0, 100, 200), 0.0)
    agent.step()
    ((lost, delivered),) = agent.kill(agent.next_at - 1e-9)
    assert (lost.number, delivered) == (0, 199)
    assert not agent.takes_requests and agent.next_at == math.inf


def test_a_load_says_what_is_there() -> None:
    agent = SimulatedAgent(replace(PROFILE, max_running_requests=1), "a", 1)
    for number in range(3):
        agent.offer(stream(number, 100, 50), 0.0)
    agent.step()
    load = agent.load(agent.next_at - 1e-9)
    assert (load.running_requests, load.waiting_requests, load.pending_prefill_tokens) == (1, 2, 200)
    assert load.running_context_tokens == 101 + 48


@given(st.integers(1, 8), st.integers(20, 900), st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_a_cut_run_ends_with_the_step_that_was_under_way(batch: int, output: int, share: float) -> None:
    """However far a run was, cutting it gives a whole number of its steps and no more than one beyond that instant."""
    agent = SimulatedAgent(replace(PROFILE, max_batch_tokens=4096), "a", 1)
    for number in range(batch):
        agent.offer(stream(number, 50, output), 0.0)
    while not agent._is_run:
        agent.step()
    begun, full = agent._run_begun, agent.next_at
    now = begun + share * (full - begun)
    done = agent._steps_done(now)
    agent._cut_run(now)
    row, mean = StepTable(MODEL).row(len(agent._decoding)), agent._run_context
    assert agent.next_at <= full and agent._run_steps <= done + 1
    assert agent.next_at == pytest.approx(begun + agent._run_steps * row.at(mean + (agent._run_steps - 1) / 2))
    if share < 0.999:
        assert agent.next_at >= now - 1e-9


# Against the real engine.


class VirtualNull:
    """The null device whose steps take virtual time: a result moves the clock on to when it is due."""

    def __init__(self, plan: Any) -> None:
        self.inner, self.plan = NullDevice(), plan
        self.now = self.due = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, batch: Any) -> Any:
        handle = self.inner.submit(batch)
        self.due = due = max(self.due, self.now) + _step_seconds(batch, self.plan)
        return _VirtualHandle(self, handle, due)


class _VirtualHandle:
    def __init__(self, device: VirtualNull, handle: Any, due: float) -> None:
        self.device, self.handle, self.due = device, handle, due

    def result(self) -> Any:
        self.device.now = max(self.device.now, self.due)
        return self.handle.result()


def run_engine(plan: Any, offers: list[tuple[float, Stream]]) -> dict[int, tuple[float, float]]:
    """The same as `run`, by the engine's own core."""
    model = open_null_model("null")
    device = VirtualNull(plan)
    device.load(model, plan, lambda _: None)
    core = EngineCore(device, TextTokenizer.from_files(model.tokenizer), b"d" * 32, plan, lambda: device.now)  # type: ignore[arg-type]
    ended: dict[int, tuple[float, float]] = {}
    waiting = sorted(offers, key=lambda one: one[0])
    came = {one.number: at for at, one in offers}
    rng = Random(3)

    def send(step: Any) -> None:
        for event in step.events:
            if isinstance(event, Finished):
                began = received[int(event.request_id)]
                ended[int(event.request_id)] = began + event.first_token_seconds, began + event.total_seconds

    received: dict[int, float] = {}
    while len(ended) < len(offers):
        while waiting and waiting[0][0] <= device.now:
            _, one = waiting.pop(0)
            prompt = [rng.randrange(3, 250) for _ in range(one.prompt_tokens)]
            received[one.number] = device.now
            core.receive(
                Start(
                    str(one.number), prompt, Sampling(temperature=0.0),
                    Stop(max_output_tokens=one.output_tokens, min_output_tokens=one.output_tokens),
                    credit=1 << 20, priority=one.priority - 1,
                )
            )  # fmt: skip
        if not core.turn(send) and not core.has_output and waiting:
            device.now = max(device.now, waiting[0][0])
    # The engine of a process hears of a request while a step runs, this one after it: what it waited till then counts too.
    return {number: (first, end) for number, (first, end) in ended.items() if came[number] <= first}


@pytest.mark.parametrize(("load", "company_tokens"), [(0.3, 0), (0.8, 0), (0.8, 128)])
def test_it_is_as_quick_as_the_real_engine(load: float, company_tokens: int) -> None:
    """The engine's own core and scheduler with steps in virtual time, against the events of the simulated agent."""
    plan = default_null_plan(
        open_null_model("null"), page_size=16, num_blocks=2048, max_context_tokens=4096, max_batch_tokens=512, max_num_seqs=16,
        step_model=MODEL, company_tokens=company_tokens,
    )  # fmt: skip
    profile = AgentProfile("null", StepTable(MODEL), 4096, 16, 256, 512, 2047 * 16, 16, company_tokens)
    rng, at = Random(11), 0.0
    sizes = []
    for number in range(NUM_REPLAYED):
        at += rng.expovariate(load * profile.requests_per_second(300, 40))
        sizes.append(
            (at, number, min(int(rng.lognormvariate(5.4, 0.8)) + 2, 2000), min(int(rng.expovariate(1 / 40)) + 2, 300))
        )
    made = run(
        SimulatedAgent(profile, "a", 1), [(at, stream(number, prompt, output)) for at, number, prompt, output in sizes]
    )
    real = run_engine(plan, [(at, stream(number, prompt, output)) for at, number, prompt, output in sizes])
    assert len(made) == len(real) == NUM_REPLAYED
    for part in (0, 1):  # first token, end
        errors = [abs(made[number][part] / real[number][part] - 1) for number in made]
        assert statistics.median(errors) < 1e-6
        assert max(errors) < 0.01
