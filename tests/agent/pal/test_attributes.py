"""Machines as users have them, played in a folder: what is found, what is refused and why, and what a fingerprint rests on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.fakes.cuda_driver import GIB, H200, RTX_4060_LAPTOP, TESLA_T4, CUresult, FakeDriver
from tests.fakes.machines import (
    CUDA_13,
    INTEL_GRAPHICS,
    NVIDIA_CARD,
    WSL,
    FakeStaticNvml,
    Machine,
    PciDevice,
    with_cards,
    without_cards,
)

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.found import FoundDevice, Inventory
from dragoman_agent.pal.needs import KindNeeds, Needs
from dragoman_agent.pal.profile_schema import check_value
from dragoman_agent.pal.select import NoDeviceError, choose_device

NEEDS = Needs("qwen3-0.6b", 1_200_000_000, 30_000_000, 900_000_000, {"cuda": KindNeeds(1_200_000_000, "bfloat16")})


@pytest.fixture
def look(tmp_path: Path) -> Any:
    """Look at a machine."""
    count = iter(range(100))
    return lambda machine, runtime=CUDA_13: take_inventory(machine.host(tmp_path / str(next(count))), runtime)


def cuda(inventory: Inventory) -> list[FoundDevice]:
    return [device for device in inventory.devices if device.facts.kind == "cuda"]


def test_an_h200_has_over_thirty_values_each_with_its_source(look: Any) -> None:
    device = cuda(look(with_cards(H200)))[0]
    assert len(device.values) >= 45
    driver_values = [name for name in device.values if name.startswith(("compute.", "memory."))]
    assert len(driver_values) >= 30
    for name, value in device.values.items():
        check_value(name, value.value, value.unit, value.provenance)
        assert value.provenance in ("reported", "derived")
    # The figures that were read on the card itself.
    numbers = {name: value.value for name, value in device.values.items()}
    assert numbers["memory.l2_size"] == 62_914_560
    assert numbers["memory.l2_persisting_max"] == 39_321_600
    assert numbers["memory.access_window_max"] == 134_217_728
    assert numbers["memory.shared_per_multiprocessor"] == 233_472
    assert numbers["memory.shared_per_block"] == 232_448
    assert numbers["compute.max_clock"] == 1.98e9
    assert numbers["memory.bus_bandwidth"] == pytest.approx(4.81e12, rel=1e-3)
    assert numbers["compute.dtypes"] == "bfloat16 float16 float8 int8"
    assert numbers["compute.dependent_launch"] is True
    assert numbers["link.max_width"] == 16
    assert numbers["power.limit"] == 600.0
    assert numbers["driver.release"] == "580.159.04"
    assert numbers["link.pinned_memory"] is True
    assert device.facts.uuid == "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert device.notes == ()
    assert device.usable


def test_no_context_is_made_and_nvml_is_closed_again(look: Any) -> None:
    driver, nvml = FakeDriver(H200), FakeStaticNvml(H200)
    look(Machine(driver, nvml))
    assert not any("Ctx" in call or ("Mem" in call and call != "cuDeviceTotalMem") for call in driver.calls)
    assert nvml.open == 0


def test_laptop_takes_the_discrete_card_and_shows_the_integrated_one(look: Any) -> None:
    inventory = look(with_cards(RTX_4060_LAPTOP, pci=(INTEL_GRAPHICS, NVIDIA_CARD)))
    assert [device.facts.kind for device in inventory.devices] == ["cuda", "xpu", "cpu"]
    selection = choose_device(inventory, "auto", NEEDS)
    assert selection.chosen.device.facts.name == "NVIDIA GeForce RTX 4060 Laptop GPU"
    assert selection.chosen.reason == "the only GPU that fits"
    other = selection.verdicts[1]
    assert other.device.facts.name == "Intel integrated GPU [8086:a7a0]"
    assert other.device.integrated
    assert other.step == "probe"
    assert other.reason.startswith(
        "the installed torch was built for CUDA 13.0, this card needs one for Intel GPUs (XPU); "
    )
    values = selection.chosen.device.values
    assert values["compute.dtypes"].value == "bfloat16 float16 float8 int8"
    assert values["compute.dependent_launch"].value is False


def test_old_driver_is_refused_at_the_last_step_with_the_release_to_install(look: Any) -> None:
    inventory = look(with_cards(H200, driver=FakeDriver(H200, version=12040)))
    device = cuda(inventory)[0]
    assert device.problem == ""
    assert not device.usable
    selection = choose_device(inventory, "auto", NEEDS)
    assert selection.chosen.device.facts.kind == "cpu"
    assert selection.verdicts[1].step == "runtime"
    assert "supports CUDA 12.4, the installed torch was built for CUDA 13.0" in selection.verdicts[1].reason
    assert "update the NVIDIA driver to release 580 or newer" in selection.chosen.reason


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "(803); reboot after a driver update"),
        (CUresult.CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE, "(804); remove the package cuda-compat"),
        (CUresult.CUDA_ERROR_SYSTEM_NOT_READY, "(802); start it: sudo systemctl start nvidia-fabricmanager"),
        (CUresult.CUDA_ERROR_STUB_LIBRARY, "(34); take the folder that ends in stubs"),
        (CUresult.CUDA_ERROR_UNKNOWN, "(999); reload it: sudo modprobe -r nvidia_uvm"),
        (CUresult.CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE (1); update the NVIDIA driver"),
    ],
)
def test_what_the_driver_answers_is_told_with_its_remedy_on_the_card_itself(
    look: Any, status: CUresult, words: str
) -> None:
    inventory = look(without_cards(status))
    assert words in inventory.cuda_problem
    card = cuda(inventory)[0]
    assert card.facts.name == "NVIDIA GPU [10de:28e0]"
    assert card.problem == inventory.cuda_problem
    assert choose_device(inventory, "auto", NEEDS).chosen.reason == f"no GPU: {inventory.cuda_problem}"


def test_a_closed_device_node_is_named_with_the_group_to_join(look: Any, tmp_path: Path) -> None:
    inventory = look(without_cards(CUresult.CUDA_ERROR_NO_DEVICE, closed=("/dev/nvidia0",)))
    group = tmp_path.group()
    assert "may not open /dev/nvidia0 (mode rw-r--r--, owner" in inventory.cuda_problem
    assert f"sudo usermod -aG {group} " in inventory.cuda_problem


def test_open_nodes_leave_the_drivers_own_answer(look: Any) -> None:
    inventory = look(without_cards(CUresult.CUDA_ERROR_NO_DEVICE, files={"/dev/nvidia0": "", "/dev/nvidiactl": ""}))
    assert "CUDA_ERROR_NO_DEVICE (100)" in inventory.cuda_problem


def test_no_gpu_no_driver_and_no_driver_in_a_container_are_three_things(look: Any) -> None:
    nothing = FakeDriver(has_library=False)
    assert "none on the PCI bus" in look(Machine(nothing)).cuda_problem
    assert "install the NVIDIA driver" in look(Machine(nothing, pci=(NVIDIA_CARD,))).cuda_problem
    docker = Machine(nothing, pci=(NVIDIA_CARD,), files={"/.dockerenv": ""})
    assert "docker run --gpus all" in look(docker).cuda_problem
    wsl = Machine(nothing, files={"/proc/version": WSL})
    assert "install the NVIDIA driver on Windows" in look(wsl).cuda_problem


def test_without_the_binding_the_package_is_named(look: Any, tmp_path: Path) -> None:
    host = Machine(FakeDriver()).host(tmp_path / "machine")

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")

    object.__setattr__(host, "load_driver", missing)
    assert "cuda-bindings is not installed" in take_inventory(host, CUDA_13).cuda_problem


def test_a_card_of_another_kernel_driver_says_which(look: Any) -> None:
    card = PciDevice("0000:01:00.0", 0x10DE, 0x28E0, driver="vfio-pci")
    inventory = look(Machine(FakeDriver(has_library=False), pci=(card,)))
    assert "bound to the kernel driver vfio-pci" in cuda(inventory)[0].problem


def test_wsl_without_pinned_memory_says_what_it_changes(look: Any) -> None:
    card = RTX_4060_LAPTOP.but(HOST_REGISTER_SUPPORTED=0, holders=((41, None),))
    device = cuda(look(with_cards(card, files={"/proc/version": WSL})))[0]
    assert device.values["link.pinned_memory"].value is False
    assert "the driver does not register host memory" in device.values["link.pinned_memory"].note
    assert device.values["container.kind"].value == "wsl"
    assert any("copies between host and card are slower" in note for note in device.notes)
    assert device.holders == (), "a process whose memory is not told holds no number"
    assert device.usable


def test_wsl_that_registers_memory_pins_with_a_remark(look: Any) -> None:
    device = cuda(look(with_cards(RTX_4060_LAPTOP, files={"/proc/version": WSL})))[0]
    assert device.values["link.pinned_memory"].value is True
    assert any("pinned memory is limited under WSL" in note for note in device.notes)


def test_two_unequal_cards_the_older_is_refused_for_its_number_format(look: Any) -> None:
    inventory = look(with_cards(TESLA_T4, RTX_4060_LAPTOP))
    selection = choose_device(inventory, "auto", NEEDS)
    assert selection.chosen.device.facts.index == 1
    t4 = selection.verdicts[1]
    assert t4.step == "match"
    assert t4.reason == ("qwen3-0.6b is computed in bfloat16, which needs compute capability 8.0; this card has 7.5")


def test_two_unequal_cards_that_fit_the_faster_memory_wins_though_smaller(look: Any) -> None:
    slow = RTX_4060_LAPTOP.but(uuid="4060aaaa-0000-4000-8000-000000000009", PCI_BUS_ID=9, free=16 * GIB, total=16 * GIB)
    fast = RTX_4060_LAPTOP.but(GLOBAL_MEMORY_BUS_WIDTH=384, name="wide")
    selection = choose_device(look(with_cards(slow, fast)), "auto", NEEDS)
    assert selection.chosen.device.facts.name == "wide"
    assert selection.chosen.reason == "the fastest memory bus of 2 GPUs that fit: 768 GB/s"
    assert selection.verdicts[1].reason == "the memory bus of wide carries 768 GB/s, this one 256 GB/s"
    assert selection.verdicts[1].device.facts.uuid.endswith("9")


def test_a_fast_card_without_room_gives_way_to_a_roomy_one(look: Any) -> None:
    full = H200.but(free=1_400_000_000)
    selection = choose_device(look(with_cards(full, RTX_4060_LAPTOP.but(PCI_BUS_ID=2))), "auto", NEEDS)
    assert selection.chosen.device.facts.name == RTX_4060_LAPTOP.name
    assert selection.chosen.reason.startswith("room for long sequences")


MIG = H200.but(
    uuid="5a11ce00-0000-4000-8000-000000000003",
    total=16 * GIB,
    free=15 * GIB,
    MULTIPROCESSOR_COUNT=16,
    slice_of=H200.uuid,
)


def test_a_mig_slice_has_its_own_identity_size_and_free_memory(look: Any) -> None:
    machine = Machine(FakeDriver(MIG), FakeStaticNvml(H200, MIG), environ={"CUDA_VISIBLE_DEVICES": f"MIG-{MIG.uuid}"})
    device = cuda(look(machine))[0]
    assert device.facts.uuid == f"MIG-{MIG.uuid}"
    assert device.values["memory.free"].value == 15 * GIB
    assert device.values["partition.multiprocessors"].value == 16
    assert device.values["partition.memory"].value == 16 * GIB
    assert device.values["link.max_width"].value == 16, "the card's link"
    assert device.fingerprint != cuda(look(with_cards(H200)))[0].fingerprint


def test_a_mig_slice_is_never_taken_for_its_card(look: Any) -> None:
    """NVML knows only the card: its free memory is not the slice's."""
    machine = Machine(FakeDriver(MIG), FakeStaticNvml(H200), environ={"CUDA_VISIBLE_DEVICES": f"MIG-{MIG.uuid}"})
    device = cuda(look(machine))[0]
    assert device.values["memory.free"].value == 16 * GIB
    assert device.values["memory.free"].provenance == "derived"
    assert "an upper bound" in device.values["memory.free"].note


def test_a_call_that_fails_half_way_costs_that_device_alone(look: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken = H200.but(failing={"cuDeviceTotalMem": CUresult.CUDA_ERROR_ECC_UNCORRECTABLE})
    good = RTX_4060_LAPTOP.but(PCI_BUS_ID=2)
    with caplog.at_level(logging.DEBUG):
        inventory = look(with_cards(broken, good))
    first, second = cuda(inventory)
    assert "failed at cuDeviceTotalMem with CUDA_ERROR_ECC_UNCORRECTABLE (214)" in first.problem
    assert second.usable
    assert choose_device(inventory, "auto", NEEDS).chosen.device is second
    steps = [record.message for record in caplog.records if record.name == "dragoman.probe"]
    assert any(line.startswith("step attributes of cuda 0: end") and "cuDeviceTotalMem" in line for line in steps)


def test_an_attribute_that_fails_is_absent_and_the_log_says_why(look: Any, caplog: pytest.LogCaptureFixture) -> None:
    card = H200.but(
        failing={"CLOCK_RATE": CUresult.CUDA_ERROR_INVALID_VALUE, "CLUSTER_LAUNCH": CUresult.CUDA_ERROR_INVALID_VALUE}
    )
    with caplog.at_level(logging.DEBUG):
        device = cuda(look(with_cards(card)))[0]
    assert "compute.cluster_launch" not in device.values
    assert "attribute CLUSTER_LAUNCH is absent" in caplog.text
    assert device.values["compute.max_clock"].value == 1.98e9, "NVML is the lower-ranked source"


def test_a_driver_without_a_function_names_it(look: Any) -> None:
    inventory = look(with_cards(H200, driver=FakeDriver(H200, lacks=("cuDeviceGetCount",)), pci=(NVIDIA_CARD,)))
    assert "the NVIDIA driver lacks cuDeviceGetCount" in inventory.cuda_problem


def test_without_a_uuid_the_address_is_the_identity(look: Any) -> None:
    device = cuda(look(with_cards(H200.but(failing={"cuDeviceGetUuid": CUresult.CUDA_ERROR_UNKNOWN}))))[0]
    assert device.facts.uuid == "pci-00000000:01:00.0"
    assert device.values["link.max_width"].value == 16, "NVML is asked by address"


def test_a_counter_without_permission_is_absent_and_told(look: Any) -> None:
    card = H200.but(refused={"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NO_PERMISSION})
    device = cuda(look(with_cards(card)))[0]
    free = device.values["memory.free"]
    assert (free.value, free.provenance) == (H200.total, "derived")
    assert "Insufficient Permissions" in free.note
    assert device.notes == (
        "NVML did not say memory.free (Insufficient Permissions); nothing need be done, what rests on it is left out",
    )


def test_a_counter_that_a_card_lacks_is_absent_without_a_remark(look: Any) -> None:
    card = H200.but(refused={"nvmlDeviceGetEnforcedPowerLimit": pynvml.NVML_ERROR_NOT_SUPPORTED})
    device = cuda(look(with_cards(card)))[0]
    assert "power.limit" not in device.values
    assert device.notes == ()


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"nvml": None}, "NVML cannot be used (the package nvidia-ml-py is not installed)"),
        ({"nvml": FakeStaticNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)}, "NVML cannot be used (NVML Shared Library Not Found)"),
        (
            {"nvml": FakeStaticNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), "environ": {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute"}},
            "NVIDIA_DRIVER_CAPABILITIES=compute leaves out utility",
        ),
    ],
)  # fmt: skip
def test_without_nvml_the_card_is_used_and_what_is_missing_is_said(
    look: Any, machine: dict[str, Any], words: str
) -> None:
    device = cuda(look(with_cards(H200, **machine)))[0]
    assert device.usable
    assert any(words in note for note in device.notes)
    assert device.values["memory.free"].provenance == "derived"


def test_a_container_without_the_compute_capability_is_told_so(look: Any) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"}
    inventory = look(Machine(FakeDriver(has_library=False), pci=(NVIDIA_CARD,), environ=environ))
    assert "NVIDIA_DRIVER_CAPABILITIES=utility leaves out compute" in inventory.cuda_problem


def test_free_memory_below_the_need_names_who_holds_it_and_the_changes(look: Any) -> None:
    card = RTX_4060_LAPTOP.but(free=GIB, holders=((1, 6 * GIB),))
    big = Needs("llama-3.2-1b", 40 * GIB, 1 << 20, by_kind={"cuda": KindNeeds(3 * GIB, "bfloat16")})
    with pytest.raises(NoDeviceError) as refused:
        choose_device(look(with_cards(card)), "cuda", big)
    text = str(refused.value)
    assert "needs 3.00 GiB for weights and one short sequence, 1.00 GiB are free, other processes hold 6.00 GiB" in text
    assert "cheapest first" in text
    assert "stop what holds the device's memory: 6.00 GiB by pid 1 (" in text


def test_an_l2_size_of_zero_is_absent_and_told(look: Any) -> None:
    device = cuda(look(with_cards(H200.but(L2_CACHE_SIZE=0))))[0]
    assert "memory.l2_size" not in device.values
    assert any("does not report the size of the L2 cache" in note for note in device.notes)


def test_a_narrow_link_is_told(look: Any) -> None:
    device = cuda(look(with_cards(H200.but(link=(5, 5, 4, 16)))))[0]
    assert any("the PCIe link runs at x4 of x16" in note for note in device.notes)


def test_a_prohibited_card_is_refused(look: Any) -> None:
    device = cuda(look(with_cards(H200.but(COMPUTE_MODE=2))))[0]
    assert "compute mode is prohibited" in device.problem
    assert "nvidia-smi -i 0 -c 0" in device.problem


def test_a_hidden_card_shows_why(look: Any) -> None:
    second = PciDevice("0000:41:00.0", 0x10DE, 0x2330, driver="nvidia")
    inventory = look(with_cards(H200, pci=(NVIDIA_CARD, second), environ={"CUDA_VISIBLE_DEVICES": "0"}))
    hidden = cuda(inventory)[1]
    assert hidden.problem == "hidden by CUDA_VISIBLE_DEVICES=0; unset it, or name this card"
    everything = look(without_cards(CUresult.CUDA_ERROR_NO_DEVICE, environ={"CUDA_VISIBLE_DEVICES": "-1"}))
    assert everything.cuda_problem.startswith("every card is hidden by CUDA_VISIBLE_DEVICES=-1")


def test_a_screen_without_arithmetic_is_listed_as_such(look: Any) -> None:
    aspeed = PciDevice("0000:02:00.0", 0x1A03, 0x2000, boot_vga=True)
    device = look(Machine(FakeDriver(has_library=False), pci=(aspeed,))).devices[0]
    assert device.facts.name == "ASPEED display adapter [1a03:2000]"
    assert device.problem == "a display adapter, it computes nothing"


BASE = with_cards(H200)


@pytest.mark.parametrize(
    "other",
    [
        with_cards(H200.but(uuid="00112233-4455-6677-8899-aabbccddee00")),
        with_cards(H200, driver=FakeDriver(H200, version=13010)),
        with_cards(H200, nvml=FakeStaticNvml(H200, release="590.10")),
        with_cards(H200.but(CLOCK_RATE=1_755_000)),
        with_cards(H200.but(MEMORY_CLOCK_RATE=2_619_000)),
        with_cards(H200.but(link=(5, 4, 16, 16))),
        with_cards(H200.but(link=(5, 5, 8, 8))),
        with_cards(H200, environ={"CUDA_VISIBLE_DEVICES": "0"}),
        with_cards(H200, environ={"NVIDIA_VISIBLE_DEVICES": "all"}),
        with_cards(H200, environ={"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}),
        with_cards(H200, environ={"DRAGOMAN_SM_LIMIT": "24"}),
        with_cards(H200, environ={"DRAGOMAN_MEMORY_LIMIT": "8000000000"}),
        with_cards(H200.but(MPS_ENABLED=1), environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}),
        with_cards(H200.but(MPS_ENABLED=1), environ={"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4G"}),
    ],
)  # fmt: skip
def test_whatever_changes_a_measurement_changes_the_fingerprint(look: Any, other: Machine) -> None:
    assert cuda(look(other))[0].fingerprint != cuda(look(BASE))[0].fingerprint


@pytest.mark.parametrize(
    "other",
    [
        with_cards(H200.but(name="another name")),
        with_cards(H200.but(free=1 << 30)),
        with_cards(H200.but(link=(1, 5, 16, 16))),  # the generation drops while a card is idle
        with_cards(H200, environ={"PATH": "/bin"}),
    ],
)
def test_what_changes_from_minute_to_minute_and_the_name_do_not(look: Any, other: Machine) -> None:
    assert cuda(look(other))[0].fingerprint == cuda(look(BASE))[0].fingerprint


def test_each_step_has_a_line_at_its_start_and_one_at_its_end(look: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="dragoman.probe"):
        look(with_cards(H200))
    lines = [record.message.split(",")[0] for record in caplog.records if record.name == "dragoman.probe"]
    steps = ("pci", "driver", "attributes of cuda 0", "nvml", "nvml of cuda 0", "cpu")
    assert lines == [line for name in steps for line in (f"step {name}: start", f"step {name}: end")]


def test_nothing_is_decided_by_a_cards_name(look: Any) -> None:
    plain, renamed = (cuda(look(with_cards(card)))[0] for card in (RTX_4060_LAPTOP, RTX_4060_LAPTOP.but(name="H200")))
    assert plain.values == renamed.values
