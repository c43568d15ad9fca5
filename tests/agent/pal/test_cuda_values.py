"""What the fakes play against the real bindings, and what is derived from reported values."""

from __future__ import annotations

import ast
import inspect
import re

import pynvml
import pytest
from tests.fakes import cuda_driver

from dragoman_agent.pal import cuda_facts, nvml_facts
from dragoman_agent.pal.cuda_values import ATTRIBUTES, capability_of, derived_values
from dragoman_agent.pal.profile import Value
from dragoman_agent.pal.profile_schema import check_name, check_value
from dragoman_agent.pal.troubles import DRIVER_ANSWERS

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is for Linux on x86-64")


def test_every_attribute_is_one_of_the_driver() -> None:
    real = set(driver.CUdevice_attribute.__members__)
    asked = set(re.findall(r'attribute\(f?"([A-Z_]+)"', inspect.getsource(cuda_facts)))
    assert {"COMPUTE_MODE", "MPS_ENABLED", "INTEGRATED"} <= asked
    for name in {fact.attribute for fact in ATTRIBUTES} | asked | set(cuda_driver.H200_ATTRIBUTES):
        assert f"CU_DEVICE_ATTRIBUTE_{name}" in real


def test_at_least_thirty_attributes_and_no_name_twice() -> None:
    names = [fact.name for fact in ATTRIBUTES]
    assert len(names) >= 30
    assert len(set(names)) == len(names)
    for fact in ATTRIBUTES:
        value = fact.value(1)
        assert value is not None
        check_name(fact.name)
        check_value(fact.name, value.value, value.unit, value.provenance)


def test_statuses_have_the_drivers_numbers() -> None:
    real = driver.CUresult
    for status in cuda_driver.CUresult:
        assert int(getattr(real, status.name)) == status.value
    for code, trouble in DRIVER_ANSWERS.items():
        assert trouble.what.endswith(f"{code} ({int(getattr(real, code))})")


def test_every_function_that_is_called_exists() -> None:
    called = set(re.findall(r'"(cu[A-Z]\w+)"', inspect.getsource(cuda_facts)))
    assert len(called) >= 6
    for name in called | {"cuInit", "cuGetErrorName"}:
        assert callable(getattr(driver, name))
    tree = ast.parse(inspect.getsource(nvml_facts))
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith(("nvml", "NVML"))
    }
    names |= set(re.findall(r'"(nvmlDevice\w+)"', inspect.getsource(nvml_facts)))
    assert len(names) >= 15
    for name in names:
        assert hasattr(pynvml, name), name


@pytest.mark.parametrize(
    ("capability", "dtypes", "dependent"),
    [
        ("7.0", "float16", False),
        ("7.5", "float16 int8", False),
        ("8.0", "bfloat16 float16 int8", False),
        ("8.9", "bfloat16 float16 float8 int8", False),
        ("9.0", "bfloat16 float16 float8 int8", True),
        ("12.0", "bfloat16 float16 float8 int8", True),
    ],
)
def test_what_follows_from_the_capability(capability: str, dtypes: str, dependent: bool) -> None:
    derived = derived_values({"compute.capability": Value(capability, "", "reported")})
    assert derived["compute.dtypes"].value == dtypes
    assert derived["compute.dependent_launch"].value is dependent
    assert {value.provenance for value in derived.values()} == {"derived"}


@pytest.mark.parametrize(
    ("clock", "width", "rate"),
    [
        (3.201e9, 6016, 4.814e12),  # H200: 4.8 TB/s on its sheet
        (8.001e9, 128, 2.56e11),  # RTX 4060 Laptop: 256 GB/s
        (1.593e9, 5120, 2.039e12),  # A100 80 GB: 2,039 GB/s
        (10.501e9, 384, 1.008e12),  # RTX 4090: 1,008 GB/s
    ],
)
def test_the_bus_carries_what_the_vendors_sheets_say(clock: float, width: int, rate: float) -> None:
    values = {"memory.max_clock": Value(clock, "Hz", "reported"), "memory.bus_width": Value(width, "bits", "reported")}
    assert derived_values(values)["memory.bus_bandwidth"].value == pytest.approx(rate, rel=2e-3)


def test_nothing_is_derived_from_what_is_not_there() -> None:
    assert derived_values({}) == {}
    assert capability_of({"compute.capability": Value("unknown", "", "reported")}) is None
