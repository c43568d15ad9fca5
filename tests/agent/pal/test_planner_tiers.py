"""The sizes of the tiers below the device, each with its reason."""

from __future__ import annotations

import pytest

from dragoman_agent.pal.limits import Limits, PlanError
from dragoman_agent.pal.planner_tiers import COPY_BYTES, TierPlan, copy_bytes, plan_tiers

BLOCK = 7 << 20
GIB = 1 << 30


def tiers(offload: bool = True, kv_bytes: int = 64 * GIB, **limits: int | None) -> TierPlan:
    return plan_tiers(Limits(**limits), BLOCK, kv_bytes, "the link takes longer", offload=offload)  # type: ignore[arg-type]


def test_a_quarter_of_free_host_memory_where_moving_pays() -> None:
    made = tiers(host_free_bytes=100 * GIB)
    assert made.host_bytes == 25 * GIB // BLOCK * BLOCK and made.disk_bytes == 0
    host, disk = made.decisions
    assert "25% of free host memory" in host.reason and host.predicted == made.host_bytes
    assert host.inputs[0].name == "host.memory_free" and "off unless --kv-disk-dir" in disk.reason
    assert [line.name for line in made.lines] == ["kv in host memory"]


def test_no_more_than_four_times_the_device() -> None:
    assert tiers(kv_bytes=2 * GIB, host_free_bytes=100 * GIB).host_bytes == 8 * GIB // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("offload", "free", "reason"),
    [(False, 100 * GIB, "the link takes longer"), (True, None, "not known here")],
)
def test_none_where_it_does_not_pay_or_is_not_known(offload: bool, free: int | None, reason: str) -> None:
    made = tiers(offload, host_free_bytes=free)
    assert made.host_bytes == 0 and reason in made.decisions[0].reason and not made.lines


def test_what_is_asked_for_wins() -> None:
    made = tiers(False, kv_host_bytes=10 * BLOCK + 5, kv_disk_bytes=3 * GIB, host_free_bytes=GIB)
    assert (made.host_bytes, made.disk_bytes) == (10 * BLOCK, 3 * GIB)
    assert all(decision.reason == "asked for" for decision in made.decisions) and len(made.lines) == 2
    assert tiers(True, kv_host_bytes=0, host_free_bytes=GIB).host_bytes == 0


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"kv_host_bytes": 5}, "holds no KV block"),
        ({"kv_host_bytes": 2 * GIB, "host_free_bytes": GIB}, "more than the 1.00 GiB"),
        ({"kv_disk_bytes": 5}, "--kv-disk-bytes 5 holds no KV block"),
    ],
)
def test_what_cannot_be_is_refused(limits: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        tiers(**limits)


def test_device_memory_is_kept_for_copies_only_where_there_are_any() -> None:
    assert copy_bytes(Limits(), offload=True) == COPY_BYTES
    assert copy_bytes(Limits(kv_disk_bytes=1), offload=False) == COPY_BYTES
    assert copy_bytes(Limits(), offload=False) == copy_bytes(Limits(kv_host_bytes=0), offload=True) == 0
