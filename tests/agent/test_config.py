from __future__ import annotations

from pathlib import Path

import pytest

from dragoman_agent.config import AgentSettings, settings_problem
from dragoman_cli.config import parse


def settings(*flags: str, environ: dict[str, str] | None = None) -> AgentSettings:
    return parse(AgentSettings, "dragoman-agent", list(flags), environ or {})


def test_defaults() -> None:
    made = settings()
    assert (made.model, made.device, made.host, made.port, made.metrics_port) == (
        "embedded",
        "auto",
        "127.0.0.1",
        50051,
        9471,
    )
    assert not made.open and not made.controllers


def test_flag_comes_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('[agent]\nport = 1\nmetrics_port = 2\nagent_id = "from-file"\n')
    environ = {"DRAGOMAN_PORT": "3", "DRAGOMAN_METRICS_PORT": "4"}
    made = settings("--config", str(file), "--port", "5", environ=environ)
    assert (made.port, made.metrics_port, made.agent_id) == (5, 4, "from-file")


def test_null_device_means_the_null_model() -> None:
    assert settings("--device", "null").model_spec == "null"
    assert settings("--device", "null", "--model", "null:two").model_spec == "null:two"
    assert settings().model_spec == "embedded"


def test_agent_id_is_host_and_device_and_fits_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "Büro PC " + "x" * 80)
    made = settings().resolved_agent_id("cpu")
    assert made.startswith("B-ro-PC-") and made.endswith("-cpu") and len(made) == 63
    monkeypatch.setattr("platform.node", lambda: "")
    assert settings().resolved_agent_id("null") == "localhost-null"
    assert settings("--agent-id", "mine").resolved_agent_id("cpu") == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--controllers"),
        (("--open", "--host", "0.0.0.0"), "loopback"),
        (("--open", "--host", "example.org"), "loopback"),
        (("--open", "--agent-id", "a b"), "--agent-id"),
        (("--open", "--agent-id", "x" * 64), "--agent-id"),
        (("--open", "--profile-force"), "--profile NAME_OR_FILE"),
        (("--open", "--kv-disk-dir", "/kv"), "belong together"),
        (("--open", "--kv-disk-bytes", "5"), "belong together"),
        (("--open", "--device", "null", "--profile", "l4"), "--profile has no effect with --device null"),
        (("--open", "--device", "null", "--kv-dtype", "fp8"), "--kv-dtype fp8 has no effect with --device null"),
        (("--open", "--device", "null", "--pal", "off"), "--pal off has no effect"),
        (("--open", "--device", "null", "--threads", "2"), "--threads has no effect with --device null"),
        (("--open", "--device", "null", "--dtype", "int8"), "--dtype int8 has no effect"),
        (("--open", "--device", "null", "--memory-utilization", "0.5"), "--memory-utilization has no effect"),
        (("--open", "--device", "null", "--deterministic"), ""),
        (("--open", "--threads", "2", "--dtype", "int8", "--memory-utilization", "0.5"), ""),
        (("--open", "--served-model-name", "a," + "x" * 129), "--served-model-name 'xxx"),
        (("--open", "--served-model-name", "ü" * 65), "at most 128 bytes long"),
        (("--open", "--served-model-name", "a\x01"), "must be printable"),
        (("--open", "--served-model-name", "meta/a b," + "x" * 128), ""),
        (("--open", "--device", "null", "--pal-link-policy", "off"), "--pal-link-policy off has no effect"),
        (("--open", "--profile", "l4", "--profile-force", "--pal-arena", "off"), ""),
        (("--open",), ""),
        (("--open", "--host", "::1"), ""),
        (("--controllers", "a:1,b:2", "--host", "0.0.0.0"), "TLS"),
        (("--controllers", "a:1,b:65536"), "'b:65536' is no host:port"),
        (("--controllers", "dns:a:0"), "'dns:a:0' is no host:port"),
        (("--controllers", "dns:a:65535"), ""),
        (("--open", "--advertise", "agent.example"), "--advertise 'agent.example' has no port"),
        (("--open", "--advertise", "http://a:5"), "--advertise 'http://a:5' is a URL"),
        (("--open", "--advertise", "agent.example:50051"), ""),
    ],
)
def test_settings_that_do_not_go_together(flags: tuple[str, ...], words: str) -> None:
    problem = settings_problem(settings(*flags))
    assert words in problem if words else not problem
