"""Planning without the device: a profile, a model's shapes, and what is to be served. Pure but for the model's headers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dragoman_agent.device.cpu_road import road_of
from dragoman_agent.model.random_source import PREFIX, RandomSource, random_model_names
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.changes import (
    Change,
    MemoryNeed,
    Options,
    Part,
    bytes_text,
    cheapest_changes,
)
from dragoman_agent.pal.decisions import Decision
from dragoman_agent.pal.limits import check_dtype
from dragoman_agent.pal.needs import known_models, needs_of
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.plan_fields import plan_fields
from dragoman_agent.pal.planner import Limits, PlanError, Switches, plan_for
from dragoman_agent.pal.predict import Prediction, predict
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.select import dtype_problem

DEFAULT_CONTEXT_TOKENS = 1024
_NOT_NEEDED = ("kv", "margin")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be served; None leaves it to the planner and predicts for a usual request."""

    context_tokens: int | None = None  # of a prompt
    concurrency: int | None = None  # requests at once
    memory_utilization: float | None = None
    dtype: str = "auto"
    deterministic: bool = False
    kv_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction, and for what."""

    context_tokens: int
    concurrency: int
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Outlook:
    """What would be served. Where it does not fit `problem` says why, and `changes` what would help, cheapest first.

    `plan` is None where there is none at all; a plan with a problem runs fewer requests at once than were wished for.
    """

    plan: Plan | None
    decisions: tuple[Decision, ...]
    forecasts: tuple[Forecast, ...]
    problem: str = ""
    changes: tuple[str, ...] = ()


def open_shapes(name: str, cache_dir: Path) -> ModelSource:
    """A model's headers: one whose shapes come along by its name, else as `open_model` finds it. Raises ModelFileError."""
    plain = name.removeprefix(PREFIX)
    return RandomSource(plain) if plain in random_model_names() else open_model(name, cache_dir)


def look_ahead(profile: Profile, model: ModelSource, wish: Wish, switches: Switches) -> Outlook:
    """Plan and predict: what an agent on that device would refuse is refused here too.

    Raises PlanError where the wish makes no sense, such as a context that the model cannot take.
    """
    known = model.config.max_context_tokens
    if wish.context_tokens is not None and wish.context_tokens > known:
        raise PlanError(f"{model.name} was made for {known} tokens of context; ask for at most that")
    check_dtype(wish.dtype, profile.device.kind, profile.device.name)
    if problem := dtype_problem(needs_of(model), profile.device.kind, profile.values):
        return Outlook(None, (), (), problem, ("another card, or the CPU beside it",))
    limits = Limits(
        wish.context_tokens,
        wish.concurrency,
        memory_utilization=wish.memory_utilization,
        deterministic=wish.deterministic,
        kv_dtype=wish.kv_dtype,
        all_at_once=True,
    )
    # Here the compiled kernels are taken as there: this machine is not the one that is planned for.
    try:
        road = road_of(model, wish.dtype, None) if profile.device.kind == "cpu" else None
    except ValueError as error:
        raise PlanError(str(error)) from None
    try:
        plan, decisions = plan_for(profile, model.config, limits, switches, road=road)
    except PlanError as error:
        if not error.changes:
            raise
        # The message ends with the changes, which are told one by one here.
        return Outlook(None, (), (), str(error).partition(" What to do:")[0], _words(error.changes))
    context = min(wish.context_tokens or DEFAULT_CONTEXT_TOKENS, plan.max_context_tokens)
    loads = dict.fromkeys(((context, 1), (context, wish.concurrency or plan.max_num_seqs)))
    forecasts = tuple(Forecast(*load, predict(plan, *load)) for load in loads)
    problem, changes = _shortage(profile, model, plan, wish)
    return Outlook(plan, tuple(decisions), forecasts, problem, changes)


def outlook_to_dict(outlook: Outlook) -> dict[str, Any]:
    """The outlook as plain JSON values, without the decisions."""
    plan = outlook.plan
    return {
        "fits": not outlook.problem,
        "problem": outlook.problem,
        "changes": list(outlook.changes),
        "digest": plan.digest().hex() if plan else "",
        "plan": {field.name: _plain(field.value, field.labels) for field in plan_fields(plan)} if plan else {},
        "memory": {line.name: line.size_bytes for line in plan.memory} if plan else {},
        "predicted": [
            {"context_tokens": entry.context_tokens, "concurrency": entry.concurrency, **asdict(entry.prediction)}
            for entry in outlook.forecasts
        ],
    }


def _plain(value: Any, labels: tuple[str, ...]) -> Any:
    if not isinstance(value, tuple):
        return value
    return dict(zip(labels, value, strict=True)) if labels else list(value)


def _shortage(profile: Profile, model: ModelSource, plan: Plan, wish: Wish) -> tuple[str, tuple[str, ...]]:
    """Whether the wished load has room in the plan's KV blocks, and what would make room."""
    context, concurrency = wish.context_tokens or 1, wish.concurrency or 1
    wanted = concurrency * -(-context // plan.page_size)
    if wanted < plan.num_blocks and context <= plan.max_context_tokens:
        return "", ()
    sizes = {line.name: line.size_bytes for line in plan.memory}
    block_bytes = sizes["kv"] // plan.num_blocks
    free = int(profile.number("memory.free"))
    used = sum(size for name, size in sizes.items() if name != "margin")
    need = MemoryNeed(
        model.name,
        (
            Part("weights", sizes["weights"], ("weights",)),
            Part("kv", (wanted + 1) * block_bytes, ("context", "sequences")),
            *(Part(name, size) for name, size in sizes.items() if name not in ("weights", *_NOT_NEEDED)),
        ),
        context,
        concurrency,
        wish.memory_utilization or used / free,
        block_bytes // plan.page_size,
    )
    problem = (
        f"{concurrency} x {context:,} tokens need {bytes_text((wanted + 1) * block_bytes)} of KV, "
        f"the plan has {bytes_text(sizes['kv'])} in {bytes_text(free)} of free memory"
    )
    formats = needs_of(model).of(profile.device.kind).formats
    changes = cheapest_changes(need, free, Options(formats, known_models()))
    return problem, _words(changes)


def _words(changes: tuple[Change, ...]) -> tuple[str, ...]:
    """What to change in the words of the wish, which calls an agent's limits by other names."""
    names = {"--max-num-seqs": "--concurrency", "--max-context": "--context"}
    texts = [change.text for change in changes]
    for flag, name in names.items():
        texts = [text.replace(flag, name) for text in texts]
    return tuple(texts)
