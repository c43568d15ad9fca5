"""Device choice: each refusal names its reason, and nothing fits means a clear end."""

import pytest

from dragoman_agent.pal import select
from dragoman_agent.pal.attributes import FoundDevice, Inventory
from dragoman_agent.pal.profile import DeviceFacts, Value
from dragoman_agent.pal.select import Needs, NoDeviceError, choose_device

NEEDS = Needs("some-model", 2 << 30, 64 << 20)


def device(kind: str, name: str, free: int = 8 << 30, integrated: bool = False, problem: str = "") -> FoundDevice:
    facts = DeviceFacts(kind, 0, name, "sm_89" if kind == "cuda" else "x86_64", 16 << 30, name)
    return FoundDevice(facts, {"memory.free": Value(free, "bytes", "reported")}, name, integrated, problem)


CPU = device("cpu", "some CPU")


def test_cpu_is_chosen_without_a_gpu_and_says_why() -> None:
    selection = choose_device(Inventory((CPU,), "no NVIDIA driver on this machine"), "auto", NEEDS)
    assert selection.chosen.device is CPU
    assert selection.chosen.reason == "no GPU: no NVIDIA driver on this machine"


def test_a_gpu_without_backend_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SUPPORTED_KINDS", ("cpu",))
    gpu = device("cuda", "some GPU")
    selection = choose_device(Inventory((gpu, CPU)), "auto", NEEDS)
    assert selection.chosen.device is CPU
    assert selection.verdicts[1].reason == "this version has no cuda backend"


def test_discrete_before_integrated_before_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SUPPORTED_KINDS", ("cpu", "cuda"))
    integrated, discrete = device("cuda", "iGPU", free=12 << 30, integrated=True), device("cuda", "dGPU", free=6 << 30)
    selection = choose_device(Inventory((integrated, discrete, CPU)), "auto", NEEDS)
    assert selection.chosen.device is discrete
    reasons = {verdict.device.facts.name: verdict.reason for verdict in selection.verdicts[1:]}
    assert reasons == {"iGPU": "it is integrated, dGPU is not", "some CPU": "dGPU is quicker"}


def test_too_small_a_gpu_gives_way_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "SUPPORTED_KINDS", ("cpu", "cuda"))
    selection = choose_device(Inventory((device("cuda", "small", free=1 << 30), CPU)), "auto", NEEDS)
    assert selection.chosen.device is CPU
    assert "needs 2.06 GiB" in selection.verdicts[1].reason
    assert "1.00 GiB are free" in selection.verdicts[1].reason


def test_asking_for_what_is_not_there_says_what_the_driver_said() -> None:
    with pytest.raises(NoDeviceError, match=r"libcuda was not found.*What to do: use --device auto"):
        choose_device(Inventory((CPU,), "no NVIDIA driver (libcuda was not found)"), "cuda", NEEDS)


def test_a_broken_device_is_never_chosen() -> None:
    with pytest.raises(NoDeviceError, match="ECC errors"):
        choose_device(Inventory((device("cpu", "some CPU", problem="ECC errors"),)), "auto", NEEDS)
