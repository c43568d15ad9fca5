"""What a simulated agent is: its step model and its limits. From a JSON file, or a made-up fleet of unequal agents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from dragoman.step_model import StepModel
from dragoman_controller.steps import StepTable

MAX_NUM_AGENTS = 100_000
_INTEGERS = (
    "max_context_tokens", "max_running_requests", "max_waiting_requests", "max_batch_tokens", "company_tokens", "kv_tokens",
)  # fmt: skip
_MAY_BE_ZERO = ("max_waiting_requests", "company_tokens")
_STEP_MODEL = (
    "batch_sizes", "context_tokens", "decode_seconds", "prefill_tokens_per_second", "prefill_base_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """One kind of agent. `kv_tokens`: KV slots of its arena; `max_batch_tokens`: tokens of one step, its prefill chunk;
    `company_tokens`: of one in which streams decode, 0 for as many.
    """

    name: str
    steps: StepTable
    max_context_tokens: int = 8192
    max_running_requests: int = 64
    max_waiting_requests: int = 64
    max_batch_tokens: int = 4096
    kv_tokens: int = 262_144
    page_tokens: int = 16
    company_tokens: int = 0

    @property
    def num_slots(self) -> int:
        """Requests it takes at once, running or waiting."""
        return self.max_running_requests + self.max_waiting_requests

    def full_batch(self, mean_context: float) -> int:
        """Requests of this mean context that it decodes at once, by rows and by KV slots."""
        return max(min(self.max_running_requests, int(self.kv_tokens // max(mean_context, 1.0))), 1)

    def prefill_token_seconds(self) -> float:
        """Time of one prompt token where many are computed together."""
        return self.steps.seconds_per_prompt_token

    def decode_token_seconds(self, mean_context: float) -> float:
        """Time of one output token's share of a step of a full batch."""
        batch = self.full_batch(mean_context)
        return self.steps.row(batch).at(mean_context) / batch

    def requests_per_second(self, prompt_tokens: float, output_tokens: float) -> float:
        """What it ends in a second of such requests when it is always full."""
        decode = output_tokens * self.decode_token_seconds(prompt_tokens + output_tokens / 2)
        return 1.0 / (prompt_tokens * self.prefill_token_seconds() + decode)


def standard_profile() -> AgentProfile:
    """A middling device with a model of some eight billion parameters: the middle of a made-up fleet."""
    batches, contexts = (1, 8, 32, 128), (0, 2048, 8192)
    base = (0.012, 0.0125, 0.0145, 0.022)
    grid = tuple(
        step + batch * context * 1.2e-8 for batch, step in zip(batches, base, strict=True) for context in contexts
    )
    return AgentProfile("standard", StepTable(StepModel(batches, contexts, grid, 12_000.0, 0.015)))


def unequal_fleet(num_agents: int, spread: float, seed: int, base: AgentProfile | None = None) -> list[AgentProfile]:
    """Agents whose speeds lie up to a factor of `spread` apart: decode, prefill and memory each drawn log-uniformly.

    A device can be quick at one and slow at another, as real ones are. Numbers are drawn from 16 kinds a quantity, so that
    step tables are shared and ties occur.
    """
    base, rng = base or standard_profile(), Random(f"fleet {seed}")
    kinds = [spread ** ((kind + 0.5) / 16 - 0.5) for kind in range(16)]
    tables: dict[tuple[float, float], StepTable] = {}
    fleet = []
    for _ in range(num_agents):
        decode, prefill, memory = rng.choice(kinds), rng.choice(kinds), rng.choice(kinds)
        if (decode, prefill) not in tables:
            tables[decode, prefill] = StepTable(_scaled(base.steps.model, decode, prefill))
        fleet.append(
            replace(
                base,
                name=f"decode x{decode:.2f} prefill x{prefill:.2f} memory x{memory:.2f}",
                steps=tables[decode, prefill],
                kv_tokens=max(int(base.kv_tokens * memory), base.max_context_tokens),
                max_running_requests=max(int(base.max_running_requests * memory), 4),
            )
        )
    return fleet


def _scaled(model: StepModel, decode: float, prefill: float) -> StepModel:
    """A model of other speed; over 1 is quicker."""
    return StepModel(
        model.batch_sizes,
        model.context_tokens,
        tuple(seconds / decode for seconds in model.decode_seconds_grid),
        model.prefill_tokens_per_second * prefill,
        model.prefill_base_seconds / prefill,
    )


def profile_from_dict(fields: Any, where: str) -> AgentProfile:
    """The profile of a JSON object; see `read_fleet`. Raises ValueError that names `where` and the key."""
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a profile is an object, not {fields!r}")
    known = {"name", "step_model", "page_tokens", *_INTEGERS}
    for key in fields:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}, known are {', '.join(sorted(known))}")
    steps = fields.get("step_model")
    if not isinstance(steps, dict) or set(steps) != set(_STEP_MODEL):
        raise ValueError(f"{where}: step_model must be an object with the keys {', '.join(_STEP_MODEL)}")
    values: dict[str, int] = {}
    for key in (*_INTEGERS, "page_tokens"):
        if key in fields:
            value = fields[key]
            least = 0 if key in _MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{where}: {key} is {value!r}, must be a whole number, {least} or more")
            values[key] = value
    profile = AgentProfile(str(fields.get("name", where)), StepTable(_step_model(steps, where)), **values)
    if profile.kv_tokens < profile.max_context_tokens:
        raise ValueError(
            f"{where}: kv_tokens is {profile.kv_tokens}, below max_context_tokens {profile.max_context_tokens}: "
            "a request of full length would not fit"
        )
    if profile.company_tokens > profile.max_batch_tokens:
        raise ValueError(
            f"{where}: company_tokens is {profile.company_tokens}, over max_batch_tokens {profile.max_batch_tokens}: "
            "a step in which streams decode has no more tokens than any; leave it out for as many"
        )
    return profile


def _step_model(steps: dict[str, Any], where: str) -> StepModel:
    try:
        model = StepModel(
            tuple(int(size) for size in steps["batch_sizes"]),
            tuple(int(size) for size in steps["context_tokens"]),
            tuple(float(seconds) for seconds in steps["decode_seconds"]),
            float(steps["prefill_tokens_per_second"]),
            float(steps["prefill_base_seconds"]),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    numbers = (*model.decode_seconds_grid, model.prefill_tokens_per_second, model.prefill_base_seconds)
    if not all(math.isfinite(number) for number in numbers) or min(model.decode_seconds_grid) <= 0:
        raise ValueError(f"{where}: step_model must hold finite times over 0")
    return model


def profile_to_dict(profile: AgentProfile) -> dict[str, Any]:
    """What `profile_from_dict` reads."""
    model = profile.steps.model
    return {
        "name": profile.name,
        **{key: getattr(profile, key) for key in (*_INTEGERS, "page_tokens")},
        "step_model": {
            "batch_sizes": list(model.batch_sizes),
            "context_tokens": list(model.context_tokens),
            "decode_seconds": list(model.decode_seconds_grid),
            "prefill_tokens_per_second": model.prefill_tokens_per_second,
            "prefill_base_seconds": model.prefill_base_seconds,
        },
    }


def read_profile(path: Path) -> AgentProfile:
    """The profile in a JSON file. Raises OSError, or ValueError that names file and key."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return profile_from_dict(fields, str(path))


def check_fleet(fleet: Sequence[AgentProfile]) -> None:
    """Raises ValueError for a fleet that cannot be simulated."""
    if not 1 <= len(fleet) <= MAX_NUM_AGENTS:
        raise ValueError(f"{len(fleet)} agents: a fleet has 1 to {MAX_NUM_AGENTS}")


def capacity(fleet: Iterable[AgentProfile], prompt_tokens: float, output_tokens: float) -> float:
    """Requests of this mean size that the fleet ends in a second."""
    return sum(profile.requests_per_second(prompt_tokens, output_tokens) for profile in fleet)
