"""Display devices on the PCI bus, so that a GPU without CUDA shows with its reason. Reads sysfs alone."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman_agent.pal.host import Host

_DISPLAY_CLASS = 0x03
NVIDIA = 0x10DE
# Vendor id -> what it is called, and the kind of backend that would compute on it; "display" computes nothing.
_VENDORS = {
    NVIDIA: ("NVIDIA", "cuda"),
    0x1002: ("AMD", "hip"),
    0x8086: ("Intel", "xpu"),
    0x1234: ("QEMU", "display"),
    0x1414: ("Microsoft", "display"),
    0x15AD: ("VMware", "display"),
    0x1A03: ("ASPEED", "display"),
    0x1AF4: ("virtio", "display"),
    0x1B36: ("QEMU", "display"),
    0x102B: ("Matrox", "display"),
    0x80EE: ("VirtualBox", "display"),
}


@dataclass(frozen=True, slots=True)
class PciGpu:
    """One display device."""

    address: str  # domain:bus:device.function, such as "0000:01:00.0"
    vendor: int
    device: int
    kind: str  # "cuda", "hip", "xpu" or "display"
    name: str  # for display: vendor and ids, the bus knows no marketing name
    integrated: bool  # on the root bus: a part of the processor or its chipset
    boot_vga: bool  # the firmware's screen
    memory_bytes: int  # 0 where its driver does not say
    kernel_driver: str  # "nvidia", "amdgpu", "vfio-pci"; empty where none is bound


def list_gpus(host: Host) -> list[PciGpu]:
    """Every display device, by address; empty where the system has no PCI bus to read."""
    folder = host.path("/sys/bus/pci/devices")
    try:
        addresses = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    found = (_gpu(host, address) for address in addresses)
    return [gpu for gpu in found if gpu is not None]


def slot(address: str) -> tuple[int, int, int] | None:
    """Domain, bus and device of an address, to compare what different libraries write differently; None if it is none."""
    try:
        domain, bus, rest = address.split(":")
        return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
    except ValueError:
        return None


def _gpu(host: Host, address: str) -> PciGpu | None:
    base = f"/sys/bus/pci/devices/{address}"
    place = slot(address)
    vendor, device = _hex(host.read(f"{base}/vendor")), _hex(host.read(f"{base}/device"))
    if place is None or _hex(host.read(f"{base}/class")) >> 16 != _DISPLAY_CLASS or vendor == 0:
        return None
    name, kind = _VENDORS.get(vendor, (f"vendor {vendor:04x}", "display"))
    integrated = place[1] == 0 and kind != "display"
    what = "display adapter" if kind == "display" else "integrated GPU" if integrated else "GPU"
    driver = host.path(f"{base}/driver")
    try:
        bound = driver.readlink().name if driver.is_symlink() else ""
    except OSError:
        bound = ""
    memory = host.read(f"{base}/mem_info_vram_total")  # amdgpu writes it
    return PciGpu(
        address=address,
        vendor=vendor,
        device=device,
        kind=kind,
        name=f"{name} {what} [{vendor:04x}:{device:04x}]",
        integrated=integrated,
        boot_vga=host.read(f"{base}/boot_vga") == "1",
        memory_bytes=int(memory) if memory.isdigit() else 0,
        kernel_driver=bound,
    )


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
