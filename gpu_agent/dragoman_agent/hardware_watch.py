"""The agent's watch over its device: live limits to plan, step model and engine; faults to cordon or exit; indices to actions.

One owner of the limits and of the plan in force. Everything it decides is pure and elsewhere: `pal.live`, `pal.replan`, `pal.xid`,
`engine.indices`, `engine.index_actions`. Runs in the rpc process, so that the decode loop pays nothing for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from dragoman_agent.engine.index_actions import Act, IndexActions, Knobs, Limits
from dragoman_agent.engine.indices import IndexSample
from dragoman_agent.engine.messages import Step, Tune
from dragoman_agent.index_watch import IndexWatch
from dragoman_agent.live_metrics import LiveMetrics
from dragoman_agent.metrics import AgentMetrics
from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import replan as replanning
from dragoman_agent.pal.counters import Counters, CountersError, peak_dram_bytes_per_second
from dragoman_agent.pal.decisions import Decision, Input
from dragoman_agent.pal.live import LiveEvent, LiveState, Reference, Sample, judge, overlay
from dragoman_agent.pal.live_nvml import NvmlSource
from dragoman_agent.pal.live_source import LiveSource, source_for
from dragoman_agent.pal.live_thread import LiveThread, Look
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.xid import XidAction, classify, describe

if TYPE_CHECKING:
    from dragoman_agent.pal.startup import PalResult

logger = logging.getLogger(__name__)

# Kinds whose arena is host memory, which the system commits when it is first touched; a GPU's is taken at start.
_COMMITS_LATE = ("cpu", "null")
FAULT_SUBJECT, LIVE_SUBJECT = "device-fault", "live-limits"


class WatchHost(Protocol):
    """What the watch asks of the agent."""

    def tune(self, limits: Tune) -> None:
        """Hand new limits to the engine."""

    def plan_changed(self, plan: Plan) -> None:
        """Another plan is in force: tell the controllers, hold steps against it."""

    def cordon(self, reason: str) -> None:
        """Finish what runs, take nothing new."""

    def device_lost(self, reason: str) -> None:
        """End every stream at once and leave."""


class HardwareWatch:
    """Started when the engine is ready; fed with its frames. Used from one event loop."""

    def __init__(
        self,
        pal: PalResult,
        model: ModelConfig | None,
        metrics: AgentMetrics,
        host: WatchHost,
        own_pids: Callable[[], Iterable[int]],
    ) -> None:
        """`model` None: the device computes nothing. `own_pids`: the agent's processes, whose memory is not foreign."""
        self._pal = pal
        self._host = host
        self._on_decision = metrics.take_decision
        self._source, self._thresholds = source_for(pal.profile.device, own_pids)
        self._state = LiveState(Reference(max_clock_hertz=_number(pal.profile, "compute.max_clock")))
        self._thread: LiveThread | None = None
        self._is_gone = False
        self._total_bytes: int | None = None
        self.metrics = LiveMetrics(metrics.registry)
        self.plan = pal.plan
        self._make_plan = pal.make_plan
        self.profile = pal.profile
        bandwidth = _number(pal.profile, "memory.read_bandwidth")
        has_tiers = pal.plan.kv_host_bytes > 0 or pal.plan.kv_disk_bytes > 0
        actions = IndexActions(
            Limits(
                pal.plan.max_batch_tokens,
                pal.plan.num_blocks - 1,
                bandwidth,
                can_prefetch=has_tiers,
                company_tokens=pal.plan.company_tokens,
                num_layers=model.num_layers if model is not None else 0,
                short_groups=pal.plan.short_groups,
            ),
            prefetch_ahead=pal.plan.prefetch,
        )
        self.indices = IndexWatch(pal.plan, pal.profile, model, actions)

    # Life.

    def start(self) -> None:
        """Begin to look. What the limits are now is what the plan was made for."""
        loop = asyncio.get_running_loop()

        def deliver(look: Look) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
                loop.call_soon_threadsafe(self.take, look)

        self._thread = LiveThread(self._source, self._open_counters, deliver)
        self._thread.start()

    async def close(self, patience_seconds: float) -> None:
        """End the thread, and wait so long for it."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close, patience_seconds)

    def _open_counters(self) -> list[Counters]:
        return open_counters(self._source, self._pal.profile)

    # What the device says.

    def take(self, look: Look) -> None:
        """One look of the thread."""
        if look.lost:
            self._lost(look.lost)
        if look.gone:
            self._gone(look.gone)
        for xid in look.xids:
            self._fault(xid)
        if look.sample is not None:
            self._sampled(look.sample, look)

    def _sampled(self, sample: Sample, look: Look) -> None:
        if self._is_gone:
            self._is_gone = False
            logger.info("live limits are read again")
            self._pal.view.feed.announce("live limits are read again")
        self._total_bytes = sample.total_memory_bytes or self._total_bytes
        self.indices.take_sample(sample, look.reading, self.profile)
        self.metrics.take_sample(sample, self.indices.sm_ratio)
        self.metrics.take_indices(self.indices.current(), self.indices.hit_ratios)
        self._pal.view.feed.publish(sample)
        self._state, events = judge(self._state, sample, self._thresholds)
        if events:
            self._limits_changed(events)

    def _limits_changed(self, events: Sequence[LiveEvent]) -> None:
        """Overlay the profile and plan anew; every event is told with what came of it."""
        self.profile = overlay(self._pal.profile, self._state, self._thresholds, self._total_bytes)
        if self._make_plan is None:
            outcome = "the plan was given and stays"
            self._record(_without_plan(events, outcome))
        else:
            result = replanning.replan(
                self.plan,
                self._pal.plan,
                self._make_plan,
                self.profile,
                memory_is_committed=self._pal.plan.device_kind not in _COMMITS_LATE,
            )
            decision = replanning.describe(events, result)
            outcome = decision.chosen
            self._take_plan(result, decision)
        for event in events:
            self.metrics.count_event(event.quantity)
            level = logging.INFO if event.recovered else logging.WARNING
            logger.log(level, "live limits: %s; %s", event.text, outcome)
            self._pal.view.feed.announce(f"{event.text}; {outcome}")

    def _take_plan(self, result: replanning.Replan, decision: Decision) -> None:
        self.metrics.replans.labels("refused" if result.problem else "changed" if result.applies else "same").inc()
        self._record(decision)
        self._pal.view.use(self.profile, result.plan)
        if not result.applies:
            return
        self.plan = result.plan
        self.indices.rebase(result.plan)
        self._tune()
        self._host.plan_changed(result.plan)

    def _tune(self) -> None:
        knobs = self.indices.knobs
        self._host.tune(
            Tune(
                max_step_tokens=knobs.max_step_tokens,
                max_lone_tokens=self.plan.max_batch_tokens,
                max_num_seqs=self.plan.max_num_seqs,
                num_usable_blocks=self.plan.num_blocks - 1,
                num_ready_blocks=knobs.num_ready_blocks,
                prefetch_ahead=knobs.prefetch_ahead,
                attention_rows=knobs.attention_rows,
            )
        )

    def _gone(self, why: str) -> None:
        self._is_gone = True
        self.metrics.forget_sample()
        text = f"live limits cannot be read: {why}; the plan stays as it is, it is tried again"
        logger.warning("%s", text)
        self._pal.view.feed.announce(text)
        self._record(Decision(LIVE_SUBJECT, "limits as last seen", text))

    def _lost(self, why: str) -> None:
        self._record(Decision(FAULT_SUBJECT, XidAction.EXIT.value, why))
        self._pal.view.feed.announce(why)
        self._host.device_lost(why)

    def _fault(self, xid: int) -> None:
        row, text = classify(xid), describe(xid)
        self.metrics.count_fault(xid)
        self._record(Decision(FAULT_SUBJECT, row.action.value, text, inputs=(Input("xid", str(xid), "reported"),)))
        logger.log(logging.INFO if row.action is XidAction.NOTE else logging.ERROR, "device fault: %s", text)
        self._pal.view.feed.announce(f"{row.action.value}: {text}")
        if row.action is XidAction.CORDON:
            self._host.cordon(text)
        elif row.action is XidAction.EXIT:
            self._host.device_lost(text)

    # What the engine says.

    def steps_timed(self, steps: Sequence[tuple[int, int, float]]) -> None:
        """Decode steps that the loaded device timed, (batch, context, seconds): the step model is made anew from them."""
        if not steps or self._pal.with_steps is None or "pal" in self._pal.plan.switches_off:
            return
        self._make_plan = self._pal.with_steps(steps)
        result = replanning.replan(
            self.plan,
            self._pal.plan,
            self._make_plan,
            self.profile,
            memory_is_committed=self._pal.plan.device_kind not in _COMMITS_LATE,
        )
        first = steps[0]
        text = (
            f"{len(steps)} decode steps timed on the loaded device, {1e3 * first[2]:.2f} ms alone at {first[1]} tokens"
        )
        self._take_plan(result, replanning.describe_steps(text, result))

    def take_step(self, step: Step) -> None:
        """One frame; about 20 us for one that computed something."""
        act = self.indices.take_step(step)
        if act is not None:
            self._act(act)

    def _act(self, act: Act) -> None:
        proposal = act.proposal
        self.metrics.actions.labels(proposal.action, act.kind).inc()
        logger.info("%s %s: %s", proposal.action, act.kind, act.reason)
        subject = proposal.action
        if act.kind in ("kept", "undone"):
            if act.measured_gain is not None:
                completed = self._pal.log.measured(subject, 1.0 + act.measured_gain)
                if completed is not None:
                    self._on_decision(completed)
            self._record(_ending(act))
        else:
            self._record(_beginning(act))
        if act.kind != "declined":
            self._tune()

    def _record(self, decision: Decision) -> None:
        self._on_decision(self._pal.log.record(decision))


def open_counters(source: LiveSource, profile: Profile) -> list[Counters]:
    """The sources of counters that this device has, the preferred first; the reason of each other is logged."""
    if not isinstance(source, NvmlSource):
        return []
    from dragoman_agent.pal.counters_cupti import CuptiCounters
    from dragoman_agent.pal.counters_gpm import GpmCounters

    peak = peak_dram_bytes_per_second(profile)
    makers: list[Callable[[], Counters]] = [lambda: GpmCounters(source.nvml, source.handle, peak)]
    if profile.device.kind == "cuda":
        makers.insert(0, lambda: CuptiCounters(profile.device.index, peak))
    found: list[Counters] = []
    for make in makers:
        try:
            found.append(make())
        except CountersError as error:
            logger.info("%s; the next source of counters is used, or the model", error)
    return found


def _beginning(act: Act) -> Decision:
    proposal = act.proposal
    chosen = "not done" if act.kind == "declined" else _knobs_text(act.knobs)
    predicted = None if act.kind == "declined" else 1.0 + proposal.predicted_gain
    return Decision(
        proposal.action, chosen, act.reason, inputs=(_index_input(proposal.index),), predicted=predicted, unit="x speed"
    )


def _ending(act: Act) -> Decision:
    """Recorded on a subject of its own, so that the trial's decision keeps what was predicted and measured."""
    inputs = (_index_input(act.proposal.index),)
    return Decision(f"{act.proposal.action}-end", f"{act.kind}: {_knobs_text(act.knobs)}", act.reason, inputs=inputs)


def _knobs_text(knobs: Knobs) -> str:
    parts = [f"{knobs.max_step_tokens} tokens a step beside streams", f"{knobs.num_ready_blocks} blocks kept unused"]
    if knobs.prefetch_ahead:
        parts.append("prefetch ahead")
    if knobs.attention_rows > 1:
        parts.append(f"up to {knobs.attention_rows} short sequences a program of decode attention")
    return ", ".join(parts)


def _index_input(index: IndexSample) -> Input:
    return Input(
        index.name, f"{index.value:.2f} ({index.source})", "derived" if index.source == "model" else "measured"
    )


def _without_plan(events: Sequence[LiveEvent], outcome: str) -> Decision:
    inputs = tuple(Input(event.quantity, f"{event.before:.2f} -> {event.after:.2f}", "reported") for event in events)
    return Decision(replanning.SUBJECT, outcome, "; ".join(event.text for event in events), inputs=inputs)


def _number(profile: Profile, name: str) -> float | None:
    return profile.number(name) if name in profile.values else None
