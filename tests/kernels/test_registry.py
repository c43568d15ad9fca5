"""Contracts and registration; the package stays light at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dragoman_kernels.contract import ContractError, KernelContract
from dragoman_kernels.registry import Registry, default_registry

CONTRACT = KernelContract(
    bound="bandwidth",
    dimensions=("rows",),
    bytes_moved=lambda s: 4 * s["rows"],
    flops=lambda s: 2 * s["rows"],
    phases=lambda s: 1,
)


def test_a_kernel_without_a_contract_is_refused() -> None:
    registry = Registry()
    with pytest.raises(ContractError, match="'copy' has no contract"):
        registry.register("copy")
    assert registry.names() == ()


def test_names_are_unique_and_unknown_ones_list_the_known() -> None:
    registry = Registry()
    registry.register("copy", contract=CONTRACT)(lambda: "kernel")
    assert registry.get("copy").load() == "kernel"
    with pytest.raises(ValueError, match="already registered"):
        registry.register("copy", contract=CONTRACT)
    with pytest.raises(KeyError, match=r"no kernel 'move'; registered: copy"):
        registry.get("move")


def test_a_contract_names_what_a_shape_lacks_and_refuses_nonsense() -> None:
    with pytest.raises(ContractError, match="shape lacks rows"):
        CONTRACT.cost({"cols": 1})
    with pytest.raises(ContractError, match="bound"):
        KernelContract("speed", ("n",), lambda s: 1, lambda s: 1, lambda s: 1)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="dimensions"):
        KernelContract("latency", (), lambda s: 1, lambda s: 1, lambda s: 1)


def test_the_cpu_step_is_registered_and_its_cost_is_the_embedded_models() -> None:
    kernel = default_registry().get("cpu.llama_step")
    shape = {
        "num_layers": 30,
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "num_tokens": 1,
        "num_seqs": 1,
        "num_logit_seqs": 1,
        "num_context_tokens": 100,
        "weight_bytes": 96_600_000,
        "layer_parameters": 106_168_320,
        "kv_value_bytes": 2,
    }
    cost = kernel.contract.cost(shape)
    # K and V in half precision: 30 layers x 2 x 3 heads x 64 x 100 tokens x 2 bytes.
    assert cost.num_bytes == 96_600_000 + 2_304_000 + 4 * 49152
    assert cost.num_flops == 2 * (106_168_320 + 49152 * 576) + 4 * 30 * 9 * 64 * 100
    assert cost.num_phases == 5 * 30 + 3
    fast = cost.seconds(bytes_per_second=1e12, flops_per_second=1e15, phase_seconds=1e-6)
    assert fast == pytest.approx(153e-6 + cost.num_bytes / 1e12)


def test_importing_loads_neither_torch_nor_grpc_and_compiles_nothing() -> None:
    code = (
        "import sys, subprocess\n"
        "subprocess.Popen.__init__ = None\n"  # any compiler run would fail
        "import dragoman_kernels, dragoman_kernels.registry\n"
        "import dragoman_kernels.cpu.llama\n"
        "dragoman_kernels.registry.default_registry().get('cpu.llama_step').load()\n"
        "assert not {'torch', 'grpc', 'triton'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
