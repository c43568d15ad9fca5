"""Products in one order: which tile a step gets, and that tiles which sum otherwise are found when a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.agent.device.conformance.subjects import deterministic_plan
from tests.agent.device.conformance.tiny_model import CONFIG
from torch import Tensor

from dragoman_agent.device import cuda_fixed
from dragoman_agent.device.cuda_float8 import scale_for
from dragoman_agent.pal.plan import GemmFixed

FEW, MANY = GemmFixed(128, 64, 8, 16, 16, 32, 3, 4), GemmFixed(128, 64, 0, 32, 16, 32, 3, 4)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[GemmFixed]:
    """The tiles that products were asked for; those of 32 rows sum otherwise."""
    tiles: list[GemmFixed] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: GemmFixed) -> Tensor:
        tiles.append(tile)
        return x @ weight.T + 1e-6 * (tile.block_m == 32)

    monkeypatch.setattr(cuda_fixed, "_product", product)
    return tiles


def ops_with(*tiles: GemmFixed) -> cuda_fixed.FixedOps:
    plan = deterministic_plan("cuda", "float32")
    others = tuple(one for one in plan.gemm_fixed if (one.n, one.k) != (128, 64))
    angles = torch.ones(48, CONFIG.head_dim // 2)
    assert plan.prefill_attention is not None
    return cuda_fixed.FixedOps(
        angles, angles, plan.prefill_attention, replace(plan, gemm_fixed=(*tiles, *others)), CONFIG, 4
    )


def weights() -> Any:
    layer = SimpleNamespace(
        qkv=torch.randn(128, 64), out=torch.randn(64, 64), gate_up=torch.randn(192, 64), down=torch.randn(64, 96)
    )
    return SimpleNamespace(layers=(layer,), head=torch.randn(96, 64))


def test_a_product_gets_the_first_tile_that_holds_its_rows(used: list[GemmFixed]) -> None:
    ops, weight = ops_with(FEW, MANY), torch.randn(128, 64)
    for rows in (1, 8, 9, 500):
        assert ops.linear(torch.randn(rows, 64), weight, None).shape == (rows, 128)
    assert used == [FEW, FEW, MANY, MANY]
    with pytest.raises(ValueError, match="no tile for a matrix of 7 x 64"):
        ops.linear(torch.randn(2, 64), torch.randn(7, 64), None)


def test_tiles_that_sum_in_another_order_are_refused_at_load(used: list[GemmFixed]) -> None:
    with pytest.raises(ValueError, match=r"128 x 64 matrix do not give equal bits.*--pal-launch-tuning off"):
        ops_with(FEW, MANY).check_tiles(weights())
    ops_with(FEW, replace(MANY, block_m=64)).check_tiles(weights())
    assert {one.block_m for one in used} == {16, 32, 64}, "a matrix with one tile has nothing to compare"


@pytest.mark.parametrize(
    ("largest", "scale"), [(224.0, 1.0), (225.0, 2.0), (1.0, 2.0**-7), (30000.0, 256.0), (0.0, 1.0)]
)
def test_a_scale_is_a_power_of_two_with_room_for_twice_what_was_seen(largest: float, scale: float) -> None:
    assert scale_for(largest, "K") == scale
    assert 2 * largest / scale <= 448.0
    assert torch.tensor(largest / scale).to(torch.float8_e4m3fn).float().isfinite()


def test_weights_that_give_no_number_are_named() -> None:
    with pytest.raises(ValueError, match="V of layer 3 is not finite"):
        scale_for(float("nan"), "V of layer 3")
