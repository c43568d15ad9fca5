"""The troubleshooting page against the code: every row is a message of the program, and every message is played here."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from tests.fakes.cuda_driver import GIB, H200, RTX_4060_LAPTOP, TESLA_T4, CUresult, FakeDriver
from tests.fakes.machines import (
    AMD_CARD,
    AMD_LISTED,
    CUDA_13,
    NVIDIA_CARD,
    WSL,
    FakeStaticNvml,
    Machine,
    PciDevice,
    with_cards,
    without_cards,
)

from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.pal import troubles
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.needs import needs_of
from dragoman_agent.pal.planner import Limits, PlanError, Switches, plan_for
from dragoman_agent.pal.runtime import Runtime
from dragoman_agent.pal.select import NoDeviceError, choose_device
from dragoman_agent.pal.torch_devices import TorchListError
from dragoman_agent.pal.troubles import DRIVER_ANSWERS, Trouble
from dragoman_cli import failure

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
CATALOGUE = {name: value for name, value in vars(troubles).items() if isinstance(value, Trouble)} | dict(DRIVER_ANSWERS)
NO_LIBRARY = FakeDriver(has_library=False)
CAPABILITIES = {"NVIDIA_VISIBLE_DEVICES": "all"}
NO_NVML = FakeStaticNvml(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
NO_PERMISSION = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NO_PERMISSION}


class _NoBindings(FakeDriver):
    def cuInit(self, flags: int) -> tuple[Any, ...]:
        raise ModuleNotFoundError("No module named 'cuda'", name="cuda")


MACHINES: dict[str, Machine] = {
    "NO_GPU": Machine(NO_LIBRARY),
    "NO_DRIVER": Machine(NO_LIBRARY, pci=(NVIDIA_CARD,)),
    "NO_DRIVER_IN_CONTAINER": Machine(NO_LIBRARY, pci=(NVIDIA_CARD,), files={"/.dockerenv": ""}),
    "NO_DRIVER_IN_WSL": Machine(NO_LIBRARY, files={"/proc/version": WSL}),
    "OTHER_KERNEL_DRIVER": Machine(NO_LIBRARY, pci=(PciDevice("0000:01:00.0", 0x10DE, 0x28E0, driver="nouveau"),)),
    "NO_PERMISSION": without_cards(CUresult.CUDA_ERROR_NO_DEVICE, closed=("/dev/nvidiactl",)),
    "NO_COMPUTE_CAPABILITY": Machine(NO_LIBRARY, environ={**CAPABILITIES, "NVIDIA_DRIVER_CAPABILITIES": "video"}),
    "NO_BINDINGS": Machine(_NoBindings()),
    "HIDDEN": without_cards(CUresult.CUDA_ERROR_NO_DEVICE, environ={"CUDA_VISIBLE_DEVICES": ""}),
    "NOT_LISTED": with_cards(H200, pci=(PciDevice("0000:41:00.0", 0x10DE, 0x2335, driver="nvidia"),)),
    "PROHIBITED": with_cards(H200.but(COMPUTE_MODE=2)),
    "FAILED_HALF_WAY": with_cards(H200.but(failing={"cuDeviceGetName": CUresult.CUDA_ERROR_UNKNOWN})),
    "DRIVER_TOO_OLD": with_cards(H200, driver=FakeDriver(H200, version=12080)),
    "TORCH_WITHOUT_CUDA": with_cards(H200),
    "TORCH_OF_ANOTHER_MAKER": Machine(NO_LIBRARY, pci=(AMD_CARD,)),
    "NOT_LISTED_BY_TORCH": Machine(NO_LIBRARY, pci=(AMD_CARD,), torch=TorchListError("HIP error: no device")),
    "UNTESTED_BACKEND": Machine(NO_LIBRARY, pci=(AMD_CARD,), torch=[AMD_LISTED]),
    "DRIVER_LACKS_FUNCTION": with_cards(H200, driver=FakeDriver(H200, lacks=("cuDeviceGetCount",))),
    "ANSWERED": without_cards(CUresult.CUDA_ERROR_INVALID_VALUE),
    "L2_NOT_REPORTED": with_cards(H200.but(L2_CACHE_SIZE=0)),
    "WSL_NOT_PINNED": with_cards(RTX_4060_LAPTOP.but(HOST_REGISTER_SUPPORTED=0), files={"/proc/version": WSL}),
    "WSL_PINNED_LIMITED": with_cards(RTX_4060_LAPTOP, files={"/proc/version": WSL}),
    "NVML_NOT_IN_CONTAINER": with_cards(
        H200, nvml=NO_NVML, environ={**CAPABILITIES, "NVIDIA_DRIVER_CAPABILITIES": "compute"}
    ),
    "NVML_MISSING": with_cards(H200, nvml=NO_NVML),
    "NVML_REFUSED": with_cards(H200.but(refused=NO_PERMISSION)),
    "NARROW_LINK": with_cards(H200.but(link=(5, 5, 8, 16))),
    "MPS_NOT_RUNNING": with_cards(H200, environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}),
    "BAD_LIMIT": with_cards(H200, environ={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "x"}),
    **{code: without_cards(CUresult[code]) for code in DRIVER_ANSWERS},
}

ROCM = Runtime("", hip="6.4.43482")
RUNTIMES = {"TORCH_WITHOUT_CUDA": Runtime(""), "NOT_LISTED_BY_TORCH": ROCM, "UNTESTED_BACKEND": ROCM}


def section(title: str) -> list[tuple[str, str, str]]:
    """The rows of a section's table, without their code marks."""
    body = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip() for line in body.splitlines() if line.startswith("| ") and not line.startswith("| you see")]
    cells = [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows]
    return [tuple(cell.strip().replace(r"\|", "|").strip("`") for cell in row) for row in cells]  # type: ignore[misc]


def blanked(template: str) -> str:
    return re.sub(r"\{\w+\}", "…", template)


def pattern(text: str) -> str:
    """A row's text as a regular expression."""
    return ".+".join(re.escape(part) for part in text.split("…"))


def said(machine: Machine, folder: Path, runtime: Runtime = CUDA_13) -> list[str]:
    """Everything a user would be shown about the machine's devices."""
    inventory = take_inventory(machine.host(folder), runtime)
    texts = [inventory.cuda_problem]
    for device in inventory.devices:
        texts += [device.problem, device.runtime_problem, *device.notes]
    return [text for text in texts if text]


def test_the_page_and_the_code_have_the_same_rows() -> None:
    rows = section("A GPU is not used") + section("A GPU is used, with a remark")
    assert sorted(rows) == sorted((blanked(t.what), blanked(t.why), blanked(t.do)) for t in CATALOGUE.values())


def test_every_row_is_played() -> None:
    assert set(MACHINES) == set(CATALOGUE)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_the_message_is_what_the_machine_brings_forth(name: str, tmp_path: Path) -> None:
    trouble = CATALOGUE[name]
    runtime = RUNTIMES.get(name, CUDA_13)
    expected = pattern(blanked(trouble.what)) + "; " + pattern(blanked(trouble.do))
    texts = said(MACHINES[name], tmp_path / "machine", runtime)
    assert any(re.search(rf"^(every card is )?{expected}$", text) for text in texts), texts


@pytest.mark.parametrize("name", ["NO_BINDINGS", "TORCH_WITHOUT_CUDA"])
@pytest.mark.parametrize(("has_pip", "command"), [(True, "-m pip install "), (False, "uv pip install --python ")])
def test_what_installs_is_what_the_environment_has(
    name: str, has_pip: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "find_spec", lambda module: module if module == "pip" and has_pip else None)
    [text] = said(MACHINES[name], tmp_path / "machine", RUNTIMES.get(name, CUDA_13))
    assert command in text and sys.executable in text and ("-m pip" in text) is has_pip, text


@pytest.mark.parametrize("name", ["NO_DRIVER", "PROHIBITED", "NARROW_LINK"])
def test_a_machine_in_order_says_nothing(name: str, tmp_path: Path) -> None:
    assert said(with_cards(H200, pci=(NVIDIA_CARD,)), tmp_path / "machine") == []
    assert said(MACHINES[name], tmp_path / "other") != []


def _no_room(folder: Path) -> str:
    card = RTX_4060_LAPTOP.but(free=2 * GIB)
    return _refused(with_cards(card), folder, "qwen3-8b", "cuda")


def _wrong_format(folder: Path) -> str:
    return _refused(with_cards(TESLA_T4), folder, "qwen3-0.6b", "cuda")


def _refused(machine: Machine, folder: Path, model: str, requested: str) -> str:
    inventory = take_inventory(machine.host(folder), CUDA_13)
    with pytest.raises(NoDeviceError) as error:
        choose_device(inventory, requested, needs_of(RandomSource(model)))
    return str(error.value)


def _no_plan(folder: Path) -> str:
    with pytest.raises(PlanError) as error:
        plan_for(load_library("rtx4060-laptop"), RandomSource("qwen3-8b").config, Limits(), Switches())
    return str(error.value)


FITS: dict[str, Callable[[Path], str]] = {
    "… needs … for weights and one short sequence, … are free": _no_room,
    "… is computed in …, which needs compute capability …; this card has …": _wrong_format,
    "no device can run this: …": _no_room,
    "… does not fit on …: …, and … may be used: … are missing": _no_plan,
}


@pytest.mark.parametrize("row", [row[0] for row in section("The model does not fit")])
def test_a_model_that_does_not_fit_is_told_as_the_page_says(row: str, tmp_path: Path) -> None:
    text = FITS[row](tmp_path / "machine")
    assert re.search(pattern(row), text), text
    assert "What to do: " in text
    if FITS[row] is not _wrong_format:
        assert re.search(r"What to do: .*1\) .+; 2\) .+; 3\) ", text), text


def test_three_changes_for_a_model_that_is_far_too_large(tmp_path: Path) -> None:
    card = RTX_4060_LAPTOP.but(free=2 * GIB, holders=((1, 5 * GIB),))
    text = _refused(with_cards(card), tmp_path / "machine", "qwen3-8b", "cuda")
    assert "a smaller model: qwen3-0.6b has 1.11 GiB of weights instead of 15.26 GiB" in text
    assert "other processes hold 5.00 GiB" in text
