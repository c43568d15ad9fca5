"""What an agent does before it listens: open the model's files, choose the device, plan. No torch for the null device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dragoman_agent.config import AgentSettings
from dragoman_agent.rpc.served_model import ServedModel, served_model

if TYPE_CHECKING:
    from dragoman_agent.model.source import ModelSource
    from dragoman_agent.pal.startup import PalResult


class StartupError(Exception):
    """The agent cannot start. One line: what happened, why, what to do."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before anything listens: the model's files and the plan."""

    model: ServedModel
    pal: PalResult


def prepare(settings: AgentSettings) -> Prepared:
    """Open, choose and plan. Raises StartupError."""
    from dragoman_agent.device.base import DeviceError
    from dragoman_agent.model.errors import ModelFileError
    from dragoman_agent.pal.planner import PlanError
    from dragoman_agent.pal.profile import ProfileError
    from dragoman_agent.pal.select import NoDeviceError
    from dragoman_text import TokenizerFilesError

    try:
        return _on_null(settings) if settings.device == "null" else _on_device(settings)
    except (DeviceError, ModelFileError, PlanError, ProfileError, NoDeviceError, TokenizerFilesError) as error:
        raise StartupError(str(error)) from error


def _on_null(settings: AgentSettings) -> Prepared:
    from dragoman_agent.device.null_model import default_null_plan, open_null_model
    from dragoman_agent.pal.startup import start_on_null

    source = open_null_model(settings.model_spec)
    pal = start_on_null(default_null_plan(source, max_context_tokens=settings.max_context))
    return _prepared(source, settings, pal)


def _on_device(settings: AgentSettings) -> Prepared:
    from dragoman_agent.model.embedded import default_cache_dir
    from dragoman_agent.model.source import open_model
    from dragoman_agent.pal.planner import Limits
    from dragoman_agent.pal.startup import start_on_device

    cache_dir: Path = settings.cache_dir or default_cache_dir(os.environ)
    source = open_model(settings.model, cache_dir)
    source.check()
    limits = Limits(
        max_context_tokens=settings.max_context,
        memory_utilization=settings.memory_utilization,
        num_threads=settings.threads,
    )
    pal = start_on_device(source, settings.device, settings.dtype, limits, cache_dir)
    return _prepared(source, settings, pal)


def _prepared(source: ModelSource, settings: AgentSettings, pal: PalResult) -> Prepared:
    plan = pal.plan
    # A sequence cannot outgrow the arena, whatever the model's own context is.
    longest = min(plan.max_context_tokens, (plan.num_blocks - 1) * plan.page_size)
    return Prepared(served_model(source, settings.served_model_name, longest), pal)
