"""Every Triton kernel compiles without a GPU and keeps its contract; `make aot` does it for all models and targets."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman_kernels.contract import SHARED_LIMIT_BYTES, ContractError, ResourceBudget
from dragoman_kernels.registry import default_registry
from dragoman_kernels.triton.contracts import TRITON_CONTRACTS, contract_name

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "gpu_agent" / "dragoman_agent" / "model" / "configs"
KERNELS = ROOT / "kernels" / "dragoman_kernels" / "triton"


def kernel_functions() -> set[str]:
    """Names of the Triton functions that are launched, from the sources."""
    return {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list
    }


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *(("-c", code) if code else ()), *args],
        capture_output=True, text=True, check=False, timeout=300, env=environ,
    )  # fmt: skip


def test_every_triton_kernel_has_a_contract_and_every_contract_a_kernel() -> None:
    assert len(kernel_functions()) >= 11
    assert {contract_name(name) for name in kernel_functions()} == set(TRITON_CONTRACTS)


def test_contracts_are_registered_with_resources_and_evaluate() -> None:
    registry = default_registry()
    for name in TRITON_CONTRACTS:
        contract = registry.get(name).contract
        assert contract.resources is not None
        cost = contract.cost(dict.fromkeys(contract.dimensions, 2))
        assert cost.num_bytes > 0


def test_the_decode_contract_moves_each_context_once() -> None:
    contract = default_registry().get("triton.decode_split").contract
    shape = {"num_seqs": 4, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_context_tokens": 4000}
    cost = contract.cost({**shape, "num_splits": 1})
    assert cost.num_bytes == 2 * 2 * 8 * 128 * 4000 + 4 * 32 * 2 * 2 * 128
    assert cost.num_flops == 4 * 32 * 128 * 4000


def test_the_contract_of_a_list_counts_every_word_of_an_item_that_is_written() -> None:
    contract = default_registry().get("triton.decode_list").contract
    assert contract.cost({"num_seqs": 10, "num_items": 32}).num_bytes == 4 * 10 + 32 * 4 * 6


def test_a_budget_knows_its_architectures() -> None:
    assert ResourceBudget(64).shared_limit(89) == 99 << 10
    assert ResourceBudget(64, max_shared_bytes=1024).shared_limit(90) == 1024
    with pytest.raises(ContractError, match="compute capability 75; known: 80, 86"):
        ResourceBudget(64).shared_limit(75)
    assert set(SHARED_LIMIT_BYTES) == {80, 86, 89, 90, 100, 120}


def test_one_model_compiles_for_one_target_within_its_contracts() -> None:
    config = str(CONFIGS / "smollm2-135m.json")
    done = run("", "-m", "dragoman_kernels.triton.aot", config, "--capability", "89", "--page", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in set(TRITON_CONTRACTS) - {"triton.prefill_tma", "triton.prefill_ws"}:
        assert any(line.startswith(name) and line.endswith("kept") for line in done.stdout.splitlines()), done.stdout


def test_the_same_model_compiles_for_an_amd_target_without_spilling() -> None:
    """No GPU of that maker, no ROCm; gfx1100 takes minutes and is left to `make aot`."""
    config = str(CONFIGS / "smollm2-135m.json")
    done = run("", "-m", "dragoman_kernels.triton.aot", config, "--hip", "gfx942", "--page", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("triton.")}
    only_nvidia = {
        "triton.decode_list",  # a plan has lists where they were timed
        "triton.decode_items",
        "triton.gemm_decode",
        "triton.gemm_fixed",
        "triton.attention_fixed",
        "triton.fold_fixed",
        "triton.prefill_tma",
        "triton.prefill_ws",
    }
    assert set(lines) == set(TRITON_CONTRACTS) - only_nvidia
    assert all("gfx942" in line and line.endswith("kept, never run") for line in lines.values())


def test_what_an_amd_kernel_uses_is_read_from_its_assembly() -> None:
    code = (
        "from dragoman_kernels.triton.aot_hip import HipBuild, resource_usage\n"
        "text = '    .sgpr_spill_count: 1\\n    .vgpr_count:     512\\n    .vgpr_spill_count: 223\\n'\n"
        "print(*resource_usage(text))\n"
        "print(HipBuild('triton.prefill', 'gfx1100', 257, 223, 65537, 'M=64').problems())\n"
        "print(HipBuild('triton.prefill', 'gfx942', 512, 0, 65536, 'M=64').problems())\n"
        "try:\n    resource_usage('')\nexcept RuntimeError as error:\n    print(error)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    usage, over, within, unknown = done.stdout.splitlines()
    assert usage == "512 223" and within == "[]" and "says no vgpr_count" in unknown
    assert "257 registers a thread, 256 allowed" in over and "223 registers spilled, 0 allowed" in over
    assert "65537 bytes of shared memory a work group, 65536 allowed" in over


def test_a_kernel_over_its_budget_or_without_a_contract_is_reported() -> None:
    code = (
        "from dragoman_kernels.triton.aot import Build\n"
        "print(Build('triton.rms_norm', 89, 65, 8, 2048, 'BLOCK=1').problems())\n"
        "print(Build('triton.rms_norm', 89, 64, 0, 1024, 'BLOCK=1').problems())\n"
        "print(Build('triton.new', 89, 1, 0, 0, '').problems())\n"
        "print(Build('cpu.llama_step', 89, 1, 0, 0, '').problems())\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    over, within, unknown, cpu = done.stdout.splitlines()
    assert "65 registers a thread, 64 allowed" in over and "8 bytes spilled" in over and "2048 bytes of shared" in over
    assert within == "[]"
    assert "triton.new has no contract" in unknown and "names no resources" in cpu


def test_spills_are_read_from_the_binary() -> None:
    code = (
        "import torch\n"
        "from dragoman_kernels.triton import aot, attention_prefill as ap\n"
        "cache = torch.zeros((2, 8, 64, 128), dtype=torch.bfloat16)\n"
        "ints = lambda *size: torch.zeros(size, dtype=torch.int32)\n"
        "with aot.compiling_for(89) as found:\n"
        "    q = torch.zeros((2, 32, 128), dtype=torch.bfloat16)\n"
        "    ap.paged_prefill_attention(q, cache, cache, ints(1, 4), ints(2), ints(1), ints(1, 2), num_warps=2)\n"
        "(_, compiled, _), = found.values()\n"
        "print(*aot.resource_usage(compiled.asm['cubin']))\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    registers, spilled = map(int, done.stdout.split())
    assert registers > 200 and spilled > 100


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 64}')
    done = run("", "-m", "dragoman_kernels.triton.aot", str(config))
    assert done.returncode == 2
    assert "num_attention_heads" in done.stderr and "Traceback" not in done.stderr
