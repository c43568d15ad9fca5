"""Settings of the gateway process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Dragoman gateway: serves the OpenAI API over HTTP for the agents of one controller."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on", "group": "network"})
    port: int = field(
        default=8000, metadata={"help": "Port to listen on, 0 picks one", "min": 0, "max": 65535, "group": "network"}
    )
    controller: str = field(
        default="127.0.0.1:50050",
        metadata={"help": "Controller's gRPC address; several of one cell with commas", "group": "network"},
    )
    tls_certificate: Path | None = field(
        default=None,
        metadata={"help": "PEM certificate shown to controllers and agents; with --tls-key and --tls-ca",
                  "group": "network"},
    )  # fmt: skip
    tls_key: Path | None = field(default=None, metadata={"help": "PEM key of that certificate", "group": "network"})
    tls_ca: Path | None = field(
        default=None, metadata={"help": "PEM certificates that sign controllers and agents", "group": "network"}
    )
    api_key: str = field(
        default="", metadata={"help": "Key that clients must send; prefer the variable or the file", "group": "access"}
    )
    api_key_file: Path | None = field(
        default=None,
        metadata={
            "help": "File with one key a line, and after it the tenant it is for, if it is for one",
            "group": "access",
        },
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Further names for the one served model; * accepts any name", "group": "models"},
    )
    any_model: bool = field(
        default=False, metadata={"help": "Accept any model name, as --served-model-name '*'", "group": "models"}
    )
    strict_params: bool = field(
        default=False, metadata={"help": "Refuse unknown request fields instead of ignoring them", "group": "requests"}
    )
    lenient_stream_options: bool = field(
        default=False, metadata={"help": "Accept stream_options without stream", "group": "requests"}
    )
    max_body: int = field(
        default=16 << 20, metadata={"help": "Largest request body", "unit": "bytes", "min": 1024, "group": "requests"}
    )
    body_timeout: float = field(
        default=30.0,
        metadata={"help": "Longest time a body may take to arrive", "unit": "seconds", "min": 0.1, "group": "requests"},
    )
    max_prompts: int = field(
        default=1024, metadata={"help": "Most prompts in one completions request", "min": 1, "group": "requests"}
    )
    max_queue_wait: float = field(
        default=0.0,
        metadata={"help": "Longest wait for an agent; 0 takes the policy's", "unit": "seconds", "min": 0.0,
                  "group": "requests"},
    )  # fmt: skip
    ping_interval: float = field(
        default=15.0,
        metadata={"help": "Comment ping on a silent stream after this; 0 is off", "unit": "seconds", "min": 0.0,
                  "group": "connections"},
    )  # fmt: skip
    keep_alive: float = field(
        default=120.0,
        metadata={"help": "How long an idle connection stays open", "unit": "seconds", "min": 0.1,
                  "group": "connections"},
    )  # fmt: skip
    header_timeout: float = field(
        default=30.0,
        metadata={"help": "Longest time a request's headers may take", "unit": "seconds", "min": 0.1,
                  "group": "connections"},
    )  # fmt: skip
    write_timeout: float = field(
        default=75.0,
        metadata={"help": "A reader that takes nothing for this long is disconnected", "unit": "seconds", "min": 0.1,
                  "group": "connections"},
    )  # fmt: skip
    credit_tokens: int = field(
        default=256,
        metadata={"help": "Tokens a stream may be ahead of its reader", "unit": "tokens", "min": 1,
                  "group": "connections"},
    )  # fmt: skip
    resume_timeout: float = field(
        default=20.0,
        metadata={
            "help": "How long a stream whose agent was lost looks for another one",
            "unit": "seconds",
            "min": 0.0,
            "group": "connections",
        },
    )
    drain_timeout: float = field(
        default=180.0,
        metadata={"help": "How long SIGTERM waits for running requests", "unit": "seconds", "min": 0.0,
                  "group": "process"},
    )  # fmt: skip
    log_level: str = field(
        default="info",
        metadata={"help": "Least severity logged", "choices": ("debug", "info", "warning", "error"),
                  "group": "process"},
    )  # fmt: skip
    announce: bool = field(
        default=False, metadata={"help": "Print one JSON line on stdout when serving", "group": "process"}
    )

    @property
    def accepts_any_model(self) -> bool:
        """Whether every model name is taken for the one served model."""
        return self.any_model or "*" in self.served_model_name
