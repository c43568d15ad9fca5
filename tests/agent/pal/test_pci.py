"""The PCI bus as sysfs shows it: display devices only, odd entries passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.cuda_driver import FakeDriver
from tests.fakes.machines import INTEL_GRAPHICS, NVIDIA_CARD, Machine, PciDevice

from dragoman_agent.pal.host import Host
from dragoman_agent.pal.pci import list_gpus, slot

AMD_CARD = PciDevice("0000:0c:00.0", 0x1002, 0x744C, driver="amdgpu")
NETWORK = PciDevice("0000:05:00.0", 0x8086, 0x15F3, display_class=0x020000)
ACCELERATOR = PciDevice("0000:17:00.0", 0x10DE, 0x2335, display_class=0x030200)


def host(folder: Path, *devices: PciDevice) -> Host:
    return Machine(FakeDriver(), pci=devices).host(folder)


def test_display_devices_by_address(tmp_path: Path) -> None:
    found = list_gpus(host(tmp_path, NETWORK, AMD_CARD, NVIDIA_CARD, INTEL_GRAPHICS, ACCELERATOR))
    assert [(gpu.address, gpu.kind, gpu.integrated) for gpu in found] == [
        ("0000:00:02.0", "xpu", True),
        ("0000:01:00.0", "cuda", False),
        ("0000:0c:00.0", "hip", False),
        ("0000:17:00.0", "cuda", False),
    ]
    assert [gpu.kernel_driver for gpu in found] == ["i915", "nvidia", "amdgpu", ""]
    assert [gpu.boot_vga for gpu in found] == [True, False, False, False]


def test_memory_where_the_driver_tells(tmp_path: Path) -> None:
    machine = host(tmp_path, AMD_CARD)
    assert list_gpus(machine)[0].memory_bytes == 0
    (tmp_path / "sys/bus/pci/devices/0000:0c:00.0/mem_info_vram_total").write_text("25753026560\n")
    assert list_gpus(machine)[0].memory_bytes == 25_753_026_560


def test_a_maker_that_nobody_knows_is_a_display_adapter_by_number(tmp_path: Path) -> None:
    gpu = list_gpus(host(tmp_path, PciDevice("0001:02:00.0", 0xBEEF, 0x0001)))[0]
    assert (gpu.kind, gpu.name) == ("display", "vendor beef display adapter [beef:0001]")


def test_no_bus_and_broken_entries_are_no_error(tmp_path: Path) -> None:
    assert list_gpus(Host(environ={}, root=tmp_path / "nothing")) == []
    machine = host(tmp_path, NVIDIA_CARD)
    bus = tmp_path / "sys/bus/pci/devices"
    (bus / "odd").mkdir()
    (bus / "0000:09:00.0").mkdir()
    (bus / "0000:09:00.0" / "class").write_text("no number")
    assert [gpu.address for gpu in list_gpus(machine)] == ["0000:01:00.0"]


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("0000:01:00.0", (0, 1, 0)),
        ("00000000:01:00.0", (0, 1, 0)),
        ("0001:C1:1f.7", (1, 0xC1, 0x1F)),
        ("pci-x", None),
        ("", None),
    ],
)
def test_addresses_as_libraries_write_them(address: str, place: tuple[int, int, int] | None) -> None:
    assert slot(address) == place
