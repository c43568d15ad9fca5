"""Every Triton op against float64, under the interpreter (float16 and float32: bf16 arithmetic is wrong there)."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("check_ops.py")
LISTS = Path(__file__).with_name("check_list.py")
WARP_ROLES = Path(__file__).with_name("warp_roles.py")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_ops_equal_float64_under_the_interpreter(dtype: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "cpu", dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") >= 11 and done.stdout.count("prefill-tma") == 5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_work_lists_are_whole_and_even_and_attention_by_them_equals_float64(dtype: str) -> None:
    done = subprocess.run([sys.executable, str(LISTS), "cpu", dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") == 5


def test_prefill_with_roles_for_warps_equals_float64_with_threads_for_warps() -> None:
    done = subprocess.run([sys.executable, str(WARP_ROLES)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok") == 12


def test_the_kernels_idea_of_greedy_is_the_samplers() -> None:
    from dragoman_agent.engine.sampling_terms import GREEDY_BELOW
    from dragoman_kernels.triton import sampling

    assert sampling.GREEDY_BELOW == GREEDY_BELOW


def test_a_descriptor_is_made_once_and_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dragoman_kernels.triton import attention_prefill_tma

    monkeypatch.setattr(attention_prefill_tma, "_INTERPRETED", False)
    cache = torch.zeros((3, 2, 64, 128), dtype=torch.bfloat16)
    first = attention_prefill_tma.cache_descriptor(cache, 64)
    assert first is attention_prefill_tma.cache_descriptor(cache, 64)
    assert (first.base.data_ptr(), first.shape, first.strides) == (cache.data_ptr(), [3 * 2 * 64, 128], [128, 1])
    assert attention_prefill_tma.cache_descriptor(cache, 32).block_shape == [32, 128]
    assert attention_prefill_tma.cache_descriptor(cache[:2], 64).shape == [2 * 2 * 64, 128]
    held = weakref.ref(cache)
    del cache
    assert held() is None, "a cache that a tuner timed, or a model that was unloaded, would stay on the card"


@pytest.mark.parametrize(
    ("page", "dim", "dtype"), [(16, 128, "bfloat16"), (64, 80, "bfloat16"), (64, 128, "float8_e4m3fn")]
)
def test_what_no_descriptor_can_fetch_is_refused(page: int, dim: int, dtype: str) -> None:
    import torch

    from dragoman_kernels.triton.attention_prefill import paged_prefill_attention

    cache = torch.zeros((3, 2, page, dim)).to(getattr(torch, dtype))
    q, ints = torch.zeros((4, 2, dim), dtype=torch.bfloat16), torch.zeros((1, 2), dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"pages of {page} tokens.*use tma=False"):
        paged_prefill_attention(q, cache, cache, ints, ints[0], ints[0], ints, tma=True)
