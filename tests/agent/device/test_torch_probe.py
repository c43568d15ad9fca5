"""Other makers' cards through torch: what is read of its properties, what the wrong torch says, and that nothing is guessed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dragoman_agent.device import open_device
from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.capabilities import capabilities_of
from dragoman_agent.device.torch_probe import STEPS, address_of, list_devices, main, reported_values
from dragoman_agent.device.torch_runtime import built_for, open_runtime
from dragoman_agent.pal.probe_steps import NEEDED, TORCH_STEPS
from dragoman_agent.pal.runtime import installed_runtime, runtime_of
from dragoman_agent.pal.torch_devices import TorchListError, list_in_a_process

# Properties as torch names them: of a ROCm build, and of an XPU build.
MI300X = SimpleNamespace(
    name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", total_memory=206_141_652_992, multi_processor_count=304,
    warp_size=64, max_threads_per_block=1024, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    L2_cache_size=4 << 20, clock_rate=2_100_000, memory_clock_rate=1_300_000, memory_bus_width=8192,
    shared_memory_per_block=65536, shared_memory_per_block_optin=0, pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0,
)  # fmt: skip
MAX_1550 = SimpleNamespace(
    name="Intel Data Center GPU Max 1550", total_memory=64 << 30, gpu_subslice_count=64, max_work_group_size=1024,
    sub_group_sizes=[16, 32], local_mem_size=131072,
)  # fmt: skip


def test_properties_of_a_rocm_torch() -> None:
    values = {name: value.value for name, value in reported_values(MI300X).items()}
    assert values["compute.multiprocessors"] == 304 and values["compute.warp_size"] == 64
    assert values["memory.shared_per_block"] == 65536, "what is 0 is not taken"
    assert values["compute.max_clock"] == 2.1e9
    assert values["memory.bus_bandwidth"] == pytest.approx(2 * 1.3e9 * 8192 / 8)
    assert address_of(MI300X) == "0000:c1:00.0"
    assert capabilities_of("hip", reported_values(MI300X)).launch.group_threads == 64


def test_properties_of_an_xpu_torch() -> None:
    values = reported_values(MAX_1550)
    assert values["compute.warp_size"].value == 32 and values["compute.max_threads_per_block"].value == 1024
    assert values["memory.shared_per_block"].value == 131072
    assert "compute.max_clock" not in values and "memory.bus_bandwidth" not in values
    assert address_of(MAX_1550) == ""


def test_what_torch_does_not_say_is_left_out_and_refused_where_it_is_needed() -> None:
    values = reported_values(SimpleNamespace(multi_processor_count=10))
    assert list(values) == ["compute.multiprocessors"]
    with pytest.raises(DeviceError, match=r"says nothing for compute\.warp_size"):
        capabilities_of("hip", values)


def test_every_step_exists_and_the_needed_values_have_one() -> None:
    assert set(TORCH_STEPS) == set(STEPS)
    assert set(NEEDED.values()) <= set(TORCH_STEPS)


@pytest.mark.parametrize("kind", ["hip", "xpu"])
def test_the_wrong_torch_is_refused_when_the_device_is_opened(kind: str) -> None:
    assert built_for() != kind, "this test machine has no such torch"
    with pytest.raises(DeviceError, match=rf"was built for .*; --device {kind} needs one for"):
        open_device(kind)
    with pytest.raises(DeviceError, match="was built for"):
        list_devices(kind)


def test_no_card_is_a_sentence() -> None:
    if torch.version.cuda is None or torch.accelerator.is_available():
        pytest.skip("needs a torch for CUDA on a machine without a card")
    with pytest.raises(DeviceError, match=r"PyTorch sees no CUDA device; run `dragoman doctor`"):
        open_runtime("cuda", 0)


def test_the_process_that_lists_says_in_one_line_why_it_cannot() -> None:
    with pytest.raises(
        TorchListError, match=r"^the installed torch .* was built for .*; --device hip needs one for ROCm$"
    ):
        list_in_a_process("hip")


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hip", "0", "--steps", "memory.read,colour"])
    assert "no step colour; there are memory.read" in capsys.readouterr().err


def test_the_kind_of_a_torch_is_read_without_importing_it() -> None:
    rocm = runtime_of("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\nxpu: Optional[str] = None\n")
    assert (rocm.cuda, rocm.other_kind, rocm.built_for) == ("", "hip", "ROCm 6.4.43482")
    xpu = runtime_of("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = '20250301'\n")
    assert (xpu.other_kind, xpu.built_for) == ("xpu", "Intel GPUs (XPU) 20250301")
    assert installed_runtime().other_kind in ("", built_for())
