"""The check of two launches tells a step that the wrong one attended, and has steps for both."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def check() -> ModuleType:
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))  # as a script it finds its neighbours
    try:
        spec = importlib.util.spec_from_file_location("check_prefill_forms", folder / "check_prefill_forms.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def test_a_step_by_the_wrong_launch_is_off(check: ModuleType) -> None:
    usual = torch.randn(2, 50)
    long = usual + 0.01 * torch.randn(2, 50)
    ran = {name: (logits, np.zeros(2), 0.002, 0.001) for name, logits in (("usual", usual), ("long", long))}
    shape = ([(2048, 6144)], 0, 0)
    for is_long, both, good in ((True, "long", True), (True, "usual", False), (False, "usual", True), (False, "long", False)):  # fmt: skip
        found, words = check.told(shape, is_long, ran[both], ran["usual"], ran["long"])
        assert found is good and ("equal bits" in words) is good
    assert check.told(shape, True, ran["usual"], ran["usual"], ran["usual"])[0] is False, "launches that cannot be told"


def test_steps_are_for_either_launch(check: ModuleType) -> None:
    forms = check.forms_of((128, 64, (9, 0), 227 << 10))
    assert (forms.usual.block_m, forms.long.attention.block_m) == (64, 128)
    taken = [check.takes_long(forms, prompts) for prompts, _, _ in check.STEPS]
    assert taken == [False, False, False, True, True, False, False, True, True, True]
    assert check.forms_of((128, 64, (8, 0), 160 << 10)) is None
