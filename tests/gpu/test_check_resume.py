"""The checks of tests/gpu/check_resume.py on the CPU's compiled kernels: they pass there, and tell of a stream that goes on otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.agent.device.conformance.subjects import plan_of
from tests.agent.engine.test_resume_computed import TextModel
from tests.gpu import check_resume
from tests.needs import need_cpu_kernels

from dragoman_agent.device.cpu_road import KV_DTYPES, NATIVE_FLOAT32
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    need_cpu_kernels()
    from dragoman_agent.device.cpu import CpuDevice

    model = TextModel()
    plan = plan_of(
        "cpu", NATIVE_FLOAT32, KV_DTYPES[NATIVE_FLOAT32], model_name=model.name, num_blocks=400, max_context_tokens=256
    )
    plan = replace(plan, max_num_waiting=64)
    device = CpuDevice()
    device.load(model, plan, lambda _: None)  # type: ignore[arg-type]
    yield build_core(device, model, plan)  # type: ignore[arg-type]
    device.close()


def test_every_case_is_good(core: EngineCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_resume.check_all(core) == 0
    assert capsys.readouterr().out.count("ok ") == len(check_resume.CASES)


def test_streams_that_go_on_otherwise_are_told(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = check_resume.start

    def other_seed(name: str, case: dict, delivered: list = ()) -> object:  # type: ignore[type-arg,assignment]
        begun = made(name, case, delivered)
        return replace(begun, sampling=replace(begun.sampling, seed=99)) if delivered else begun

    monkeypatch.setattr(check_resume, "start", other_seed)
    assert not check_resume.check_case(core, "seeded", check_resume.CASES["seeded"])
    assert capsys.readouterr().out.startswith("OFF seeded")
