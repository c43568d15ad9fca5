"""Whole machines for the facts: cards, NVML, PCI bus, files and variables, played in a folder. See `tests.fakes.cuda_driver`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
from tests.fakes.cuda_driver import Card, CUresult, FakeDriver

from dragoman_agent.pal.host import Host
from dragoman_agent.pal.runtime import Runtime

CUDA_13 = Runtime("13.0")
PLAIN_LINUX = "Linux version 6.8.0-60-generic (gcc 13.3.0) #63-Ubuntu SMP PREEMPT_DYNAMIC"
WSL = "Linux version 5.15.167.4-microsoft-standard-WSL2 (gcc 11.2.0) #1 SMP"


@dataclass(frozen=True)
class PciDevice:
    """One entry of /sys/bus/pci/devices."""

    address: str
    vendor: int
    device: int
    display_class: int = 0x030000
    driver: str = ""
    boot_vga: bool = False


INTEL_GRAPHICS = PciDevice("0000:00:02.0", 0x8086, 0xA7A0, driver="i915", boot_vga=True)
NVIDIA_CARD = PciDevice("0000:01:00.0", 0x10DE, 0x28E0, driver="nvidia")
AMD_CARD = PciDevice("0000:c1:00.0", 0x1002, 0x74A1, driver="amdgpu")
# An entry of torch's list, with the values that AMD publishes of an MI300X.
AMD_LISTED: dict[str, Any] = {
    "index": 0, "name": "AMD Instinct MI300X", "architecture": "gfx942", "memory_bytes": 192 << 30, "uuid": "",
    "address": "0000:c1:00.0", "integrated": False,
    "values": {
        name: {"value": value, "unit": unit, "provenance": "reported", "labels": ()}
        for name, value, unit in (
            ("compute.multiprocessors", 304, ""), ("compute.warp_size", 64, ""), ("compute.max_threads_per_block", 1024, ""),
            ("memory.total", 192 << 30, "bytes"), ("memory.free", 190 << 30, "bytes"), ("memory.l2_size", 4 << 20, "bytes"),
            ("memory.shared_per_block", 64 << 10, "bytes"), ("memory.shared_per_multiprocessor", 64 << 10, "bytes"),
        )
    },
}  # fmt: skip


class FakeStaticNvml:
    """pynvml for several cards and slices; errors and constants are the real module's."""

    def __init__(self, *cards: Card, init_error: int = 0, release: str = "580.159.04") -> None:
        self._cards = {self._uuid(card): card for card in cards}
        self._by_address = {card.address: card for card in cards if not card.slice_of}
        self._init_error = init_error
        self._release = release
        self.open = 0

    @staticmethod
    def _uuid(card: Card) -> str:
        return f"{'MIG' if card.slice_of else 'GPU'}-{card.uuid}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml"):
            raise AttributeError(f"the fake has no function {name}")
        return getattr(pynvml, name)

    def _enter(self, function: str, card: Card | None = None) -> None:
        if self.open == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if card is not None and function in card.refused:
            raise pynvml.NVMLError(card.refused[function])

    def nvmlInit(self) -> None:
        if self._init_error:
            raise pynvml.NVMLError(self._init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._enter("nvmlSystemGetDriverVersion")
        return self._release

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        self._enter("nvmlDeviceGetHandleByUUID")
        if uuid not in self._cards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._cards[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> Card:
        self._enter("nvmlDeviceGetHandleByPciBusId")
        domain, bus, rest = address.decode().split(":")
        key = (int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16))
        if key not in self._by_address:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._by_address[key]

    def nvmlDeviceGetAttributes_v2(self, card: Card) -> Any:
        self._enter("nvmlDeviceGetAttributes_v2", card)
        return SimpleNamespace(
            multiprocessorCount=card.attributes["MULTIPROCESSOR_COUNT"], memorySizeMB=card.total >> 20
        )

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: Card) -> Card:
        self._enter("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", card)
        return self._cards[f"GPU-{card.slice_of}"]

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        self._enter("nvmlDeviceGetMemoryInfo", card)
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> Any:
        self._enter("nvmlDeviceGetComputeRunningProcesses", card)
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in card.holders]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> Any:
        self._enter("nvmlDeviceGetGraphicsRunningProcesses", card)
        return []

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: Card) -> int:
        return self._link("nvmlDeviceGetCurrPcieLinkGeneration", card, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> int:
        return self._link("nvmlDeviceGetMaxPcieLinkGeneration", card, 1)

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: Card) -> int:
        return self._link("nvmlDeviceGetCurrPcieLinkWidth", card, 2)

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: Card) -> int:
        return self._link("nvmlDeviceGetMaxPcieLinkWidth", card, 3)

    def _link(self, function: str, card: Card, index: int) -> int:
        self._enter(function, card)
        if card.slice_of:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return card.link[index]

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Card) -> ctypes.c_uint:
        self._enter("nvmlDeviceGetEnforcedPowerLimit", card)
        return ctypes.c_uint(600_000).value  # type: ignore[return-value]

    def nvmlDeviceGetPowerManagementLimitConstraints(self, card: Card) -> list[int]:
        self._enter("nvmlDeviceGetPowerManagementLimitConstraints", card)
        return [200_000, 700_000]

    def nvmlDeviceGetTemperatureThreshold(self, card: Card, kind: int) -> int:
        self._enter("nvmlDeviceGetTemperatureThreshold", card)
        return 89

    def nvmlDeviceGetMaxClockInfo(self, card: Card, kind: int) -> int:
        self._enter("nvmlDeviceGetMaxClockInfo", card)
        return card.attributes["MEMORY_CLOCK_RATE" if kind == pynvml.NVML_CLOCK_MEM else "CLOCK_RATE"] // 1000

    def nvmlDeviceGetMemoryBusWidth(self, card: Card) -> int:
        self._enter("nvmlDeviceGetMemoryBusWidth", card)
        return card.attributes["GLOBAL_MEMORY_BUS_WIDTH"]


@dataclass(frozen=True)
class Machine:
    """A machine to look at. `nvml` None is one without the library's package; `closed` are nodes that may not be opened."""

    driver: FakeDriver
    nvml: FakeStaticNvml | None = None
    pci: tuple[PciDevice, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    closed: tuple[str, ...] = ()
    torch: list[dict[str, Any]] | Exception = field(default_factory=list)  # what torch lists of another maker's cards

    def host(self, folder: Path) -> Host:
        """The machine laid out under `folder`."""
        files = {"/proc/version": PLAIN_LINUX, **self.files, **dict.fromkeys(self.closed, "")}
        for name, text in files.items():
            path = folder / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        bus = folder / "sys/bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        for device in self.pci:
            _lay_out(bus / device.address, device)
        denied = {folder / node.lstrip("/") for node in self.closed}
        return Host(
            environ=dict(self.environ),
            root=folder,
            load_driver=lambda: self.driver,
            load_nvml=self._nvml_loader(),
            can_open=lambda path: path not in denied,
            list_torch=self._list_torch,
        )

    def _list_torch(self, kind: str) -> list[dict[str, Any]]:
        if isinstance(self.torch, Exception):
            raise self.torch
        return self.torch

    def _nvml_loader(self) -> Callable[[], Any]:
        def load() -> Any:
            if self.nvml is None:
                raise ImportError("No module named 'pynvml'", name="pynvml")
            return self.nvml

        return load


def _lay_out(folder: Path, device: PciDevice) -> None:
    folder.mkdir()
    (folder / "vendor").write_text(f"0x{device.vendor:04x}\n")
    (folder / "device").write_text(f"0x{device.device:04x}\n")
    (folder / "class").write_text(f"0x{device.display_class:06x}\n")
    (folder / "boot_vga").write_text(f"{int(device.boot_vga)}\n")
    if device.driver:
        drivers = folder.parent.parent / "drivers" / device.driver
        drivers.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(drivers)


def with_cards(*cards: Card, **changes: Any) -> Machine:
    """A machine in good order with these cards; `changes` are fields of Machine."""
    settings: dict[str, Any] = {"driver": FakeDriver(*cards), "nvml": FakeStaticNvml(*cards)} | changes
    return Machine(**settings)


def without_cards(init: CUresult, **changes: Any) -> Machine:
    """A machine whose driver answers `init` when it is started; an NVIDIA card is on the bus."""
    settings: dict[str, Any] = {"driver": FakeDriver(init=init), "nvml": None, "pci": (NVIDIA_CARD,)} | changes
    return Machine(**settings)
