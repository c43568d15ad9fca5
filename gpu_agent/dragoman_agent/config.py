"""Settings of the agent process. One frozen dataclass: flags, environment and config file are made from it."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.address import MAX_PORT, address_problem, is_loopback
from dragoman.limits import MAX_AGENT_ID_BYTES, MAX_ID_BYTES


def _about(help: str, *, group: str, **metadata: Any) -> dict[str, Any]:
    return {"help": help, "group": group, **metadata}


_AGENT_ID = re.compile(r"[A-Za-z0-9._-]+")
_MODEL, _DEVICE, _PLAN, _NETWORK, _LIFE = "model", "device", "planning", "network", "process"
_ON_OFF = ("on", "off")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Serves one model on one device: measures the device, plans from the measurement, generates over gRPC."""

    model: str = field(
        default="embedded",
        metadata=_about("a directory, a file, or a known name; `null` with --device null", group=_MODEL),
    )
    served_model_name: tuple[str, ...] = field(
        default=(), metadata=_about("names clients ask for; the first is shown", group=_MODEL)
    )
    chat_template: Path | None = field(
        default=None,
        metadata=_about(
            "Jinja file that lays out chats instead of the model's own template; the same for all agents of a model",
            group=_MODEL,
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=_about("number format of the computation", group=_MODEL, choices=("auto", "int8", "float32")),
    )
    max_context: int | None = field(
        default=None,
        metadata=_about(
            "longest prompt and output together; unset takes the model's own", group=_MODEL, unit="tokens", min=2
        ),
    )
    device: str = field(
        default="auto",
        metadata=_about("what to run on", group=_DEVICE, choices=("auto", "cpu", "null", "cuda", "hip", "xpu")),
    )
    memory_utilization: float | None = field(
        default=None,
        metadata=_about(
            "share of the free memory that weights and KV blocks may take", group=_DEVICE, min=0.01, max=0.99
        ),
    )
    kv_host_bytes: int | None = field(
        default=None,
        metadata=_about(
            "host memory for KV blocks that leave the device; unset lets the plan choose, 0 takes none",
            group=_DEVICE,
            unit="bytes",
            min=0,
        ),
    )
    kv_disk_dir: Path | None = field(
        default=None,
        metadata=_about(
            "directory for KV blocks that leave memory, kept over a restart; with --kv-disk-bytes, one for each agent",
            group=_DEVICE,
        ),
    )
    kv_disk_bytes: int = field(
        default=0, metadata=_about("what that directory may hold; 0 is none", group=_DEVICE, unit="bytes", min=0)
    )
    threads: int | None = field(
        default=None, metadata=_about("CPU threads; unset lets the plan choose", group=_DEVICE, min=1, max=1024)
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata=_about("sequences that run at once; unset lets the plan choose", group=_DEVICE, min=1, max=4096),
    )
    max_num_waiting: int = field(
        default=256,
        metadata=_about("requests that wait here before new ones are refused", group=_DEVICE, min=0, max=65536),
    )
    null_oracle: str = field(
        default="hash",
        metadata=_about("what the null device writes: hash, echo, alphabet, or script:FILE", group=_DEVICE),
    )
    null_speed: float = field(
        default=0.0,
        metadata=_about(
            "the null device's step times as a multiple of its step model; 0 does not wait", group=_DEVICE, min=0.0
        ),
    )
    tune: str = field(
        default="auto",
        metadata=_about(
            "times of a GPU's kernels to plan from: auto takes those kept, now takes what is missing first, off none",
            group=_PLAN,
            choices=("auto", "now", "off"),
        ),
    )
    profile: str = field(
        default="",
        metadata=_about(
            "plan from this profile instead of the measured one: a name of the library or a file", group=_PLAN
        ),
    )
    profile_force: bool = field(
        default=False, metadata=_about("take --profile even where it is of another device", group=_PLAN)
    )
    kv_dtype: str = field(
        default="auto",
        metadata=_about(
            "what a GPU keeps K and V in: auto takes fp8 only where what is asked for does not fit otherwise",
            group=_DEVICE,
            choices=("auto", "bf16", "fp8"),
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=_about(
            "a request gets the same tokens whatever else runs and wherever it was interrupted; slower on a GPU",
            group=_PLAN,
        ),
    )
    pal: str = field(
        default="on",
        metadata=_about(
            "off: one fixed configuration for all devices, nothing planned from the profile",
            group=_PLAN,
            choices=_ON_OFF,
        ),
    )
    pal_arena: str = field(
        default="on",
        metadata=_about("off: a fixed share of the memory instead of a budget", group=_PLAN, choices=_ON_OFF),
    )
    pal_launch_tuning: str = field(
        default="on",
        metadata=_about("off: fixed splits, blocks, warps, stages and graph sizes", group=_PLAN, choices=_ON_OFF),
    )
    pal_async_copy: str = field(
        default="on", metadata=_about("off: no copies beside the computation", group=_PLAN, choices=_ON_OFF)
    )
    pal_link_policy: str = field(
        default="on",
        metadata=_about("off: the link's measured rate decides nothing", group=_PLAN, choices=_ON_OFF),
    )
    agent_id: str = field(
        default="",
        metadata=_about("name of this agent in its cell; unset makes one of host and device", group=_NETWORK),
    )
    host: str = field(default="127.0.0.1", metadata=_about("address to listen on", group=_NETWORK))
    port: int = field(default=50051, metadata=_about("gRPC port; 0 takes a free one", group=_NETWORK, min=0, max=65535))
    metrics_port: int = field(
        default=9471, metadata=_about("port of /metrics; 0 takes a free one", group=_NETWORK, min=0, max=65535)
    )
    advertise: str = field(
        default="", metadata=_about("host:port that clients dial, when it is not the one bound", group=_NETWORK)
    )
    controllers: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            "controllers to register with, as host:port; dns:NAME:PORT is every address of a name", group=_NETWORK
        ),
    )
    tls_certificate: Path | None = field(
        default=None,
        metadata=_about(
            "PEM certificate of this agent, whose subject alternative name is its id; with --tls-key and --tls-ca",
            group=_NETWORK,
        ),
    )
    tls_key: Path | None = field(default=None, metadata=_about("PEM key of that certificate", group=_NETWORK))
    tls_ca: Path | None = field(
        default=None,
        metadata=_about("PEM certificates that sign controllers, agents and clients", group=_NETWORK),
    )
    open: bool = field(
        default=False, metadata=_about("take requests without a ticket; loopback addresses only", group=_NETWORK)
    )
    vllm_grpc: str = field(
        default="on",
        metadata=_about(
            "answer vLLM's gRPC interface (vllm.grpc.engine.VllmEngine) on the same port; it carries no tickets, so requests "
            "are taken with --open only",
            group=_NETWORK,
            choices=_ON_OFF,
        ),
    )
    announce: bool = field(default=False, metadata=_about("print life events as JSON lines on stdout", group=_LIFE))
    cache_dir: Path | None = field(
        default=None, metadata=_about("where models, profiles and kernels are kept", group=_LIFE)
    )
    trace_dir: Path | None = field(
        default=None,
        metadata=_about(
            "write what the engine's host and device do when, for ui.perfetto.dev, to files in this directory",
            group=_LIFE,
        ),
    )
    log_level: str = field(
        default="info",
        metadata=_about("least severe log records shown", group=_LIFE, choices=("debug", "info", "warning", "error")),
    )
    drain_notice: float = field(
        default=5.0,
        metadata=_about(
            "on SIGTERM, time between `not ready` and refusing new requests", group=_LIFE, unit="seconds", min=0.0
        ),
    )
    drain_timeout: float = field(
        default=180.0,
        metadata=_about(
            "on SIGTERM, requests still running after this are ended", group=_LIFE, unit="seconds", min=0.0
        ),
    )

    @property
    def model_spec(self) -> str:
        """What to open: `--device null` alone means the null model."""
        return "null" if self.device == "null" and self.model == "embedded" else self.model

    def resolved_agent_id(self, device_kind: str) -> str:
        """The agent's id. Agents of one host and device need an id each; the controller refuses a second one."""
        host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node()) or "localhost"
        return self.agent_id or f"{host[: MAX_AGENT_ID_BYTES - len(device_kind) - 1]}-{device_kind}"


def settings_problem(settings: AgentSettings) -> str:
    """What makes the settings unusable together; empty when nothing does."""
    if settings.open and not is_loopback(settings.host):
        return (
            f"--open takes requests from anyone who can reach {settings.host}; it is allowed on loopback addresses only: "
            "use --host 127.0.0.1, or give --controllers and leave --open out"
        )
    has_tls = None not in (settings.tls_certificate, settings.tls_key, settings.tls_ca)
    if not has_tls and not is_loopback(settings.host):
        return (
            f"--host {settings.host} can be reached from other machines, and without TLS prompts and tickets would cross the "
            "network in the clear: give --tls-certificate, --tls-key and --tls-ca, or listen on 127.0.0.1"
        )
    if not settings.open and not settings.controllers:
        return "no request could be accepted: give --controllers HOST:PORT, or --open for an agent without tickets"
    if settings.profile_force and not settings.profile:
        return "--profile-force has nothing to force: give --profile NAME_OR_FILE, or leave it out"
    if (settings.kv_disk_dir is None) is not (settings.kv_disk_bytes == 0):
        return (
            "--kv-disk-dir and --kv-disk-bytes belong together: give both for a tier of KV blocks on disk, or neither"
        )
    given = next((flag for flag, is_given in _planning_flags(settings) if is_given), None)
    if settings.device == "null" and given:
        return (
            f"{given} has no effect with --device null, whose plan is given and not made from a profile: leave it out"
        )
    for address in settings.controllers:
        host, _, port = address.removeprefix("dns:").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= MAX_PORT:
            return f"--controllers {address!r} is no host:port, nor dns:NAME:PORT for every address of a name"
    for name in settings.served_model_name:
        if not name.isprintable() or len(name.encode(errors="replace")) > MAX_ID_BYTES:
            return f"--served-model-name {name[:80]!r} must be printable and at most {MAX_ID_BYTES} bytes long"
    if settings.advertise and (problem := address_problem(settings.advertise)):
        return f"--advertise {settings.advertise!r} {problem}"
    if len(settings.agent_id) > MAX_AGENT_ID_BYTES or not _AGENT_ID.fullmatch(settings.agent_id or "default"):
        return (
            f"--agent-id {settings.agent_id[:80]!r} must be 1 to {MAX_AGENT_ID_BYTES} letters, digits, dots, dashes or "
            "underscores, as it becomes part of tickets and certificates"
        )
    return ""


def _planning_flags(settings: AgentSettings) -> list[tuple[str, bool]]:
    """What changes how a plan is made, and whether it was given."""
    return [
        ("--profile", bool(settings.profile)),
        (f"--dtype {settings.dtype}", settings.dtype != "auto"),
        ("--threads", settings.threads is not None),
        ("--memory-utilization", settings.memory_utilization is not None),
        (f"--kv-dtype {settings.kv_dtype}", settings.kv_dtype != "auto"),
        (f"--tune {settings.tune}", settings.tune != "auto"),
        ("--pal off", settings.pal == "off"),
        ("--pal-arena off", settings.pal_arena == "off"),
        ("--pal-launch-tuning off", settings.pal_launch_tuning == "off"),
        ("--pal-async-copy off", settings.pal_async_copy == "off"),
        ("--pal-link-policy off", settings.pal_link_policy == "off"),
    ]
