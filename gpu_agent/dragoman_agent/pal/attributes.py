"""Every device of the host with its facts, from the CUDA driver, NVML, the PCI bus and the operating system.

No allocation, no context. A device that fails is listed with its problem, and the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dragoman_agent.pal import pci
from dragoman_agent.pal.container import container_kind, container_values
from dragoman_agent.pal.cpu_facts import cpu_device, usable_cores
from dragoman_agent.pal.cuda_device import join
from dragoman_agent.pal.cuda_facts import CudaReading, DriverCallError, read_cuda
from dragoman_agent.pal.cuda_problems import why_no_cuda, why_unlisted
from dragoman_agent.pal.found import FoundDevice, Inventory
from dragoman_agent.pal.host import Host, this_host
from dragoman_agent.pal.nvml_facts import open_nvml
from dragoman_agent.pal.profile import DeviceFacts
from dragoman_agent.pal.runtime import Runtime, installed_runtime
from dragoman_agent.pal.steps import probe_step
from dragoman_agent.pal.torch_devices import read_torch

__all__ = ["FoundDevice", "Inventory", "cpu_device", "take_inventory", "usable_cores"]


def take_inventory(host: Host | None = None, runtime: Runtime | None = None) -> Inventory:
    """Look at every device of `host`, with the torch of `runtime`; never raises because one of them is broken."""
    host = host or this_host()
    with probe_step("pci") as step:
        cards = pci.list_gpus(host)
        step.outcome = ", ".join(card.name for card in cards) or "no display device"
    readings, error = read_cuda(host)
    if not readings and error is None:
        error = DriverCallError("cuDeviceGetCount", "CUDA_ERROR_NO_DEVICE", 100)
    problem = "" if error is None else why_no_cuda(error, host, cards)
    runtime = runtime or installed_runtime()
    cuda = _join_all(readings, host, runtime) if readings else []
    others, torch_problem = _of_other_makers(host, runtime, cards)
    with probe_step("cpu"):
        cpu = cpu_device(host)
    listed = [*cuda, *others]

    def why(card: pci.PciGpu) -> str:
        return why_unlisted(card, host, problem, runtime, torch_problem)

    return Inventory((*listed, *_unlisted(cards, listed, why), cpu), problem)


def _of_other_makers(host: Host, runtime: Runtime, cards: list[pci.PciGpu]) -> tuple[list[FoundDevice], str]:
    """What a torch that was built for another maker's cards lists, and why it lists nothing."""
    kind = runtime.other_kind
    if not kind:
        return [], ""
    with probe_step(f"torch {kind}") as step:
        found, problem = read_torch(kind, host, runtime, cards)
        step.outcome = problem or ", ".join(device.facts.name for device in found)
    return found, problem


def _join_all(readings: list[CudaReading], host: Host, runtime: Runtime) -> list[FoundDevice]:
    """Each device with what NVML and the container say of it."""
    devices = []
    kind, shared = container_kind(host), container_values(host)
    with open_nvml(host) as nvml:
        for reading in readings:
            with probe_step(f"nvml of cuda {reading.facts.index}") as step:
                body = reading.uuid_body
                prefix = "MIG-" if body and (nvml.is_slice(body) or f"MIG-{body}" in _visible(host)) else "GPU-"
                said = nvml.read(f"{prefix}{body}", reading.address)
                step.outcome = f"{len(said.values)} values" + "".join(f", no {name}" for name in sorted(said.refused))
            devices.append(
                join(
                    reading,
                    said,
                    nvml.problem,
                    environ=host.environ,
                    kind_of_container=kind,
                    shared=shared,
                    runtime=runtime,
                )
            )
    return devices


def _unlisted(cards: list[pci.PciGpu], found: list[FoundDevice], why: Callable[[pci.PciGpu], str]) -> list[FoundDevice]:
    """GPUs of the PCI bus that neither CUDA nor torch lists, each with the reason."""
    listed = {pci.slot(device.address) for device in found if device.address}
    count = Counter(device.facts.kind for device in found)
    devices = []
    for card in cards:
        if pci.slot(card.address) in listed:
            continue
        index = count[card.kind]
        count[card.kind] += 1
        ids = f"{card.vendor:04x}:{card.device:04x}"
        facts = DeviceFacts(card.kind, index, card.name, ids, card.memory_bytes, f"pci-{card.address}")
        devices.append(FoundDevice(facts, integrated=card.integrated, problem=why(card), address=card.address))
    return devices


def _visible(host: Host) -> str:
    return f"{host.environ.get('CUDA_VISIBLE_DEVICES', '')},{host.environ.get('NVIDIA_VISIBLE_DEVICES', '')}"
