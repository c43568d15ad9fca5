"""Products of many rows by the library's algorithms that a plan names: which, of what sizes, and when torch's own call is left."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.agent.device.conformance.subjects import gpu_plan
from tests.agent.device.conformance.tiny_model import CONFIG
from tests.fakes.simulated_blas import SimulatedBlas
from tests.fakes.simulated_gpu import Card, SimulatedGpu

from dragoman_agent.device import cuda_blas, cuda_products
from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.cuda_blas import BlasError
from dragoman_agent.device.cuda_make import make_ops
from dragoman_agent.device.cuda_ops import CudaOps
from dragoman_agent.device.cuda_products import LibraryProducts
from dragoman_agent.pal.plan import MAX_LIBRARY_ALGORITHMS, LibraryGemm, PrefillAttention

CHOICES = (LibraryGemm(96, 64, 8, 15, 8, 1), LibraryGemm(96, 64, 16, 0, 24, 2), LibraryGemm(64, 96, 8, 15, 16, 0))


def aligned(rows: int, columns: int, first: int = 0) -> torch.Tensor:
    """Of bfloat16 zeros; `first` bytes behind an address that any algorithm takes."""
    space = torch.zeros(rows * columns + 512, dtype=torch.bfloat16)
    skipped = (-space.data_ptr() % 256 + first) // 2
    return space[skipped : skipped + rows * columns].view(rows, columns)


def made(choices: tuple[LibraryGemm, ...]) -> CudaOps:
    """The operations of a plan with these."""
    angles = torch.zeros(4, CONFIG.head_dim // 2)
    plan = replace(gpu_plan("cuda"), library_gemm=choices)
    return make_ops(CONFIG, plan, angles, angles, 8, SimpleNamespace())  # type: ignore[arg-type]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimulatedBlas:
    gpu = SimulatedGpu(Card())
    gpu.streams[5] = SimpleNamespace(clock=0.0)
    made = SimulatedBlas(gpu, {cuda_blas.CUDA_R_16BF: 777e12})
    monkeypatch.setattr(cuda_products, "load_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    # Results lie where the allocator of a card would put them.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, size: aligned(*size))
    return made


def test_the_algorithm_of_the_plan_multiplies_with_the_steps_rows(library: SimulatedBlas) -> None:
    products = LibraryProducts(CHOICES)
    assert set(library.asked) == {(MAX_LIBRARY_ALGORITHMS, 0)}, (
        "ranks are those of the same question, without a workspace"
    )
    for rows, rank in ((8, 1), (15, 1), (16, 2), (5000, 2)):
        x, weight = aligned(rows, 64), aligned(96, 64)
        out = products.product(x, weight)
        assert out is not None and out.shape == (rows, 96)
        done = library.products[-1]
        assert (done["rank"], done["sizes"]) == (rank, [(64, 96, 64), (64, rows, 64), (96, rows, 96)])
        assert done["addresses"] == (weight.data_ptr(), x.data_ptr(), out.data_ptr())
        assert (done["alpha"], done["beta"]) == (1, 0)
        assert done["attributes"][cuda_blas.CUBLASLT_MATMUL_DESC_TRANSA] == cuda_blas.CUBLAS_OP_T
    products.product(aligned(9, 96), aligned(64, 96))
    assert library.products[-1]["rank"] == 0


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (aligned(7, 64), aligned(96, 64)),
        (aligned(8, 64), aligned(95, 64)),
        (aligned(16, 96), aligned(64, 96)),
        (aligned(8, 64, 32), aligned(96, 64)),
        (aligned(8, 64), aligned(96, 64, 32)),
        (aligned(16, 64)[::2], aligned(96, 64)),
        (aligned(64, 8).t(), aligned(96, 64)),
    ],
    ids=["few rows", "another matrix", "more rows", "x elsewhere", "weight elsewhere", "rows apart", "columns first"],
)
def test_what_it_was_not_chosen_for_is_left(library: SimulatedBlas, x: torch.Tensor, weight: torch.Tensor) -> None:
    assert LibraryProducts(CHOICES).product(x, weight) is None
    assert not library.products


def test_an_algorithm_that_is_gone_is_left_out_and_said(
    library: SimulatedBlas, caplog: pytest.LogCaptureFixture
) -> None:
    library.num_algorithms = 1
    products = LibraryProducts(CHOICES)
    assert products.missing == list(CHOICES[:2])
    assert products.product(aligned(8, 64), aligned(96, 64)) is None
    assert products.product(aligned(8, 96), aligned(64, 96)) is not None
    with caplog.at_level(logging.WARNING):
        made(CHOICES)
    assert "no number 2 of its algorithms for 96 x 64" in caplog.text and "the folder timings" in caplog.text


def test_an_algorithm_that_is_refused_for_these_rows_is_not_tried_again(
    library: SimulatedBlas, caplog: pytest.LogCaptureFixture
) -> None:
    products = LibraryProducts(CHOICES)
    library.refusal = cuda_blas.CUBLAS_STATUS_NOT_SUPPORTED
    with caplog.at_level(logging.WARNING):
        assert products.product(aligned(8, 64), aligned(96, 64)) is None
    assert "for 8 rows of (96, 64): the library's own choice" in caplog.text
    library.refusal = 0
    assert products.product(aligned(8, 64), aligned(96, 64)) is None
    assert products.product(aligned(16, 64), aligned(96, 64)) is not None, "others are as good as before"


def test_no_memory_is_not_taken_for_a_refusal(library: SimulatedBlas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_blas.Blas, "_status_name", lambda self, status: "CUBLAS_STATUS_ALLOC_FAILED")
    products = LibraryProducts(CHOICES)
    library.refusal = 3
    with pytest.raises(BlasError, match="ALLOC_FAILED"):
        products.product(aligned(8, 64), aligned(96, 64))
    library.refusal = 0
    assert products.product(aligned(8, 64), aligned(96, 64)) is not None


def test_the_handle_goes_with_its_products(library: SimulatedBlas) -> None:
    products = LibraryProducts(CHOICES)
    assert library.num_open == 1
    del products
    gc.collect()
    assert library.num_open == 0


def test_a_card_without_any_algorithm_has_none_missing_but_all(library: SimulatedBlas) -> None:
    library.rates.clear()
    assert LibraryProducts(CHOICES).missing == list(CHOICES)


def test_a_plan_whose_library_is_not_there_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> Any:
        raise BlasError("libcublasLt cannot be loaded (none)")

    monkeypatch.setattr(cuda_products, "load_library", no_library)
    with pytest.raises(DeviceError, match=r"cannot be loaded \(none\)\. Start with --pal-launch-tuning off"):
        made(CHOICES)


def test_the_models_products_take_it_but_those_with_a_bias(library: SimulatedBlas) -> None:
    angles = torch.zeros(4, 4)
    ops = CudaOps(angles, angles, PrefillAttention("paged", 64, 64, 4, 3), (), None, products=LibraryProducts(CHOICES))
    ops.linear(aligned(8, 64), aligned(96, 64), None)
    assert len(library.products) == 1
    for rows, bias in ((7, None), (8, torch.zeros(96, dtype=torch.bfloat16))):
        assert ops.linear(aligned(rows, 64), aligned(96, 64), bias).shape == (rows, 96)
    assert len(library.products) == 1


def test_a_plan_without_them_asks_for_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> Any:
        raise AssertionError("asked for")

    monkeypatch.setattr(cuda_products, "load_library", no_library)
    assert isinstance(made(()), CudaOps)
