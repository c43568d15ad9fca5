"""What a launch is said to use against what compiled kernels use, and who fits where. The table itself needs no Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dragoman_kernels.contract import SHARED_LIMIT_BYTES
from dragoman_kernels.registry import default_registry
from dragoman_kernels.triton.launches import (
    DECODE_LAUNCHES,
    DEPENDENT_KERNELS,
    MAX_NUM_REGISTERS,
    PREFILL_LAUNCHES,
    TMA_PREFILL_LAUNCHES,
    DecodeLaunch,
    PrefillLaunch,
    decode_launches,
    decode_resources,
    prefill_launches,
    prefill_resources,
    tma_prefill_launches,
)

# Of kernels compiled for sm_90 and sm_80, 16 query and 8 KV heads of 128 values: shared bytes.
COMPILED_DECODE = {
    (64, 4, 3, 64): 38916, (64, 4, 5, 64): 71688, (64, 4, 7, 64): 104460, (64, 2, 3, 64): 38916, (32, 4, 4, 64): 21508,
    (128, 4, 3, 128): 73732, (16, 4, 3, 64): 12804, (64, 4, 3, 16): 39168, (64, 4, 5, 16): 72192,
}  # fmt: skip
COMPILED_PREFILL = {
    ((64, 64, 4, 3), 64, (9, 0)): 81924, ((64, 64, 4, 5), 64, (9, 0)): 114696, ((128, 64, 8, 3), 64, (9, 0)): 98308,
    ((128, 128, 8, 3), 128, (9, 0)): 163844, ((64, 64, 4, 3), 16, (9, 0)): 82176, ((64, 32, 4, 3), 64, (9, 0)): 49156,
    ((64, 64, 8, 3), 64, (8, 9)): 57348, ((64, 64, 4, 5), 64, (8, 0)): 90120, ((64, 64, 8, 3), 16, (8, 0)): 57600,
    ((64, 32, 4, 3), 64, (8, 9)): 36868,
}  # fmt: skip


def printed(code: str) -> list[list[int]]:
    """The numbers in each line that `code` prints where Triton compiles, in a process of its own."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, env=environ
    )
    assert done.returncode == 0, done.stderr
    return [list(map(int, line.split())) for line in done.stdout.splitlines()]


def test_shared_memory_of_decode_is_that_of_compiled_kernels() -> None:
    for (block_n, num_warps, num_stages, page), shared in COMPILED_DECODE.items():
        said = decode_resources(DecodeLaunch(block_n, num_warps, num_stages), 2, 128, page).shared_bytes
        assert shared <= said <= shared + 64, (block_n, num_warps, num_stages, page)


def test_shared_memory_of_prefill_bounds_that_of_compiled_kernels() -> None:
    for (launch, page, capability), shared in COMPILED_PREFILL.items():
        said = prefill_resources(PrefillLaunch(*launch), 128, page, capability).shared_bytes
        assert shared - 16 <= said <= shared + 1024, (launch, page, capability)


def test_a_new_compilation_uses_what_is_said() -> None:
    code = (
        "import torch\n"
        "from dragoman_kernels.triton import aot, attention_decode as ad\n"
        "cache = torch.zeros((2, 8, 64, 128), dtype=torch.bfloat16)\n"
        "ints = lambda *size: torch.zeros(size, dtype=torch.int32)\n"
        "work = ad.DecodeWorkspace(1, 16, 128, 4, torch.device('cpu'))\n"
        "with aot.compiling_for(90) as found:\n"
        "    q = torch.zeros((1, 16, 128), dtype=torch.bfloat16)\n"
        "    ad.paged_decode_attention(q, cache, cache, ints(1, 4), ints(1), work, 4, block_n=64, num_stages=5, num_warps=4)\n"
        "for name, compiled, _ in found.values():\n"
        "    print(name, compiled.metadata.shared, aot.resource_usage(compiled.asm['cubin'])[0])\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, env=environ
    )
    assert done.returncode == 0, done.stderr
    used = {name: (int(shared), int(registers)) for name, shared, registers in map(str.split, done.stdout.splitlines())}
    shared, registers = used["triton.decode_split"]
    said = decode_resources(DecodeLaunch(64, 4, 5), 2, 128, 64)
    assert abs(said.shared_bytes - shared) <= 64
    assert registers <= 1.4 * said.num_registers


def test_a_kernel_that_groups_sequences_takes_one_word_more_and_no_other_memory() -> None:
    """Compiled for sm_80 and sm_90: the kernel without groups knows nothing of the word."""
    code = (
        "from dragoman_kernels.triton import aot\n"
        "from dragoman_kernels.triton.launches import DecodeLaunch\n"
        "shape = aot.ModelShape('m', 16, 8, 128, 512, 512, 1024, False)\n"
        "for capability in (80, 90):\n"
        "    for grouped in (False, True):\n"
        "        with aot.compiling_for(capability) as found:\n"
        "            aot.launch_decode(shape, 64, DecodeLaunch(64, 4, 5), grouped=grouped)\n"
        "        for name, one, text in found.values():\n"
        "            if name == 'triton.decode_split' and 'NUM_SPLITS=1 ' in text:\n"
        "                words = one.asm['ptx'].count('\\t.param .')\n"
        "                print(words, one.metadata.shared, *aot.resource_usage(one.asm['cubin']))\n"
    )
    lines = printed(code)
    assert len(lines) == 4
    for plain, grouped in zip(lines[::2], lines[1::2], strict=True):
        assert (grouped[0], grouped[1]) == (plain[0] + 1, plain[1])
        assert plain[3] == grouped[3] == 0 and grouped[2] <= MAX_NUM_REGISTERS


@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT_BYTES))
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_every_architecture_has_launches_that_fit(capability: int, head_dim: int, page: int) -> None:
    limit = SHARED_LIMIT_BYTES[capability]
    version = divmod(capability, 10)
    decode = decode_launches(4, head_dim, page, limit)
    prefill = prefill_launches(head_dim, page, version, limit)
    assert len(decode) >= 4 and len(prefill) >= 2
    for launch in decode:
        assert decode_resources(launch, 4, head_dim, page).shared_bytes <= limit
    for choice in prefill:
        used = prefill_resources(choice, head_dim, page, version)
        assert used.shared_bytes <= limit and used.num_registers <= MAX_NUM_REGISTERS


def test_spilling_launches_are_left_out_where_operands_go_through_registers() -> None:
    """Four warps at 64 x 64 and head size 128 spill on sm_80, 86, 89 and 120, and do not on sm_90."""
    assert PrefillLaunch(64, 64, 4, 3) in prefill_launches(128, 64, (9, 0), 227 << 10)
    assert PrefillLaunch(64, 64, 4, 3) not in prefill_launches(128, 64, (8, 9), 99 << 10)
    assert PrefillLaunch(64, 64, 8, 3) in prefill_launches(128, 64, (8, 9), 99 << 10)


def test_little_shared_memory_leaves_fewer_and_none() -> None:
    assert len(decode_launches(4, 128, 64, 40 << 10)) < len(DECODE_LAUNCHES)
    assert decode_launches(4, 128, 64, 8 << 10) == ()
    assert prefill_launches(128, 64, (9, 0), 8 << 10) == ()
    assert len(prefill_launches(64, 64, (9, 0), 227 << 10)) == len(PREFILL_LAUNCHES)


def test_launches_by_tensor_descriptors_use_what_is_said_and_keep_their_contract() -> None:
    """Compiled for sm_90: the largest and the smallest at both head sizes."""
    code = (
        "from dragoman_kernels.triton import aot\n"
        "from dragoman_kernels.triton.launches import tma_prefill_launches, ws_prefill_launches\n"
        "for dim in (64, 128):\n"
        "    shape = aot.ModelShape('m', 8, 2, dim, 512, 512, 1024, False)\n"
        "    launches = tma_prefill_launches(dim, 64, (9, 0), 227 << 10)\n"
        "    roles = ws_prefill_launches(dim, 64, (9, 0), 227 << 10)\n"
        "    for launch in (*launches, roles[-1]):\n"
        "        with aot.compiling_for(90) as found:\n"
        "            aot.launch_prefill(shape, 64, launch)\n"
        "        (name, compiled, constants), = found.values()\n"
        "        used = *aot.resource_usage(compiled.asm['cubin']), compiled.metadata.shared\n"
        "        assert name == ('triton.prefill_ws' if launch in roles else 'triton.prefill_tma')\n"
        "        assert not aot.Build(name, 90, *used, constants).problems()\n"
        "        assert 'cp.async.bulk.tensor.2d' in compiled.asm['ptx']\n"
        "        print(dim, launch.block_m, launch.block_n, launch.num_warps, launch.num_stages, *used)\n"
    )
    lines = printed(code)
    assert len(lines) == 6
    for dim, *sizes, registers, spilled, shared in lines:
        said = prefill_resources(PrefillLaunch(*sizes, tma=True), dim, 64, (9, 0))
        assert shared <= said.shared_bytes <= shared + 512, (dim, sizes)
        assert spilled == 0 and registers <= 1.3 * said.num_registers, (dim, sizes)


def test_tensor_descriptors_need_whole_pages_powers_of_two_and_hopper() -> None:
    limit = 227 << 10
    assert set(tma_prefill_launches(128, 64, (9, 0), limit)) >= set(TMA_PREFILL_LAUNCHES)
    assert tma_prefill_launches(64, 128, (10, 0), limit) == TMA_PREFILL_LAUNCHES
    for head_dim, page, capability in ((128, 16, (9, 0)), (80, 64, (9, 0)), (128, 64, (8, 0)), (128, 64, (12, 0))):
        assert tma_prefill_launches(head_dim, page, capability, limit) == ()
    assert len(tma_prefill_launches(128, 64, (9, 0), 99 << 10)) < len(TMA_PREFILL_LAUNCHES)


def test_what_may_start_early_is_registered_and_says_so_in_its_source() -> None:
    from pathlib import Path

    registry = default_registry()
    folder = Path(sys.modules["dragoman_kernels.triton.launches"].__file__ or "").parent
    sources = "".join(path.read_text() for path in folder.glob("*.py"))
    for name in DEPENDENT_KERNELS:
        registry.get(name)
        function = f"def _{name.removeprefix('triton.')}_kernel("
        start = sources.index(function)
        assert "DEPENDENT: tl.constexpr" in sources[start : start + 900], name


def test_the_table_needs_no_triton() -> None:
    code = "import sys; import dragoman_kernels.triton.launches; assert not {'torch', 'triton'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
