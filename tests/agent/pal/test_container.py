"""Containers and partitions: what each variable takes away, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.cuda_driver import GIB, H200, FakeDriver
from tests.fakes.machines import CUDA_13, PLAIN_LINUX, WSL, FakeStaticNvml, Machine, with_cards

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.container import capabilities, container_kind, container_values, limits_of, size_of
from dragoman_agent.pal.found import FoundDevice


def look(folder: Path, **changes: object) -> FoundDevice:
    card = H200.but(MPS_ENABLED=changes.pop("mps", 0))
    return take_inventory(with_cards(card, **changes).host(folder), CUDA_13).devices[0]


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({"/proc/version": WSL}, {}, "wsl"),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/proc/version": PLAIN_LINUX}, {}, ""),
    ],
)
def test_kind(tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str) -> None:
    host = Machine(FakeDriver(), files=files, environ=environ).host(tmp_path)
    assert container_kind(host) == kind
    values = container_values(host)
    assert (values["container.kind"].value if kind else "") == kind


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, {"compute", "utility"}),
        ({"NVIDIA_DRIVER_CAPABILITIES": "compute, Utility"}, {"compute", "utility"}),
        ({"NVIDIA_DRIVER_CAPABILITIES": "video"}, {"video"}),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": ""}, {"compute", "utility"}),
    ],
)
def test_capabilities(environ: dict[str, str], given: set[str] | None) -> None:
    assert capabilities(environ) == given
    every = capabilities({"NVIDIA_DRIVER_CAPABILITIES": "all"})
    assert every is not None and {"compute", "utility"} < every


def test_capabilities_are_reported_with_the_card(tmp_path: Path) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    values = look(tmp_path, environ=environ, files={"/.dockerenv": ""}).values
    assert values["container.visible_devices"].value == "0"
    assert values["container.driver_capabilities"].value == "compute,utility"
    assert values["container.driver_capabilities"].note == "compute works, utility works"
    mute = look(tmp_path / "mute", environ=environ, nvml=FakeStaticNvml(init_error=12))
    assert mute.values["container.driver_capabilities"].note == (
        "compute works, utility does not: NVML Shared Library Not Found"
    )


def test_a_share_under_mps_takes_multiprocessors_and_memory(tmp_path: Path) -> None:
    environ = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "1=1G,0=8GB"}
    device = look(tmp_path, mps=1, environ=environ)
    assert device.values["partition.multiprocessors"].value == 33
    assert device.values["partition.memory"].value == 8 * GIB
    free = device.values["memory.free"]
    assert (free.value, free.provenance) == (8 * GIB, "derived")
    assert free.note == "limited by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    assert device.values["compute.multiprocessors"].value == 132, "the card itself stays what it is"


def test_a_share_without_mps_does_nothing_and_says_so(tmp_path: Path) -> None:
    device = look(tmp_path, environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"})
    assert "partition.multiprocessors" not in device.values
    assert any("does not run under the multi-process service" in note for note in device.notes)


@pytest.mark.parametrize("text", ["", "0", "101", "half", "-5", "nan"])
def test_a_percentage_that_is_none_is_told_and_not_applied(text: str) -> None:
    limits = limits_of({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": text}, 0, 132, True)
    assert limits.multiprocessors is None
    assert f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={text} is not a percentage" in limits.notes[0]


@pytest.mark.parametrize("text", ["4G", "0=", "0=lots", "x=4G", "0=4G,1"])
def test_a_memory_limit_that_is_none_is_told_and_not_applied(text: str) -> None:
    limits = limits_of({"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": text}, 0, 132, True)
    assert limits.memory_bytes is None
    assert "a list such as 0=4G,1=512M" in limits.notes[0]


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("1g", 1 << 30), ("2GB", 2 << 30), ("7", 7), ("1.5G", None), ("G", None), ("", None)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert size_of(text) == size


def test_our_own_limits_are_facts(tmp_path: Path) -> None:
    device = look(tmp_path, environ={"DRAGOMAN_SM_LIMIT": "24", "DRAGOMAN_MEMORY_LIMIT": "8000000000"})
    assert device.values["partition.multiprocessors"].value == 24
    assert device.values["partition.memory"].value == 8_000_000_000
    assert device.values["memory.free"].value == 8_000_000_000


def test_a_limit_above_the_card_is_none() -> None:
    assert limits_of({"DRAGOMAN_SM_LIMIT": "500"}, 0, 132, None).multiprocessors is None


def test_a_bad_limit_of_our_own_is_told(tmp_path: Path) -> None:
    device = look(tmp_path, environ={"DRAGOMAN_SM_LIMIT": "many"})
    assert any("DRAGOMAN_SM_LIMIT is 'many'" in note for note in device.notes)


def test_the_smaller_of_two_limits_holds() -> None:
    environ = {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "DRAGOMAN_SM_LIMIT": "24",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1G",
        "DRAGOMAN_MEMORY_LIMIT": str(2 << 30),
    }
    limits = limits_of(environ, 0, 132, True)
    assert (limits.multiprocessors, limits.memory_bytes) == (24, GIB)
    assert limits.origin == {"multiprocessors": "DRAGOMAN_SM_LIMIT", "memory": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"}


def test_a_slice_under_a_wider_limit_stays_a_slice(tmp_path: Path) -> None:
    mig = H200.but(uuid="5a11ce00-0000-4000-8000-000000000003", total=16 * GIB, free=15 * GIB, MULTIPROCESSOR_COUNT=16, slice_of=H200.uuid)  # fmt: skip
    machine = Machine(
        FakeDriver(mig),
        FakeStaticNvml(H200, mig),
        environ={"CUDA_VISIBLE_DEVICES": f"MIG-{mig.uuid}", "DRAGOMAN_MEMORY_LIMIT": str(100 * GIB)},
    )
    values = take_inventory(machine.host(tmp_path), CUDA_13).devices[0].values
    assert values["partition.memory"].value == 16 * GIB
    assert values["memory.free"].value == 15 * GIB
