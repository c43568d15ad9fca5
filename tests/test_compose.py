"""compose.yaml and the Dockerfiles, as far as a machine without a container engine can tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SETTINGS = {
    "controller": ("dragoman_controller.config", "ControllerSettings"),
    "agent": ("dragoman_agent.config", "AgentSettings"),
    "gateway": ("dragoman_gateway.config", "GatewaySettings"),
}


def dockerfile(service: str) -> str:
    return (ROOT / SERVICES[service]["build"]["dockerfile"]).read_text()


def test_the_three_parts_are_there() -> None:
    assert set(SERVICES) == set(SETTINGS)


@pytest.mark.parametrize("service", SETTINGS)
def test_every_environment_name_is_a_setting(service: str) -> None:
    import importlib
    from dataclasses import fields

    module, name = SETTINGS[service]
    known = {f"DRAGOMAN_{field.name.upper()}" for field in fields(getattr(importlib.import_module(module), name))}
    assert set(SERVICES[service].get("environment", {})) <= known


def test_only_the_gateway_is_reached_from_outside_and_from_loopback_by_default() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:${DRAGOMAN_HTTP_PORT:-8000}:8000"]
    # Agent and gateway share the controller's network: what is between the three stays on loopback.
    assert {SERVICES[name]["network_mode"] for name in ("agent", "gateway")} == {"service:controller"}


@pytest.mark.parametrize("service", SETTINGS)
def test_images_run_unprivileged_and_start_our_command(service: str) -> None:
    text = dockerfile(service)
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0")
    assert "PYTHONSAFEPATH=1" in text
    assert "HEALTHCHECK" in text
    assert f"dragoman-{service}" in text or f"dragoman_{service}" in text
    for source in re.findall(r"^COPY (?!--)(\S+(?: \S+)*) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name


def test_the_gpu_overlay_changes_only_the_agent() -> None:
    overlay = yaml.safe_load((ROOT / "deploy" / "compose.gpu.yaml").read_text())
    assert set(overlay["services"]) == {"agent"}
    devices = overlay["services"]["agent"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("service", SETTINGS)
def test_a_part_may_finish_its_drain_before_it_is_killed(service: str) -> None:
    import importlib

    module, name = SETTINGS[service]
    drain = getattr(importlib.import_module(module), name)().drain_timeout
    assert int(SERVICES[service]["stop_grace_period"].removesuffix("s")) > drain
