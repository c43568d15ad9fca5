"""What the engine process does: opens the device and the model, loads with progress, runs a first step, serves its socket."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.v1 import error_pb2
from dragoman_agent.device import Device, DeviceError, open_device
from dragoman_agent.device.base import LoadProgress, PreparingDevice
from dragoman_agent.device.warm_up import FIRST_STEPS
from dragoman_agent.engine.ahead import DeviceImport
from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.frames import ProtocolError
from dragoman_agent.engine.local import build_core, warm_up
from dragoman_agent.engine.loop import Connection, run
from dragoman_agent.engine.messages import Fatal, Progress, Ready
from dragoman_agent.engine.preparing import Preparing
from dragoman_agent.engine.start_times import StartTimes
from dragoman_agent.engine.trace import TraceWriter
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.plan import KV_FLOAT8
from dragoman_cli.failure import import_problem

if TYPE_CHECKING:
    from dragoman_agent.device.precompile import Compilers

logger = logging.getLogger("dragoman_agent.engine")


def open_source(spec: str, device: str, cache_dir: Path | None) -> ModelSource:
    """The model of a spec for a device. Raises ModelFileError."""
    if device == "null":
        from dragoman_agent.device.null_model import open_null_model

        return open_null_model(spec)
    if cache_dir is None:
        from dragoman_agent.model.embedded import default_cache_dir

        cache_dir = default_cache_dir(os.environ)
    return open_model(spec, cache_dir)


class _Reports:
    """Progress goes to the rpc process, and a part of the start ends with a phase of it. Owns who compiles ahead.

    Who reports the first step waits here until what it launches is there.
    """

    def __init__(
        self, connection: Connection, config: EngineConfig, times: StartTimes, library: DeviceImport | None
    ) -> None:
        self._connection, self._times = connection, times
        self._library = library if library is not None and library.kind == config.device else None
        # Scales of eight bits are found by a step.
        self._first_step = "kv" if config.plan.kv_dtype == KV_FLOAT8 else "warmup"
        self._ended = {"weights": "context", "kv": "weights", "warmup": "memory"}  # by the phase that then begins
        self.compilers: Compilers | None = None
        self.device: Device | None = None

    def __call__(self, progress: LoadProgress) -> None:
        """Of a device that loads."""
        times = self._times
        if progress.phase in self._ended:
            times.mark(self._ended.pop(progress.phase))
            if progress.phase == self._first_step:
                self._before_first_step()
        elif progress.phase == "warmup" and "timed steps" not in times.seconds:
            if progress.done == FIRST_STEPS:
                times.mark("first launches")
            elif progress.done == progress.total:
                times.mark("graphs")
        self._connection.send(Progress(progress.phase, progress.done, progress.total, progress.unit))

    def wait_for_library(self) -> None:
        """Until the device's module is imported. Raises what its import raised."""
        if self._library is not None:
            self._library.wait()

    def _before_first_step(self) -> None:
        if self._library is not None:
            self._library.wait_for_launches()
        if self.compilers is not None:
            all_compiled = self.compilers.wait()  # the first step launches what they compile
            self._times.mark("kernels")
            if isinstance(self.device, PreparingDevice):
                # A part that compiles would take seconds, and whoever asks meanwhile would wait for it.
                self.device.prepares_later = all_compiled


def _open(config: EngineConfig, times: StartTimes, report: _Reports) -> tuple[ModelSource, Device]:
    """The model and the device, with kernels being compiled ahead. Raises as `load` does."""
    model = open_source(config.model, config.device, config.cache_path)
    model.check()
    times.mark("model files")
    if config.device == "cuda":
        # For a GPU alone: these import the cost models, and the driver.
        from dragoman_agent.device.cuda_context import open_context
        from dragoman_agent.device.precompile import start_compilers

        if config.capability:
            report.compilers = start_compilers(model.config, config.plan, config.capability)
        if open_context(config.plan.device_index):  # behind the workers' start, for they take the longest
            times.moment("context")
    report.wait_for_library()
    device = open_device(
        config.device,
        index=config.plan.device_index,
        cache_dir=config.cache_path,
        null_oracle=config.null_oracle,
        null_speed=config.null_speed,
    )
    times.mark("device library")
    # What is imported stays: the collector, off until here in a process of its own, need not walk it again and again.
    gc.freeze()
    gc.enable()
    return model, device


def load(
    connection: Connection,
    config: EngineConfig,
    times: StartTimes,
    library: DeviceImport | None = None,
    trace: TraceWriter | None = None,
) -> tuple[Device, EngineCore]:
    """Device and core, ready for requests; progress goes to the rpc process. `library`: what is being imported already.

    Raises DeviceError, ModelFileError or ImportError.
    """
    report = _Reports(connection, config, times, library)
    begun = time.monotonic()
    report(LoadProgress("open", 0, 1, "steps"))
    try:
        model, device = _open(config, times, report)
        report.device = device
        try:
            device.load(model, config.plan, report)
            times.mark("timed steps")
            core = build_core(device, model, config.plan, tier_sizes=config.tier_sizes, trace=trace)
            report(LoadProgress("warmup", 0, 1, "steps"))
            first = model.config.bos_token_id
            warm_up(core, [0 if first is None else first])
            report(LoadProgress("warmup", 1, 1, "steps"))
            times.mark("first step")
        except BaseException:
            device.close()
            raise
    finally:
        if report.compilers is not None:
            report.compilers.close()
    info: dict[str, Any] = {
        "device": config.device,
        "model": model.name,
        "weight_bytes": model.total_bytes,
        **getattr(device, "info", {}),
        "prepares_later": getattr(device, "prepares_later", False),
        "load_seconds": time.monotonic() - begun,
        "start_seconds": times.seconds,
        "start_moments": times.moments,
    }
    logger.debug("start: %s", times)
    if core.exchange is not None:
        kept = core.exchange.format
        info |= {"kv_type": kept.kv_type, "kv_layout": kept.layout, "kv_block_bytes": kept.block_bytes}
    connection.send(Ready(info))
    return device, core


def serve(stream: socket.socket, config: EngineConfig, times: StartTimes, library: DeviceImport | None = None) -> int:
    """Load, then serve until told to stop or the other end is gone; the exit code."""
    connection = Connection(stream)
    trace: TraceWriter | None = None
    try:
        trace = TraceWriter(Path(config.trace_dir)) if config.trace_dir else None
        device, core = load(connection, config, times, library, trace)
    except Exception as error:  # the rim: a user gets one line, whatever it was
        return _give_up(connection, error_pb2.ERROR_REASON_DEVICE_FAULT, error)
    # What is loaded stays: the collector need not walk it again and again between steps.
    gc.collect()
    gc.freeze()
    try:
        return 0 if run(connection, core, Preparing.of(device, core)) else 1
    except ProtocolError as error:
        logger.error("the rpc process sent something unreadable: %s", error)
        connection.send(Fatal(int(error_pb2.ERROR_REASON_INTERNAL), f"unreadable command: {error}"))
        return 1
    except Exception as error:
        return _give_up(connection, error_pb2.ERROR_REASON_AGENT_LOST, error)
    finally:
        if core.tiers is not None:
            core.tiers.close()
        device.close()
        if trace is not None:
            trace.close()


def _give_up(connection: Connection, reason: int, error: Exception) -> int:
    """Say in one line why the engine ends; where it happened is for the log at debug. The exit code."""
    if isinstance(error, ImportError):
        problem = import_problem(error)
    elif isinstance(error, (DeviceError, ModelFileError, RuntimeError, MemoryError)):
        problem = str(error) or type(error).__name__
    else:
        problem = (
            f"an unexpected {type(error).__name__}: {error}; this is a fault of Dragoman, "
            "run it again with --log-level debug to see where, and report that"
        )
    logger.error("the engine ends: %s", problem)
    logger.debug("where", exc_info=error)
    connection.send(Fatal(int(reason), problem))
    return 1
