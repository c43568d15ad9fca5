"""What an agent does before gRPC: spawn the engine process, open the model's files, choose the device, plan.

Imports neither gRPC nor, for the null device, torch. The engine is spawned from here since a process that runs gRPC must not
fork, and first of all, so that it imports its libraries while this process plans (see `EarlyEngine`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dragoman_agent.config import AgentSettings
from dragoman_agent.engine_process import TORCH_KINDS, EngineProcess

if TYPE_CHECKING:
    from dragoman_agent.engine.config import EngineConfig
    from dragoman_agent.model.source import ModelSource
    from dragoman_agent.pal.plan import Plan
    from dragoman_agent.pal.startup import PalResult
    from dragoman_text.files import TokenizerFiles

NULL_NUM_SEQS = 256
_GONE_SECONDS = 5.0  # for a killed engine to be gone before the device is measured
# There with a driver that has a card: to look is free, to ask the driver is not.
_DRIVER_FILES = {"cuda": ("/dev/nvidiactl", "/dev/dxg"), "hip": ("/dev/kfd",)}


class StartupError(Exception):
    """The agent cannot start. One line: what happened, why, what to do."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is there before anything listens: the model's files, the plan, and the engine process on its way up."""

    source: ModelSource
    pal: PalResult
    engine: EngineProcess
    chat_template: str | None = None  # instead of the model's own

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence: one cannot outgrow the arena, whatever the model's own context is."""
        plan = self.pal.plan
        return min(plan.max_context_tokens, (plan.num_blocks - 1) * plan.page_size)


class EarlyEngine:
    """The engine process while there is no plan for it yet.

    A guess says which device's library it imports. Where that was wrong it is ended and another spawned, so that no process
    keeps a library it does not need; likewise where a measurement must not be disturbed by its imports.
    """

    def __init__(self, kind: str) -> None:
        """`kind` of device that is likely to be chosen."""
        self._kind = kind
        self._process: EngineProcess | None = EngineProcess(engine_command(kind))

    def stop(self) -> None:
        """End the process; `configure` spawns another. Safe to call twice."""
        if self._process is not None:
            self._process.kill(_GONE_SECONDS)
            self._process = None

    def configure(self, config: EngineConfig) -> EngineProcess:
        """Tell the process what it is to do; the process."""
        if self._kind != config.device and {self._kind, config.device} & set(TORCH_KINDS):
            self.stop()
        if self._process is None:
            self._process = EngineProcess(engine_command(config.device))
        self._process.configure(config.to_json())
        return self._process


@contextmanager
def prepare(settings: AgentSettings) -> Iterator[Prepared]:
    """Spawn, open, choose and plan. The engine process is killed when the block is left. Raises StartupError."""
    early = EarlyEngine(likely_kind(settings.device))
    try:
        source, pal = _plan(settings, early)
        template = None
        if settings.chat_template is not None:
            template = read_chat_template(settings.chat_template, source.tokenizer)
        engine = early.configure(engine_config(settings, pal.plan, pal.capability))
        yield Prepared(source, pal, engine, template)
    finally:
        early.stop()


def likely_kind(requested: str, exists: Callable[[str], bool] = os.path.exists) -> str:
    """The kind of device that `--device` most likely means. For "auto": what has a driver here, else the CPU."""
    if requested != "auto":
        return requested
    return next((kind for kind, paths in _DRIVER_FILES.items() if any(map(exists, paths))), "cpu")


def _plan(settings: AgentSettings, early: EarlyEngine) -> tuple[ModelSource, PalResult]:
    """Open, choose and plan. Raises StartupError."""
    from dragoman_agent.device.base import DeviceError
    from dragoman_agent.model.errors import ModelFileError
    from dragoman_agent.pal.planner import PlanError
    from dragoman_agent.pal.profile import ProfileError
    from dragoman_agent.pal.select import NoDeviceError
    from dragoman_agent.pal.tuning import TuningError
    from dragoman_text.files import TokenizerFilesError

    try:
        return _on_null(settings) if settings.device == "null" else _on_device(settings, early)
    except (
        DeviceError, ModelFileError, PlanError, ProfileError, NoDeviceError, TokenizerFilesError, TuningError,
    ) as error:  # fmt: skip
        raise StartupError(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StartupError(f"{where}{error.strerror or error}; check the path and the rights on it") from error


def read_chat_template(path: Path, files: TokenizerFiles) -> str:
    """The template of a file, for the model of `files`. Raises StartupError: unreadable, no text, not a valid template."""
    from dragoman_text import ChatTemplate, TemplateError, TemplateLimits

    limit = TemplateLimits().max_source_chars
    try:
        # No more is read than a template may have: a character has at least one byte.
        with path.open(encoding="utf-8", newline="") as file:
            source = file.read(limit + 1)
        if not source.strip():
            raise StartupError(
                f"--chat-template {path}: the file is empty; give a Jinja template, or leave the option out"
            )
        ChatTemplate(replace(files, chat_template=source))
    except OSError as error:
        raise StartupError(
            f"--chat-template {path}: cannot be read ({error.strerror or error}); check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise StartupError(
            f"--chat-template {path}: is not UTF-8 text (byte {error.start}); give a Jinja template"
        ) from None
    except TemplateError as error:
        raise StartupError(f"--chat-template {path}: {error}") from None
    return source


def engine_command(kind: str) -> list[str]:
    """The engine process' command line, all but its socket. `kind`: of the device whose library it imports at once."""
    # -P: the working directory is not searched for modules.
    return [sys.executable, "-P", "-m", "dragoman_agent.engine.process", "--import-device", kind]


def engine_config(settings: AgentSettings, plan: Plan, capability: str = "") -> EngineConfig:
    """What the engine process is to do. `capability`: of the GPU, for which it compiles ahead."""
    from dragoman_agent.engine.config import EngineConfig

    return EngineConfig(
        device=plan.device_kind,
        model=settings.model_spec,
        plan=plan,
        cache_dir=str(settings.cache_dir or ""),
        null_oracle=settings.null_oracle,
        null_speed=1.0 if settings.null_speed > 0 else 0.0,  # the plan's step model has it already
        log_level=settings.log_level,
        kv_disk_dir=str(settings.kv_disk_dir.absolute()) if settings.kv_disk_dir else "",
        trace_dir=str(settings.trace_dir.absolute()) if settings.trace_dir else "",
        capability=capability,
    )


def _on_null(settings: AgentSettings) -> tuple[ModelSource, PalResult]:
    from dragoman_agent.device.null_model import default_null_plan, open_null_model
    from dragoman_agent.pal.cpu_facts import free_host_bytes
    from dragoman_agent.pal.host import this_host
    from dragoman_agent.pal.limits import Limits
    from dragoman_agent.pal.planner_tiers import plan_tiers
    from dragoman_agent.pal.startup import start_on_null

    source = open_null_model(settings.model_spec)
    plan = default_null_plan(
        source,
        max_context_tokens=settings.max_context,
        max_num_seqs=settings.max_num_seqs or NULL_NUM_SEQS,
        max_num_waiting=settings.max_num_waiting,
    )
    arena_bytes = plan.memory[0].size_bytes
    limits = Limits(
        kv_host_bytes=settings.kv_host_bytes,
        kv_disk_bytes=settings.kv_disk_bytes,
        host_free_bytes=free_host_bytes(this_host()),
    )
    tiers = plan_tiers(limits, arena_bytes // plan.num_blocks, arena_bytes, "", offload=False)
    plan = replace(plan, kv_host_bytes=tiers.host_bytes, kv_disk_bytes=tiers.disk_bytes)
    if settings.null_speed > 0:
        # What the controller is told must be how long steps take, else every quote of a cell of tests is wrong.
        plan = replace(plan, step_model=plan.step_model.slower(settings.null_speed))
    return source, start_on_null(replace(plan, deterministic=settings.deterministic))


def _on_device(settings: AgentSettings, early: EarlyEngine) -> tuple[ModelSource, PalResult]:
    from dragoman_agent.model.embedded import default_cache_dir
    from dragoman_agent.model.source import open_model
    from dragoman_agent.pal.cpu_facts import free_host_bytes
    from dragoman_agent.pal.host import this_host
    from dragoman_agent.pal.planner import Limits
    from dragoman_agent.pal.startup import start_on_device
    from dragoman_agent.pal.switches import Switches
    from dragoman_agent.pal.tuned import Tuning

    cache_dir: Path = settings.cache_dir or default_cache_dir(os.environ)
    source = open_model(settings.model, cache_dir)
    source.check()
    limits = Limits(
        max_context_tokens=settings.max_context,
        max_num_seqs=settings.max_num_seqs,
        max_num_waiting=settings.max_num_waiting,
        memory_utilization=settings.memory_utilization,
        num_threads=settings.threads,
        deterministic=settings.deterministic,
        kv_dtype=settings.kv_dtype,
        kv_host_bytes=settings.kv_host_bytes,
        kv_disk_bytes=settings.kv_disk_bytes,
        host_free_bytes=free_host_bytes(this_host()),
    )
    switches = Switches.from_words(
        settings.pal,
        arena=settings.pal_arena,
        launch_tuning=settings.pal_launch_tuning,
        async_copy=settings.pal_async_copy,
        link_policy=settings.pal_link_policy,
    )
    pal = start_on_device(
        source, settings.device, settings.dtype, limits, cache_dir,
        switches=switches, profile=settings.profile, profile_force=settings.profile_force,
        tuning=cast(Tuning, settings.tune), before_measuring=early.stop,
    )  # fmt: skip
    return source, pal
