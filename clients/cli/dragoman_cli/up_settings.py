"""Settings of `dragoman up`, and the arguments that each of its processes gets from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _about(help: str, group: str, **metadata: Any) -> dict[str, Any]:
    return {"help": help, "group": group, **metadata}


_COMMON, _PLAN, _PORTS, _OTHER = "most used", "planning", "network", "other"
_ON_OFF = ("on", "off")


@dataclass(frozen=True, slots=True)
class UpSettings:
    """Starts controller, agent and gateway on this machine and serves a model. Ctrl-C stops all three.

    Settings that are not here go into the sections [agent], [controller] and [gateway] of the --config file.
    """

    model: str = field(default="embedded", metadata=_about("a directory, a file, or a known name", _COMMON))
    device: str = field(
        default="auto",
        metadata=_about("what to run on", _COMMON, choices=("auto", "cpu", "cuda", "hip", "xpu", "null")),
    )
    port: int = field(default=8000, metadata=_about("HTTP port; 0 takes a free one", _COMMON, min=0, max=65535))
    max_context: int | None = field(
        default=None, metadata=_about("longest prompt and output together", _COMMON, unit="tokens", min=2)
    )
    served_model_name: tuple[str, ...] = field(default=(), metadata=_about("names clients ask for", _COMMON))
    chat_template: Path | None = field(
        default=None, metadata=_about("Jinja file that lays out chats instead of the model's own template", _COMMON)
    )
    threads: int | None = field(default=None, metadata=_about("CPU threads", _COMMON, min=1, max=1024))
    dtype: str = field(
        default="auto",
        metadata=_about("number format of the computation", _COMMON, choices=("auto", "int8", "float32")),
    )
    memory_utilization: float | None = field(
        default=None, metadata=_about("share of the free memory to use", _COMMON, min=0.01, max=0.99)
    )
    kv_host_bytes: int | None = field(
        default=None, metadata=_about("host memory for KV that leaves the device", _OTHER, unit="bytes", min=0)
    )
    kv_disk_dir: Path | None = field(
        default=None, metadata=_about("directory for KV that leaves memory, with --kv-disk-bytes", _OTHER)
    )
    kv_disk_bytes: int = field(default=0, metadata=_about("what that directory may hold", _OTHER, unit="bytes", min=0))
    json_summary: bool = field(
        default=False, metadata=_about("print the ready summary as one line of JSON on stdout", _COMMON)
    )
    tune: str | None = field(
        default=None,
        metadata=_about(
            "times of a GPU's kernels to plan from: auto takes those kept, now takes what is missing first, off none",
            _PLAN,
            choices=("auto", "now", "off"),
        ),
    )
    profile: str | None = field(
        default=None,
        metadata=_about("plan from this profile instead of the measured one: a name of the library or a file", _PLAN),
    )
    profile_force: bool = field(
        default=False, metadata=_about("take --profile even where it is of another device", _PLAN)
    )
    kv_dtype: str = field(
        default="auto",
        metadata=_about("what a GPU keeps K and V in", _PLAN, choices=("auto", "bf16", "fp8")),
    )
    deterministic: bool = field(
        default=False,
        metadata=_about("a request gets the same tokens whatever else runs; slower on a GPU", _PLAN),
    )
    pal: str = field(
        default="on", metadata=_about("off: one fixed configuration for all devices", _PLAN, choices=_ON_OFF)
    )
    pal_arena: str = field(
        default="on", metadata=_about("off: a fixed share of the memory instead of a budget", _PLAN, choices=_ON_OFF)
    )
    pal_launch_tuning: str = field(
        default="on",
        metadata=_about("off: fixed splits, blocks, warps, stages and graph sizes", _PLAN, choices=_ON_OFF),
    )
    pal_async_copy: str = field(
        default="on", metadata=_about("off: no copies beside the computation", _PLAN, choices=_ON_OFF)
    )
    pal_link_policy: str = field(
        default="on", metadata=_about("off: the link's measured rate decides nothing", _PLAN, choices=_ON_OFF)
    )
    host: str = field(default="127.0.0.1", metadata=_about("address the HTTP port listens on", _PORTS))
    controller_port: int = field(default=50050, metadata=_about("controller's gRPC port", _PORTS, min=0, max=65535))
    agent_port: int = field(default=50051, metadata=_about("agent's gRPC port", _PORTS, min=0, max=65535))
    controller_metrics_port: int = field(
        default=9470, metadata=_about("port of the controller's /metrics", _PORTS, min=0, max=65535)
    )
    agent_metrics_port: int = field(
        default=9471, metadata=_about("port of the agent's /metrics", _PORTS, min=0, max=65535)
    )
    cache_dir: Path | None = field(default=None, metadata=_about("where models and profiles are kept", _OTHER))
    null_oracle: str | None = field(default=None, metadata=_about("what the null device writes", _OTHER))
    null_speed: float | None = field(default=None, metadata=_about("pace of the null device", _OTHER, min=0.0))
    trace_dir: Path | None = field(
        default=None, metadata=_about("write a trace of the engine's steps to files in this directory", _OTHER)
    )
    log_level: str = field(
        default="warning",
        metadata=_about("least severe log records shown", _OTHER, choices=("debug", "info", "warning", "error")),
    )


# Settings that go to the agent when they were given; otherwise its own section and defaults hold.
_AGENT_OPTIONS = (
    "model", "device", "max_context", "served_model_name", "chat_template", "threads", "dtype", "memory_utilization", "cache_dir",
    "null_oracle", "null_speed", "tune", "profile", "profile_force", "kv_dtype", "deterministic", "pal", "pal_arena", "pal_launch_tuning", "pal_async_copy",
    "pal_link_policy", "trace_dir", "kv_host_bytes", "kv_disk_dir", "kv_disk_bytes",
)  # fmt: skip
# The ports of a run, and what each is for.
PORTS = {
    "port": "HTTP",
    "controller_port": "the controller",
    "agent_port": "the agent",
    "controller_metrics_port": "the controller's metrics",
    "agent_metrics_port": "the agent's metrics",
}


def controller_arguments(settings: UpSettings) -> list[str]:
    """For dragoman-controller."""
    return [
        *("--host", "127.0.0.1", "--port", str(settings.controller_port)),
        *("--metrics-port", str(settings.controller_metrics_port), "--log-level", settings.log_level),
    ]


def agent_arguments(settings: UpSettings, origins: Mapping[str, str], controller: str) -> list[str]:
    """For dragoman-agent."""
    arguments = [
        *("--host", "127.0.0.1", "--port", str(settings.agent_port), "--controllers", controller, "--no-open"),
        *("--metrics-port", str(settings.agent_metrics_port), "--log-level", settings.log_level),
    ]
    for name in _AGENT_OPTIONS:
        value = getattr(settings, name)
        if origins[name] == "default" or value is None:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        else:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            arguments.append(f"--{name.replace('_', '-')}={text}")
    return arguments


def gateway_arguments(settings: UpSettings, controller: str) -> list[str]:
    """For dragoman-gateway."""
    return [
        *("--host", settings.host, "--port", str(settings.port), "--controller", controller),
        *("--log-level", settings.log_level),
    ]
