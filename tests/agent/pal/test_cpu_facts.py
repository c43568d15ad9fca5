"""The CPU's facts beside what the C library says, and under a container's limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fakes.cuda_driver import FakeDriver
from tests.fakes.machines import Machine

from dragoman_agent.pal.cpu_facts import cpu_device, usable_cores

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: fpu sse2 avx2 fma\n"
CACHE = "/sys/devices/system/cpu/cpu0/cache/index"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="sysconf's names are glibc's")
def test_as_the_c_library_says() -> None:
    values = {name: value.value for name, value in cpu_device().values.items()}
    assert values["compute.cores"] == usable_cores() == len(os.sched_getaffinity(0))
    assert values["memory.total"] <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < values["memory.free"] <= values["memory.total"]
    for level, name in (
        ("l1", "SC_LEVEL1_DCACHE_SIZE"),
        ("l2", "SC_LEVEL2_CACHE_SIZE"),
        ("l3", "SC_LEVEL3_CACHE_SIZE"),
    ):
        known = os.sysconf(name) if name in os.sysconf_names else 0
        if known > 0 and f"memory.{level}_size" in values:
            assert values[f"memory.{level}_size"] == known


def test_instruction_set_name_and_caches_of_another_machine(tmp_path: Path) -> None:
    files = {
        "/proc/cpuinfo": CPUINFO,
        f"{CACHE}0/size": "48K", f"{CACHE}0/level": "1", f"{CACHE}0/type": "Data",
        f"{CACHE}1/size": "32K", f"{CACHE}1/level": "1", f"{CACHE}1/type": "Instruction",
        f"{CACHE}2/size": "32M", f"{CACHE}2/level": "3", f"{CACHE}2/type": "Unified",
        f"{CACHE}3/size": "odd", f"{CACHE}3/level": "4", f"{CACHE}3/type": "Unified",
        "/etc/machine-id": "abc",
    }  # fmt: skip
    device = cpu_device(Machine(FakeDriver(), files=files).host(tmp_path))
    assert device.facts.name == "Some CPU @ 3 GHz"
    assert device.facts.uuid == "abc"
    assert device.values["compute.instruction_set"].value == "avx2"
    sizes = {name: value.value for name, value in device.values.items() if name.endswith("_size")}
    assert sizes == {"memory.l1_size": 48 << 10, "memory.l3_size": 32 << 20}


def test_a_containers_limit_bounds_total_and_free_and_is_in_the_fingerprint(tmp_path: Path) -> None:
    cgroup = "/sys/fs/cgroup/memory"
    files = {
        f"{cgroup}.max": "1073741824",
        f"{cgroup}.current": "900000000",
        f"{cgroup}.stat": "anon 100000000\ninactive_file 800000000\n",
    }
    limited = cpu_device(Machine(FakeDriver(), files=files).host(tmp_path / "limited"))
    assert limited.facts.memory_bytes == 1 << 30
    assert limited.values["memory.free"].value == (1 << 30) - 100_000_000, "cached file pages can be dropped"
    free = cpu_device(Machine(FakeDriver(), files={f"{cgroup}.max": "max"}).host(tmp_path / "free"))
    assert free.facts.memory_bytes > 1 << 30
    assert free.fingerprint != limited.fingerprint
