"""A new plan while the engine runs: what differs, what of it can be taken now, and what waits for the next start. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dragoman_agent.pal.decisions import Decision, Input
from dragoman_agent.pal.limits import PlanError
from dragoman_agent.pal.live import LiveEvent
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.profile import Profile

SUBJECT = "replan"
MIN_STEP_CHANGE = 0.01  # of a predicted step: less is no difference
_NOT_COMPARED = ("memory", "step_model", "num_blocks", "max_batch_tokens", "company_tokens", "max_num_seqs")
_WHY_NOT = {
    "page_size": "the arena is laid out in pages",
    "max_context_tokens": "clients were told the longest context",
    "graph_batch_sizes": "the graphs are captured",
    "mixed_graph_tokens": "the graphs are captured",
    "chunk_graph": "the graphs are captured",
    "kv_dtype": "the arena is taken",
}
_AT_START = "kernels and memory were made for it when the engine started"


@dataclass(frozen=True, slots=True)
class Change:
    """One field that the new plan has otherwise. `applies` False: only from the next start on, for `reason`."""

    field: str
    before: str
    after: str
    applies: bool
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.field} {self.before} -> {self.after}"
        return text if self.applies else f"{text} (at the next start: {self.reason})"


@dataclass(frozen=True, slots=True)
class Replan:
    """The plan in force from now on. `problem`: why there is none for these limits; then nothing changed."""

    plan: Plan
    changes: tuple[Change, ...] = ()
    problem: str = ""

    @property
    def applies(self) -> bool:
        """Whether something changes while the engine runs."""
        return any(change.applies for change in self.changes)


def replan(
    in_force: Plan,
    at_start: Plan,
    make_plan: Callable[[Profile], tuple[Plan, Sequence[Decision]]],
    profile: Profile,
    *,
    memory_is_committed: bool,
) -> Replan:
    """Plan for `profile` (the overlaid one) and take over what can change under a running engine.

    Buffers were made for the plan at start, so nothing grows past it. `memory_is_committed`: the device took the whole
    arena at start, so that fewer blocks would free nothing.
    """
    try:
        target, _ = make_plan(profile)
    except PlanError as error:
        return Replan(in_force, problem=str(error))
    tokens = min(target.max_batch_tokens, at_start.max_batch_tokens)
    company = min(target.max_company_tokens, at_start.max_company_tokens)
    seqs = min(target.max_num_seqs, at_start.max_num_seqs)
    blocks = at_start.num_blocks if memory_is_committed else min(target.num_blocks, at_start.num_blocks)
    plan = replace(
        in_force,
        max_batch_tokens=tokens,
        company_tokens=company if company < tokens else 0,
        max_num_seqs=seqs,
        num_blocks=blocks,
        step_model=target.step_model,
    )
    has_two_kinds = in_force.company_tokens or plan.company_tokens  # of steps, beside streams and without
    beside = _running("company_tokens", in_force.max_company_tokens, company, "tokens") if has_two_kinds else []
    changes = [
        *_running("max_batch_tokens", in_force.max_batch_tokens, tokens, "tokens"),
        *beside,
        *_running("max_num_seqs", in_force.max_num_seqs, seqs, "sequences"),
        *_running("num_blocks", in_force.num_blocks, blocks, "KV blocks"),
        *_step_model_change(in_force, target),
        *_blocks_later(at_start, target, memory_is_committed),
        *_fixed_changes(at_start, target),
    ]
    return Replan(plan, tuple(changes))


def _running(name: str, before: int, after: int, unit: str) -> list[Change]:
    return [] if before == after else [Change(name, f"{before}", f"{after} {unit}", applies=True)]


def _step_model_change(in_force: Plan, target: Plan) -> list[Change]:
    """Both ends of the model: the step of one sequence, and the prefill rate."""
    context = min(1024, in_force.max_context_tokens)
    old, new = in_force.step_model, target.step_model
    before, after = old.decode_step_seconds(1, context), new.decode_step_seconds(1, context)
    rate_before, rate_after = old.prefill_tokens_per_second, new.prefill_tokens_per_second
    changes = []
    if abs(after - before) > MIN_STEP_CHANGE * before:
        changes.append(Change("step of one sequence", f"{1e3 * before:.3g} ms", f"{1e3 * after:.3g} ms", applies=True))
    if abs(rate_after - rate_before) > MIN_STEP_CHANGE * rate_before:
        changes.append(Change("prefill", f"{rate_before:,.0f}", f"{rate_after:,.0f} tokens/s", applies=True))
    return changes


def _blocks_later(at_start: Plan, target: Plan, memory_is_committed: bool) -> list[Change]:
    """Blocks that a plan made now would have otherwise, where the arena stays as it was taken."""
    before, after = at_start.num_blocks, target.num_blocks
    if memory_is_committed and before != after:
        reason = "the arena is taken, and nobody can take it from the agent"
        return [Change("num_blocks", str(before), f"{after} KV blocks", applies=False, reason=reason)]
    return []


def _fixed_changes(at_start: Plan, target: Plan) -> list[Change]:
    changes = []
    for field in fields(Plan):
        if field.name in _NOT_COMPARED:
            continue
        before, after = getattr(at_start, field.name), getattr(target, field.name)
        if before != after:
            reason = _WHY_NOT.get(field.name, _AT_START)
            changes.append(Change(field.name, _short(before), _short(after), applies=False, reason=reason))
    return changes


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def describe(events: Sequence[LiveEvent], result: Replan) -> Decision:
    """The decision that a change of the limits led to. Predicted: seconds of a decode step of one sequence."""
    causes = "; ".join(event.text for event in events)
    inputs = tuple(Input(event.quantity, f"{event.before:.2f} -> {event.after:.2f}", "reported") for event in events)
    if result.problem:
        reason = f"{causes}. A start under these limits would be refused ({result.problem}); what runs goes on"
        return Decision(SUBJECT, "the plan in force stays", reason, inputs=inputs)
    return _taken(causes, inputs, result)


def describe_steps(text: str, result: Replan) -> Decision:
    """The decision that steps timed on the loaded device led to."""
    return _taken(text, (), result)


def _taken(causes: str, inputs: tuple[Input, ...], result: Replan) -> Decision:
    chosen = "; ".join(str(change) for change in result.changes if change.applies) or "the plan in force stays"
    later = [str(change) for change in result.changes if not change.applies]
    reason = ". ".join(filter(None, (causes, "; ".join(later))))
    context = min(1024, result.plan.max_context_tokens)
    predicted = result.plan.step_model.decode_step_seconds(1, context)
    return Decision(SUBJECT, chosen, reason, inputs=inputs, predicted=predicted, unit="s")
