"""The capability matrix keeps to its published schema, whatever the machine."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from tests.fakes.cuda_driver import GIB, H200, RTX_4060_LAPTOP, CUresult, FakeDriver
from tests.fakes.machines import CUDA_13, INTEL_GRAPHICS, NVIDIA_CARD, Machine, with_cards, without_cards

from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.found import Inventory
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.matrix import SCHEMA_FILE, any_model_selection, capability_matrix

SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
MACHINES = {
    "h200": with_cards(H200.but(holders=((1, GIB),))),
    "laptop": with_cards(RTX_4060_LAPTOP, pci=(INTEL_GRAPHICS, NVIDIA_CARD)),
    "old driver": with_cards(H200, driver=FakeDriver(H200, version=11080)),
    "broken": without_cards(CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
    "none": Machine(FakeDriver(has_library=False)),
    "half-way": with_cards(H200.but(failing={"cuDeviceTotalMem": CUresult.CUDA_ERROR_UNKNOWN})),
}


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_keeps_to_the_schema(name: str, tmp_path: Path) -> None:
    inventory = take_inventory(MACHINES[name].host(tmp_path / "machine"), CUDA_13)
    profiles = [load_library("rtx4060-laptop")]
    matrix = json.loads(json.dumps(capability_matrix(inventory, profiles, from_cache=False)))
    jsonschema.Draft202012Validator(SCHEMA).validate(matrix)
    assert len(matrix["devices"]) == len(inventory.devices)
    assert [device["chosen"] for device in matrix["devices"]].count(True) == 1
    assert all(device["reason"] for device in matrix["devices"])
    for device in matrix["devices"]:
        assert device["usable"] == (not device["problem"] and not device["runtime_problem"])


def test_values_of_a_device_carry_their_source(tmp_path: Path) -> None:
    inventory = take_inventory(MACHINES["h200"].host(tmp_path / "machine"), CUDA_13)
    device = capability_matrix(inventory, [], from_cache=True)["devices"][0]
    assert device["values"]["memory.l2_size"] == {
        "value": 62_914_560, "unit": "bytes", "provenance": "reported", "spread": None, "note": "", "labels": []
    }  # fmt: skip
    assert device["values"]["compute.dtypes"]["provenance"] == "derived"
    assert device["holders"][0]["held_bytes"] == GIB


def test_where_no_device_can_be_used_each_says_why(tmp_path: Path) -> None:
    inventory = take_inventory(MACHINES["broken"].host(tmp_path / "machine"), CUDA_13)
    alone = Inventory(tuple(device for device in inventory.devices if device.facts.kind == "cuda"), "803")
    assert any_model_selection(alone) is None
    device = capability_matrix(alone, [], from_cache=False)["devices"][0]
    assert not device["chosen"]
    assert "(803)" in device["reason"]
