"""Device choice: each refusal names its reason, and nothing fits means a clear end."""

import pytest

from dragoman_agent.model.random_source import RandomSource
from dragoman_agent.pal import select
from dragoman_agent.pal.attributes import FoundDevice, Inventory
from dragoman_agent.pal.changes import Holder
from dragoman_agent.pal.needs import known_models, needs_of
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


def card(name: str, *, width: int = 16, max_width: int = 16, bus: float = 1e12, **more: int) -> FoundDevice:
    found = device("cuda", name, **more)
    found.values.update(
        {
            "link.width": Value(width, "", "reported"),
            "link.max_width": Value(max_width, "", "reported"),
            "memory.bus_bandwidth": Value(bus, "bytes/s", "derived"),
        }
    )
    return found


def test_of_equal_cards_the_one_with_all_its_lanes_is_taken() -> None:
    narrow, wide = card("narrow", width=4, free=9 << 30), card("wide")
    selection = choose_device(Inventory((narrow, wide, CPU)), "auto", NEEDS)
    assert selection.chosen.device is wide
    assert selection.chosen.reason == "the only one of equal GPUs whose PCIe link has all its lanes"
    assert selection.verdicts[1].reason == "its PCIe link runs at x4 of x16, that of wide does not"


def test_a_card_that_is_made_with_fewer_lanes_is_not_narrow() -> None:
    eight, sixteen = card("eight", width=8, max_width=8, free=9 << 30), card("sixteen")
    assert choose_device(Inventory((eight, sixteen)), "auto", NEEDS).chosen.device is eight


def test_of_twins_the_first_is_taken_and_says_so() -> None:
    selection = choose_device(Inventory((card("a"), card("b"))), "auto", NEEDS)
    assert selection.chosen.reason == "the first of 2 equal GPUs"
    assert selection.verdicts[1].reason == "a is its equal and comes first"


def test_each_no_names_its_step() -> None:
    broken = device("cuda", "broken", problem="fallen off the bus")
    small = card("small", free=1 << 20)
    old = FoundDevice(**{**_fields(card("old")), "runtime_problem": "the driver is too old"})
    selection = choose_device(Inventory((broken, small, old, CPU)), "auto", NEEDS)
    assert [verdict.step for verdict in selection.verdicts] == ["", "probe", "match", "runtime"]
    assert selection.chosen.reason == "no GPU can be used: broken: fallen off the bus"


def _fields(found: FoundDevice) -> dict[str, object]:
    return {name: getattr(found, name) for name in found.__slots__}


def test_an_untested_backend_says_so_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "UNTESTED_KINDS", ("hip",))
    selection = choose_device(Inventory((device("hip", "some AMD card"), CPU)), "auto", NEEDS)
    assert selection.chosen.reason == (
        "the only GPU that fits; untested: the hip backend has never run on such a device"
    )


def test_a_cuda_card_holds_a_quantised_file_in_bfloat16() -> None:
    """The file's size is not what the card needs: 4-bit weights grow to 16 bits there."""
    model = RandomSource("qwen3-8b")
    needs = needs_of(model)
    assert needs.of("cuda").weight_bytes == 2 * model.config.num_parameters
    assert needs.of("cpu").weight_bytes == model.total_bytes
    assert needs.of("unheard-of").weight_bytes == model.total_bytes
    selection = choose_device(
        Inventory((card("small", free=12 << 30), device("cpu", "CPU", free=64 << 30))), "auto", needs
    )
    assert selection.chosen.device.facts.kind == "cpu"
    assert "qwen3-8b needs 15.29 GiB" in selection.verdicts[1].reason


def test_where_nothing_fits_the_three_cheapest_changes_are_named() -> None:
    needs = needs_of(RandomSource("qwen3-8b"))
    full = FoundDevice(**{**_fields(card("small", free=4 << 30)), "holders": (Holder(7, "trainer", 14 << 30),)})
    with pytest.raises(NoDeviceError) as refused:
        choose_device(Inventory((full, device("cpu", "CPU", free=64 << 30))), "cuda", needs)
    text = str(refused.value)
    assert "on small, cheapest first: 1) stop what holds the device's memory: 14.00 GiB by pid 7 (trainer)" in text
    assert "2) --device cpu: CPU has 64.00 GiB free" in text
    assert "3) a smaller model: llama-3.2-1b has 2.30 GiB" in text


def test_on_a_cpu_a_smaller_number_format_is_a_way() -> None:
    needs = needs_of(RandomSource("qwen3-8b"))
    with pytest.raises(NoDeviceError, match=r"weights in Q8_0: .* \(serve a GGUF file in Q8_0\)"):
        choose_device(Inventory((device("cpu", "CPU", free=10 << 30),)), "auto", needs)


def test_known_models_come_with_their_sizes() -> None:
    sizes = {model.name: model.weight_bytes for model in known_models()}
    assert sizes["qwen3-0.6b"] == pytest.approx(1.192e9, rel=1e-3)
    assert "qwen3-embedding-0.6b" not in sizes
