"""What `plan` and `explain` share: a profile, a model and switches from the words of a command line, planned offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman_cli.config import did_you_mean
from dragoman_cli.failure import Failure, require_extras
from dragoman_cli.values import read_value

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource
    from dragoman_agent.pal.forced import NamedProfile
    from dragoman_agent.pal.offline import Outlook
    from dragoman_agent.pal.switches import Switches


@dataclass(frozen=True, slots=True)
class Request:
    """The command line as it was typed; empty or None where nothing was."""

    profile: str
    model: str
    context: str = ""
    concurrency: int | None = None
    memory_utilization: float | None = None
    dtype: str = "auto"
    switches: Mapping[str, str] | None = None  # "pal" and its parts, each "on" or "off"
    cache_dir: Path | None = None
    deterministic: bool = False
    kv_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class Planned:
    """What came of it."""

    named: NamedProfile
    model: ModelSource
    outlook: Outlook

    def to_message(self) -> Any:
        """The plan as a running agent would tell it, a GetPlanResponse."""
        from dragoman.v1 import hardware_service_pb2
        from dragoman_agent.pal.decisions import Decision, DecisionLog
        from dragoman_agent.pal.forced import describe
        from dragoman_agent.pal.messages import decision_to_proto, plan_to_proto

        log = DecisionLog()
        why = f"asked for with --profile: {self.named.origin}; nothing was measured here"
        log.record(Decision("profile", describe(self.named.profile), why))
        for decision in self.outlook.decisions:
            log.record(decision)
        response = hardware_service_pb2.GetPlanResponse(decisions=map(decision_to_proto, log.all()))
        if self.outlook.plan is not None:
            ids = {decision.subject: decision.decision_id for decision in log.all()}
            response.plan.CopyFrom(plan_to_proto(self.outlook.plan, ids))
        return response


def plan_offline(request: Request, purpose: str) -> Planned:
    """Plan without a device. Raises Failure: an unknown name, a damaged file, a wish that makes no sense."""
    require_extras("agent", purpose=purpose, unused=("torch",))
    from dragoman_agent.model.errors import ModelFileError
    from dragoman_agent.pal.limits import PlanError
    from dragoman_agent.pal.offline import Wish, look_ahead
    from dragoman_agent.pal.profile import ProfileError

    context = _context(request.context)
    switches = _switches(request.switches or {})
    wish = Wish(
        context, request.concurrency, request.memory_utilization, request.dtype, request.deterministic, request.kv_dtype
    )
    try:
        named = _profile(request)
        model = _model(request)
        return Planned(named, model, look_ahead(named.profile, model, wish, switches))
    except (ProfileError, ModelFileError, PlanError) as error:
        raise Failure(f"{purpose} cannot plan this", str(error)) from None


def _profile(request: Request) -> NamedProfile:
    from dragoman_agent.pal.forced import NamedProfile, find_profile

    if request.profile:
        return find_profile(request.profile)
    # Nothing named: this machine's own device, measured once and then read from the cache.
    from dragoman_agent.model.embedded import default_cache_dir
    from dragoman_agent.pal.attributes import take_inventory
    from dragoman_agent.pal.probe import profile_device
    from dragoman_agent.pal.select import Needs, NoDeviceError, choose_device

    try:
        chosen = choose_device(take_inventory(), "auto", Needs("any model", 0, 0)).chosen.device
    except NoDeviceError as error:
        raise Failure("there is no device here to plan for", str(error), "name a profile with --profile") from None
    profile, _ = profile_device(chosen, request.cache_dir or default_cache_dir(os.environ))
    return NamedProfile(profile, f"this machine's {profile.device.name}")


def _model(request: Request) -> ModelSource:
    from dragoman_agent.model.embedded import KNOWN_MODELS, default_cache_dir
    from dragoman_agent.model.random_source import PREFIX, random_model_names
    from dragoman_agent.pal.offline import open_shapes

    names = [*random_model_names(), *KNOWN_MODELS]
    plain = request.model.removeprefix(PREFIX)
    if plain.lower() not in names and "/" not in request.model and not os.path.exists(request.model):
        raise Failure(
            f"there is no model {request.model!r}{did_you_mean(plain, names)}",
            "it is neither a name nor a file or directory here",
            f"give a path, or one of: {', '.join(names)}",
        )
    return open_shapes(plain.lower() if plain.lower() in names else request.model, _cache(request, default_cache_dir))


def _cache(request: Request, default_cache_dir: Any) -> Path:
    return request.cache_dir or Path(default_cache_dir(os.environ))


def _context(text: str) -> int | None:
    if not text:
        return None
    try:
        return int(read_value(int, text, {"unit": "tokens", "min": 2}))
    except ValueError as error:
        raise Failure(f"--context: {error}", exit_code=2) from None


def _switches(words: Mapping[str, str]) -> Switches:
    from dragoman_agent.pal.switches import Switches

    for name, word in words.items():
        if word not in ("on", "off"):
            flag = "--pal" if name == "pal" else f"--pal-{name.replace('_', '-')}"
            raise Failure(f"{flag}: {word!r} is not one of on, off", exit_code=2)
    return Switches.from_words(**words)
