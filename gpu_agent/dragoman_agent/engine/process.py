"""The engine process: opens the device and the model, loads with progress, runs a first step, then serves its socket.

Started by the rpc process as `python -m dragoman_agent.engine.process --socket PATH --config JSON`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from dragoman.v1 import error_pb2
from dragoman_agent.device import Device, DeviceError, open_device
from dragoman_agent.device.base import LoadProgress
from dragoman_agent.engine.config import EngineConfig
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, warm_up
from dragoman_agent.engine.loop import Connection, run
from dragoman_agent.engine.messages import Fatal, Progress, ProtocolError, Ready
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import ModelSource, open_model

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


def load(connection: Connection, config: EngineConfig) -> tuple[Device, EngineCore]:
    """Device and core, ready for requests; progress goes to the rpc process. Raises DeviceError or ModelFileError."""

    def report(progress: LoadProgress) -> None:
        connection.send(Progress(progress.phase, progress.done, progress.total, progress.unit))

    begun = time.monotonic()
    report(LoadProgress("open", 0, 1, "steps"))
    model = open_source(config.model, config.device, config.cache_path)
    model.check()
    device = open_device(
        config.device,
        index=config.plan.device_index,
        cache_dir=config.cache_path,
        null_oracle=config.null_oracle,
        null_speed=config.null_speed,
    )
    try:
        device.load(model, config.plan, report)
        core = build_core(device, model, config.plan)
        report(LoadProgress("warmup", 0, 1, "steps"))
        first = model.config.bos_token_id
        warm_up(core, [0 if first is None else first])
        report(LoadProgress("warmup", 1, 1, "steps"))
    except BaseException:
        device.close()
        raise
    info: dict[str, Any] = {
        "device": config.device,
        "model": model.name,
        "weight_bytes": model.total_bytes,
        **getattr(device, "info", {}),
        "load_seconds": time.monotonic() - begun,
    }
    connection.send(Ready(info))
    return device, core


def serve(stream: socket.socket, config: EngineConfig) -> int:
    """Load, then serve until told to stop or the other end is gone; the exit code."""
    connection = Connection(stream)
    try:
        device, core = load(connection, config)
    except (DeviceError, ModelFileError, RuntimeError, MemoryError) as error:
        logger.error("the engine cannot start: %s", error)
        connection.send(Fatal(int(error_pb2.ERROR_REASON_DEVICE_FAULT), str(error) or type(error).__name__))
        return 1
    # What is loaded stays: the collector need not walk it again and again between steps.
    gc.collect()
    gc.freeze()
    try:
        return 0 if run(connection, core) else 1
    except ProtocolError as error:
        logger.error("the rpc process sent something unreadable: %s", error)
        connection.send(Fatal(int(error_pb2.ERROR_REASON_INTERNAL), f"unreadable command: {error}"))
        return 1
    finally:
        device.close()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="dragoman-engine", description="Started by dragoman-agent; not by hand.")
    parser.add_argument("--socket", required=True, help="Unix socket the rpc process listens on")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args(argv)
    try:
        config = EngineConfig.from_json(arguments.config)
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Signals reach the rpc process, which ends the streams and then sends Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        try:
            stream.connect(arguments.socket)
        except OSError as error:
            parser.error(f"--socket {arguments.socket}: cannot connect ({error.strerror or error})")
        return serve(stream, config)


if __name__ == "__main__":
    sys.exit(main())
