"""The admission policy in force: limits, shares and targets, by revision; from a TOML file and by update."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dragoman.errors import DragomanError
from dragoman.limits import MAX_ID_BYTES
from dragoman.v1 import error_pb2
from dragoman_controller.requests import Priority

MAX_QUEUE_LIMIT = 1_000_000
MAX_NUM_TENANTS = 10_000
_MAX_FILE_BYTES = 16 << 20
_MAX_WHOLE = (1 << 32) - 1  # what the message of a policy holds


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """Limits of one tenant; 0 is no limit of its own."""

    max_queued_requests: int = 0
    max_running_requests: int = 0
    share: int = 1


@dataclass(frozen=True, slots=True)
class ClassTarget:
    """Targets of one class in seconds; 0 is none."""

    time_to_first_token_seconds: float = 0.0
    time_per_output_token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything an operator can set about admission."""

    revision: int = 1
    max_queued_requests: int = 4096
    max_queue_wait_seconds: float = 30.0
    default_tenant: TenantPolicy = field(default_factory=TenantPolicy)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    targets: Mapping[str, ClassTarget] = field(default_factory=dict)

    def tenant(self, name: str) -> TenantPolicy:
        """Limits of a tenant."""
        return self.tenants.get(name, self.default_tenant)


def check(policy: Policy) -> None:
    """Raises DragomanError INVALID_REQUEST naming the bad field."""
    if not 0 <= policy.max_queued_requests <= MAX_QUEUE_LIMIT:
        raise _invalid("max_queued_requests", f"is {policy.max_queued_requests}, must be 0 to {MAX_QUEUE_LIMIT}")
    _check_seconds("max_queue_wait", policy.max_queue_wait_seconds)
    if len(policy.tenants) > MAX_NUM_TENANTS:
        raise _invalid("tenants", f"lists {len(policy.tenants)}, at most {MAX_NUM_TENANTS} have limits of their own")
    if "" in policy.tenants:
        raise _invalid("tenants", "holds an empty name; limits of those who give none are those of default_tenant")
    for name, tenant in {"": policy.default_tenant, **policy.tenants}.items():
        if len(name.encode()) > MAX_ID_BYTES or not name.isprintable():
            raise _invalid("tenants", f"holds a name that is longer than {MAX_ID_BYTES} bytes or cannot be printed")
        # No share would be no turn, ever: who is to get nothing has no key.
        for key, least in (("max_queued_requests", 0), ("max_running_requests", 0), ("share", 1)):
            if not least <= getattr(tenant, key) <= _MAX_WHOLE:
                where, most = f"tenants.{name or 'default'}.{key}", f"{_MAX_WHOLE:,}"
                raise _invalid(where, f"is {getattr(tenant, key)}, must be {least} to {most}")
    known = [priority.label for priority in Priority]
    for name, target in policy.targets.items():
        if name not in known:
            raise _invalid("targets", f"names the class {name!r}, must be one of {', '.join(known)}")
        for key in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
            _check_seconds(f"targets.{name}.{key}", getattr(target, key))


def _check_seconds(param: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise _invalid(param, f"is {seconds:g} s, must be a number that is not negative")


def read_policy(path: Path) -> Policy:
    """The policy of a TOML file: the fields of Policy, tables [tenants.NAME], [default_tenant], [targets.CLASS].

    Raises ValueError that names file and key.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"{path} has over {_MAX_FILE_BYTES >> 20} MiB: it is no policy")
    try:
        table = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    tenants = {
        name: _record(TenantPolicy, sub, path, f"tenants.{name}") for name, sub in _tables(table, "tenants", path)
    }
    targets = {
        name: _record(ClassTarget, sub, path, f"targets.{name}") for name, sub in _tables(table, "targets", path)
    }
    default = _record(TenantPolicy, table.pop("default_tenant", {}), path, "default_tenant")
    if "revision" in table:
        raise ValueError(f"{path}: 'revision' is counted by the controller, leave it out")
    policy: Policy = replace(_record(Policy, table, path, ""), tenants=tenants, targets=targets, default_tenant=default)
    try:
        check(policy)
    except DragomanError as error:
        raise ValueError(f"{path}: {error.message}") from None
    return policy


class PolicyStore:
    """Owns the policy in force. `on_change` is told of each new one."""

    def __init__(self, policy: Policy, on_change: Callable[[Policy], None]) -> None:
        self._policy = policy
        self._on_change = on_change

    @property
    def current(self) -> Policy:
        """The policy in force."""
        return self._policy

    def prepare(self, policy: Policy) -> Policy:
        """The policy with the revision it will have; its own must be the one it replaces. Changes nothing.

        Raises POLICY_CONFLICT, INVALID_REQUEST.
        """
        if policy.revision != self._policy.revision:
            raise conflict(self._policy.revision, policy.revision)
        check(policy)
        return replace(policy, revision=policy.revision + 1)

    def adopt(self, policy: Policy) -> None:
        """Puts a checked policy in force."""
        self._policy = policy
        self._on_change(policy)

    def update(self, policy: Policy) -> Policy:
        """Prepares and adopts. Raises POLICY_CONFLICT, INVALID_REQUEST."""
        prepared = self.prepare(policy)
        self.adopt(prepared)
        return prepared


def conflict(current: int, given: int) -> DragomanError:
    """The error of an update that is not for the policy in force."""
    return DragomanError(
        error_pb2.ERROR_REASON_POLICY_CONFLICT,
        f"the policy is at revision {current}, the update is for {given}: read it again and repeat the change",
        metadata={"revision": str(current)},
    )


def _tables(table: dict[str, Any], key: str, path: Path) -> list[tuple[str, Any]]:
    value = table.pop(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} must be tables such as [{key}.NAME]")
    return list(value.items())


def _record(kind: type[Any], table: Any, path: Path, where: str) -> Any:
    prefix = f"{where}." if where else ""
    if not isinstance(table, dict):
        raise ValueError(f"{path}: {where} must be a table")
    kinds = {f.name: type(f.default) for f in fields(kind) if isinstance(f.default, (int, float))}
    for key, value in table.items():
        if key not in kinds:
            raise ValueError(f"{path}: unknown key {prefix}{key}, known are {', '.join(sorted(kinds))}")
        allowed = (int, float) if kinds[key] is float else (int,)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(
                f"{path}: {prefix}{key} is {value!r}, must be {'a number' if float in allowed else 'whole'}"
            )
    return kind(**{key: kinds[key](value) for key, value in table.items()})


def _invalid(param: str, message: str) -> DragomanError:
    return DragomanError(
        error_pb2.ERROR_REASON_INVALID_REQUEST, f"policy: {param} {message}", metadata={"param": f"policy.{param}"}
    )
