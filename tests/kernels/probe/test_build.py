"""The micro-benchmark kernels compile for every supported card without one, keep their contracts, and are compiled once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman_kernels.contract import SHARED_LIMIT_BYTES
from dragoman_kernels.probe import build as build_module
from dragoman_kernels.probe.build import SOURCES, KernelCompileError, build, compile_source, target_for
from dragoman_kernels.probe.contracts import PROBE_CONTRACTS
from dragoman_kernels.registry import default_registry

pytest.importorskip("cuda.bindings.nvrtc")

NAMES = ("atomics", "chase", "launch", "random", "stream")
SINCE = {"exchange_128": 90}  # instructions that older cards do not have
USAGE = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<spilled>\d+) bytes spill stores.*?Used (?P<registers>\d+) registers"
    r"(?P<rest>[^\n]*)",
    re.DOTALL,
)


def usage(log: str) -> dict[str, tuple[int, int, int]]:
    """Registers a thread, bytes spilled a thread, bytes of shared memory a block, by kernel, from the compiler's log."""
    found = {}
    for match in USAGE.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found[match["name"]] = (int(match["registers"]), int(match["spilled"]), int(shared[1]) if shared else 0)
    return found


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT_BYTES))
def test_every_kernel_keeps_its_contract_on_every_architecture(capability: int) -> None:
    seen = set()
    for name in NAMES:
        binary, log = compile_source((SOURCES / f"{name}.cu").read_bytes(), f"{name}.cu", f"sm_{capability}")
        assert binary[:4] == b"\x7fELF"
        for kernel, (registers, spilled, shared) in usage(log).items():
            source, contract = PROBE_CONTRACTS[kernel]
            budget = contract.resources
            assert source == name and budget is not None
            assert registers <= budget.max_num_registers, f"{kernel}: {registers} registers"
            assert spilled <= budget.max_spill_bytes, f"{kernel}: {spilled} bytes spilled"
            assert shared <= budget.shared_limit(capability), f"{kernel}: {shared} bytes of shared memory"
            seen.add(kernel)
    assert seen == {kernel for kernel in PROBE_CONTRACTS if SINCE.get(kernel, 0) <= capability}


def test_the_deep_streams_keep_all_their_loads_in_flight() -> None:
    _, log = compile_source((SOURCES / "stream.cu").read_bytes(), "stream.cu", "sm_90")
    registers = {name: count for name, (count, _, _) in usage(log).items()}
    # Sixteen bytes are four registers; a compiler that loads in turns needs far fewer.
    assert registers["read_8"] > 32 + 4 and registers["copy_8"] > 32 + 4


def test_every_source_is_checked() -> None:
    assert sorted(path.stem for path in SOURCES.glob("*.cu")) == list(NAMES)
    text = "".join(path.read_text() for path in SOURCES.glob("*.cu"))
    text = re.sub(r"__launch_bounds__\([^)]*\) ", "", text)
    declared = set(re.findall(r"__global__ void (\w+)\(", text)) - {"read_", "copy_"}  # two families, by macro
    families = {name for name in PROBE_CONTRACTS if name.startswith(("read_", "copy_"))}
    assert declared == set(PROBE_CONTRACTS) - families


def test_contracts_are_registered_and_say_what_moves() -> None:
    registry = default_registry()
    for name, (source, _) in PROBE_CONTRACTS.items():
        assert registry.get(f"probe.{name}").load() == (source, name)
    assert registry.get("probe.read_8").contract.cost({"num_bytes": 1 << 30}).num_bytes == 1 << 30
    assert registry.get("probe.copy_4").contract.cost({"num_bytes": 1 << 30}).num_bytes == 2 << 30
    chase = registry.get("probe.chase").contract.cost({"num_steps": 100})
    assert chase.num_phases == 100


def test_a_binary_runs_on_later_minor_versions_and_else_the_driver_gets_ptx() -> None:
    known = [80, 86, 89, 90, 100, 120]
    assert target_for(90, known) == "sm_90"
    assert target_for(87, known) == "sm_86"
    assert target_for(121, known) == "sm_120"
    assert target_for(130, known) == "compute_120"
    with pytest.raises(KernelCompileError, match="compiles for 80 and later, not for compute capability 75"):
        target_for(75, known)


def test_a_card_newer_than_the_compiler_gets_ptx() -> None:
    code, _ = compile_source((SOURCES / "chase.cu").read_bytes(), "chase.cu", "compute_90")
    assert b".target sm_90" in code


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build("chase", 90, tmp_path)
    monkeypatch.setattr(build_module, "compile_source", lambda *_: pytest.fail("compiled again"))
    assert build("chase", 90, tmp_path) == first
    monkeypatch.setattr(build_module, "compile_source", lambda *_: (b"another", ""))
    assert build("chase", 89, tmp_path) == b"another"  # another card
    monkeypatch.setattr(build_module, "_OPTIONS", (*build_module._OPTIONS, "--fmad=false"))
    assert build("chase", 90, tmp_path) == b"another"  # other options


def test_a_cache_that_cannot_be_written_costs_a_compilation(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("in the way")
    assert build("chase", 90, tmp_path)[:4] == b"\x7fELF"


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(KernelCompileError, match=r"wrong\.cu does not compile for sm_90.*wrong\.cu\(1\): error"):
        compile_source(b"__global__ void f() { undefined(); }", "wrong.cu", "sm_90")


def test_importing_needs_no_cuda() -> None:
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import dragoman_kernels.probe.driver, dragoman_kernels.probe.build, dragoman_kernels.registry\n"
        "dragoman_kernels.registry.default_registry()\n"
        "from dragoman_kernels.probe.build import build, KernelCompileError\n"
        "try: build('chase', 90)\n"
        "except KernelCompileError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "NVRTC cannot be loaded" in done.stdout and "install the agent extra" in done.stdout
