"""Names of kernel calls are read back as the same calls; predictions follow the published tables."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.kernel_calls import KernelCall, gemm_seconds, parse_key, predicted_seconds
from dragoman_agent.pal.plan import DecodeAttention
from dragoman_agent.pal.planner import Limits, Switches, plan_for
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.rates import rates_of
from dragoman_kernels.triton.launches import GemmLaunch

HEADS = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "page_size": 64}


def test_keys_read_as_they_are_written() -> None:
    assert KernelCall("gemm", {"m": 8, "n": 4096, "k": 1024}).key == "gemm/m8/n4096/k1024"
    launch = GemmLaunch(16, 256, 5, 2)
    assert KernelCall("gemm", {"m": 8, "n": 64, "k": 32}, launch).key == "gemm/m8/n64/k32/n16-k256-g5-w2"
    call = KernelCall("decode-attention", {**HEADS, "batch": 8, "context": 1024}, DecodeAttention(8, 4, 64, 4, 3))
    assert call.key == "decode-attention/h16-k8-d128-p64/b8/c1024/s4-n64-w4-g3"
    assert call.family == "decode-attention/h16-k8-d128-p64/s4-n64-w4-g3"
    assert call.point == (8, 1024)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b"])
def test_every_tuning_case_is_found_again_by_its_key(
    name: str, card: Callable[..., Profile], shapes: Callable[[str], ModelConfig]
) -> None:
    plan, _ = plan_for(card(), shapes(name), Limits(), Switches())
    for case in tuning_cases(card(), shapes(name), plan):
        call = parse_key(case.key)
        assert call is not None
        assert call.key == case.key
        assert (call.kind, dict(call.shape)) == (case.kind, dict(case.shape))
        assert predicted_seconds(rates_of(card()), call) == case.predicted_seconds


@pytest.mark.parametrize(
    "key",
    [
        "", "gemm", "gemm/m8/n4096", "gemm/m8/n4096/k1024/x", "gemm/m8/n4096/k1024/n16-k256-g5-w2/more", "conv/m1",
        "gemm/mx/n1/k1", "gemm/m-8/n1/k1", "decode-attention/h16-k8-d128-p64/b8/c1024", "rms-norm/t8/w64/s1",
        "gemm/m99999999999999999999/n1/k1",
    ],
)  # fmt: skip
def test_other_keys_are_nobodys(key: str) -> None:
    assert parse_key(key) is None


@given(st.text(alphabet="gemrsnodcatiop-/0123456789hkw", max_size=60))
def test_no_text_breaks_the_reader(key: str) -> None:
    call = parse_key(key)
    assert call is None or parse_key(call.key) == call


def test_library_products_are_predicted_within_a_third(card: Callable[..., Profile]) -> None:
    """Cold weights, in a graph, on an H200: microseconds at 8, 64 and 256 rows (public and own tables)."""
    rates = rates_of(card())
    table = {
        (4096, 1024): (4.3, 5.2, 6.5), (1024, 2048): (5.4, 5.4, 6.4), (6144, 1024): (6.2, 6.5, 7.8),
        (1024, 3072): (6.1, 6.6, 7.7), (3072, 2048): (6.7, 6.9, 8.3), (16384, 2048): (18.9, 19.8, 27.2),
        (2048, 8192): (13.0, 13.7, 20.5), (6144, 4096): (15.9, 16.4, 22.0), (12288, 4096): (28.0, 29.0, 37.5),
        (65536, 4096): (133.6, 148, 189),
    }  # fmt: skip
    for (n, k), measured in table.items():
        for m, microseconds in zip((8, 64, 256), measured, strict=True):
            assert 0.7 < gemm_seconds(rates, m, n, k) / (microseconds * 1e-6) < 1.36, (n, k, m)


def test_a_sum_of_bytes_and_phase_is_what_a_row_kernel_costs(card: Callable[..., Profile]) -> None:
    rates = rates_of(card())
    call = KernelCall("silu-mul", {"tokens": 100_000, "width": 3072})
    assert predicted_seconds(rates, call) == pytest.approx(3.75e-6 + 3 * 2 * 100_000 * 3072 / 4.2e12)
    tiny = KernelCall("silu-mul", {"tokens": 1, "width": 3072})
    assert predicted_seconds(rates, tiny) == pytest.approx(3.75e-6, rel=0.01)
    assert math.isfinite(predicted_seconds(rates, KernelCall("sample", {"rows": 8, "vocab_size": 151936})))
