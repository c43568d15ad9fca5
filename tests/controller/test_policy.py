"""Policies from TOML files and by update."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.errors import DragomanError
from dragoman.v1 import error_pb2
from dragoman_controller.policy import ClassTarget, Policy, PolicyStore, TenantPolicy, read_policy


def test_a_file_sets_limits_tenants_and_targets(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        "max_queued_requests = 10\nmax_queue_wait_seconds = 2\n"
        "[default_tenant]\nmax_running_requests = 5\n[tenants.big]\nshare = 4\n"
        "[targets.interactive]\ntime_to_first_token_seconds = 0.5\n"
    )
    policy = read_policy(path)
    assert (policy.revision, policy.max_queued_requests, policy.max_queue_wait_seconds) == (1, 10, 2.0)
    assert policy.tenant("big") == TenantPolicy(share=4)
    assert policy.tenant("other") == TenantPolicy(max_running_requests=5)
    assert policy.targets == {"interactive": ClassTarget(time_to_first_token_seconds=0.5)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_queue = 1\n", "unknown key max_queue"),
        ("[tenants.x]\nshares = 1\n", "unknown key tenants.x.shares"),
        ("max_queued_requests = 'many'\n", "max_queued_requests is 'many'"),
        ("max_queued_requests = true\n", "max_queued_requests is True"),
        ("max_queued_requests = -1\n", "max_queued_requests is -1"),
        ("[tenants.x]\nshare = 0\n", "tenants.x.share is 0, must be 1 to"),
        ("[default_tenant]\nshare = 0\n", "tenants.default.share is 0, must be 1 to"),
        ("[tenants.x]\nshare = -2\n", "tenants.x.share is -2, must be 1 to"),
        ("[tenants.x]\nmax_running_requests = 4294967296\n", "must be 0 to 4,294,967,295"),
        ('[tenants.""]\nshare = 1\n', "tenants holds an empty name"),
        ("revision = 4\n", "'revision' is counted"),
        ("tenants = 3\n", "tenants must be tables"),
        ("[targets.vip]\n", "'vip'"),
        ("= nonsense", "is not TOML"),
    ],
)
def test_a_bad_file_names_the_key(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected) as raised:
        read_policy(path)
    assert str(path) in str(raised.value)


def test_updates_count_revisions_and_a_stale_one_is_refused() -> None:
    seen: list[Policy] = []
    store = PolicyStore(Policy(), seen.append)
    updated = store.update(Policy(max_queued_requests=3))
    assert updated.revision == 2 and seen == [updated] and store.current is updated
    with pytest.raises(DragomanError) as raised:
        store.update(Policy())
    assert raised.value.reason == error_pb2.ERROR_REASON_POLICY_CONFLICT
    assert store.current is updated


def test_a_file_that_is_no_policy_at_all(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(b"revision = 1 # \xff")
    with pytest.raises(ValueError, match=r"policy.toml is not UTF-8: .* at byte 15"):
        read_policy(path)
    with pytest.raises(ValueError, match="/dev/zero has over 16 MiB: it is no policy"):
        read_policy(Path("/dev/zero"))
