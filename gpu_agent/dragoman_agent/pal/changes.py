"""The cheapest changes that would make a model fit into a device's free memory. Pure; select and the planner share it.

"Cheap" is what the user gives up, counted in halvings: half the context or half the sequences is 1. The other costs are
judgements in the same unit, kept together in the table below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as _replace
from itertools import permutations
from typing import Literal

Growth = Literal["weights", "context", "sequences"]

MAX_UTILIZATION = 0.95  # above it the driver's own needs and fragmentation make a start a matter of luck
MIN_CONTEXT_TOKENS = 256
_TOKENS_STEP = 256

_COST_UTILIZATION = 0.5  # nothing is lost but the reserve
_COST_STOP_PROCESS = 1.5  # somebody else's work ends
_COST_BITS = 1.5  # a halving of the bits of a weight: quality, and another file
_COST_MODEL = 3.0  # another model, and then each halving of its weights
_COST_OTHER_DEVICE = 4.0  # another speed altogether
_COST_NEW_DEVICE = 20.0  # other hardware


@dataclass(frozen=True, slots=True)
class Part:
    """One line of what must fit. `grows_with` names what it is proportional to; nothing means fixed."""

    name: str
    size_bytes: int
    grows_with: tuple[Growth, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Everything that must be in device memory at once, and the settings it was computed for."""

    model_name: str
    parts: tuple[Part, ...]
    context_tokens: int  # the longest sequence
    num_seqs: int = 1
    utilization: float = 1.0  # share of the free memory that may be used
    kv_token_bytes: int = 0  # of this model; scales the KV lines for a smaller one

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        """Sum of the parts that are weights."""
        return sum(part.size_bytes for part in self.parts if "weights" in part.grows_with)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Another number format in which this device can hold the model; `how` is what the user types or takes."""

    name: str
    weight_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Another model that could be served."""

    name: str
    weight_bytes: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of the device."""

    pid: int
    name: str
    held_bytes: int


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """Another device of this host, which the user did not ask for; `how` asks for it."""

    name: str
    free_bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Options:
    """What else there is to change to; empty where the caller knows of nothing."""

    formats: tuple[WeightFormat, ...] = ()
    models: tuple[ModelSize, ...] = ()
    holders: tuple[Holder, ...] = ()
    devices: tuple[OtherDevice, ...] = ()
    max_utilization: float = MAX_UTILIZATION


@dataclass(frozen=True, slots=True)
class Change:
    """One change, or two together, after which the model fits. `cost` is in halvings, see the module."""

    text: str
    cost: float
    need_bytes: int  # after the change
    budget_bytes: int  # after the change


@dataclass(frozen=True, slots=True)
class _State:
    """A need with the memory it is held against; a step changes one or the other."""

    need: MemoryNeed
    free_bytes: int
    cost: float = 0.0
    kinds: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> int:
        return int(self.free_bytes * self.need.utilization)

    @property
    def missing_bytes(self) -> int:
        return self.need.total_bytes - self.budget_bytes

    def then(self, kind: str, need: MemoryNeed, cost: float, text: str, free_bytes: int | None = None) -> _State:
        """The state after one more step."""
        free = self.free_bytes if free_bytes is None else free_bytes
        return _State(need, free, self.cost + cost, (*self.kinds, kind), (*self.texts, text))


_Step = Callable[[_State, Options, bool], Iterator[_State]]


def cheapest_changes(
    need: MemoryNeed, free_bytes: int, options: Options | None = None, *, limit: int = 3
) -> tuple[Change, ...]:
    """The `limit` cheapest changes, cheapest first, each of which alone makes `need` fit into its share of `free_bytes`.

    One of each kind; where those are fewer than `limit`, pairs of kinds of which neither suffices alone too, then a second
    of a kind, and last a device of the size that is needed. Empty where the need fits already.
    """
    start = _State(need, free_bytes)
    if start.missing_bytes <= 0:
        return ()
    known = options or Options()
    singles = [state for step in _STEPS for state in step(start, known, True) if state.missing_bytes <= 0]
    found = _best_of_each(singles)
    if len(found) < limit:
        alone = {state.kinds[0] for state in found}
        found.extend(_best_of_each([pair for pair in _pairs(start, known) if not alone & set(pair.kinds)]))
    if len(found) < limit:  # another model or format of a kind that is named already
        found.extend(sorted((state for state in singles if state not in found), key=_order)[:1])
    if len(found) < limit:
        found.append(_larger_device(start))
    return tuple(
        Change(" and ".join(state.texts), state.cost, state.need.total_bytes, state.budget_bytes)
        for state in sorted(found, key=_order)[:limit]
    )


def describe_changes(changes: tuple[Change, ...]) -> str:
    """One line: the changes, cheapest first."""
    if len(changes) == 1:
        return changes[0].text
    return "; ".join(f"{number}) {change.text}" for number, change in enumerate(changes, 1))


def shortage_text(need: MemoryNeed, free_bytes: int, device_name: str, changes: tuple[Change, ...]) -> str:
    """What must fit line by line, what may be used, what is missing, and the changes."""
    budget = int(free_bytes * need.utilization)
    lines = " + ".join(f"{part.name} {bytes_text(part.size_bytes)}" for part in need.parts)
    return (
        f"{need.model_name} does not fit on {device_name}: {lines} = {bytes_text(need.total_bytes)}, and "
        f"{bytes_text(budget)} ({need.utilization:.0%} of {bytes_text(free_bytes)} free) may be used: "
        f"{bytes_text(need.total_bytes - budget)} are missing. What to do: {describe_changes(changes)}"
    )


def bytes_text(size: float) -> str:
    """A size for a person."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _order(state: _State) -> tuple[float, tuple[str, ...]]:
    return state.cost, state.texts


def _best_of_each(states: list[_State]) -> list[_State]:
    """The cheapest of each kind in ascending cost, so that three changes are three ways and not three models."""
    best: dict[frozenset[str], _State] = {}
    for state in sorted(states, key=_order):
        best.setdefault(frozenset(state.kinds), state)
    return list(best.values())


def _pairs(start: _State, options: Options) -> list[_State]:
    """Two steps that suffice only together: the first as far as it goes, the second as far as it must."""
    return [
        state
        for first, second in permutations(_STEPS, 2)
        for half in first(start, options, False)
        if half.missing_bytes > 0
        for state in second(half, options, True)
        if state.missing_bytes <= 0
    ]


def _raise_utilization(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    need = state.need
    wanted = (math.floor(100 * need.total_bytes / state.free_bytes) + 1) / 100 if state.free_bytes > 0 else math.inf
    share = min(wanted, options.max_utilization)
    if share <= need.utilization or (enough and wanted > share):
        return
    text = (
        f"--memory-utilization {share:.2f} instead of {need.utilization:.2f} of the {bytes_text(state.free_bytes)} free"
    )
    yield state.then("utilization", _replace(need, utilization=share), _COST_UTILIZATION, text)


def _fewer_sequences(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    need = state.need
    growing = sum(part.size_bytes for part in need.parts if "sequences" in part.grows_with)
    if growing == 0 or need.num_seqs <= 1:
        return
    left = growing - state.missing_bytes
    num_seqs = max(math.floor(need.num_seqs * left / growing), 0 if enough else 1)
    if not 1 <= num_seqs < need.num_seqs:
        return
    changed = _scaled(need, "sequences", num_seqs / need.num_seqs)
    text = (
        f"--max-num-seqs {num_seqs} instead of {need.num_seqs} "
        f"(saves {bytes_text(need.total_bytes - changed.total_bytes)})"
    )
    yield state.then("sequences", _replace(changed, num_seqs=num_seqs), math.log2(need.num_seqs / num_seqs), text)


def _shorter_context(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    need = state.need
    growing = sum(part.size_bytes for part in need.parts if "context" in part.grows_with)
    if growing == 0 or need.context_tokens <= MIN_CONTEXT_TOKENS:
        return
    left = growing - state.missing_bytes
    tokens = math.floor(need.context_tokens * left / growing) // _TOKENS_STEP * _TOKENS_STEP
    tokens = tokens if enough else max(tokens, MIN_CONTEXT_TOKENS)
    if not MIN_CONTEXT_TOKENS <= tokens < need.context_tokens:
        return
    changed = _scaled(need, "context", tokens / need.context_tokens)
    text = (
        f"--max-context {tokens} instead of {need.context_tokens} tokens "
        f"(saves {bytes_text(need.total_bytes - changed.total_bytes)})"
    )
    yield state.then("context", _replace(changed, context_tokens=tokens), math.log2(need.context_tokens / tokens), text)


def _stop_processes(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    """The fewest processes that hold enough: the largest first."""
    freed, stopped = 0, []
    for holder in sorted(options.holders, key=lambda entry: (-entry.held_bytes, entry.pid)):
        freed += holder.held_bytes
        stopped.append(holder)
        if freed * state.need.utilization >= state.missing_bytes:
            break
    if not stopped or (enough and freed * state.need.utilization < state.missing_bytes):
        return
    held = ", ".join(f"{bytes_text(one.held_bytes)} by pid {one.pid} ({one.name})" for one in stopped)
    text = f"stop what holds the device's memory: {held}"
    yield state.then("processes", state.need, _COST_STOP_PROCESS * len(stopped), text, state.free_bytes + freed)


def _smaller_format(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    need = state.need
    for entry in options.formats:
        if 0 < entry.weight_bytes < need.weight_bytes:
            share = entry.weight_bytes / need.weight_bytes
            text = f"weights in {entry.name}: {bytes_text(entry.weight_bytes)} instead of {bytes_text(need.weight_bytes)} ({entry.how})"
            yield state.then("format", _scaled(need, "weights", share), -_COST_BITS * math.log2(share), text)


def _smaller_model(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    need = state.need
    for model in options.models:
        if 0 < model.weight_bytes < need.weight_bytes:
            share = model.weight_bytes / need.weight_bytes
            changed = _scaled(need, "weights", share)
            if need.kv_token_bytes > 0 and model.kv_token_bytes > 0:
                changed = _scaled(changed, "context", model.kv_token_bytes / need.kv_token_bytes)
                changed = _replace(changed, kv_token_bytes=model.kv_token_bytes)
            text = f"a smaller model: {model.name} has {bytes_text(model.weight_bytes)} of weights instead of {bytes_text(need.weight_bytes)}"
            yield state.then("model", _replace(changed, model_name=model.name), _COST_MODEL - math.log2(share), text)


def _other_device(state: _State, options: Options, enough: bool) -> Iterator[_State]:
    for device in options.devices:
        text = f"{device.how}: {device.name} has {bytes_text(device.free_bytes)} free"
        yield state.then("other-device", state.need, _COST_OTHER_DEVICE, text, device.free_bytes)


def _larger_device(state: _State) -> _State:
    free = math.ceil(state.need.total_bytes / state.need.utilization) + 1
    return state.then("device", state.need, _COST_NEW_DEVICE, f"a device with {bytes_text(free)} free", free)


_STEPS: tuple[_Step, ...] = (
    _raise_utilization,
    _fewer_sequences,
    _shorter_context,
    _stop_processes,
    _smaller_format,
    _smaller_model,
    _other_device,
)


def _scaled(need: MemoryNeed, growth: Growth, factor: float) -> MemoryNeed:
    """Parts that grow with `growth` times `factor`, rounded up."""
    parts = tuple(
        Part(part.name, math.ceil(part.size_bytes * factor), part.grows_with) if growth in part.grows_with else part
        for part in need.parts
    )
    return _replace(need, parts=parts)
