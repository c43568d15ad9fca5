"""Who asks: API keys, and the tenant that a request is charged to. Pure but for reading the file."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import Headers

from dragoman.limits import MAX_ID_BYTES
from dragoman_gateway.errors import ApiError

TENANT_HEADER = "x-dragoman-tenant"


@dataclass(frozen=True, slots=True, repr=False)
class ApiKeys:
    """The accepted keys and the tenant of each; an empty tenant leaves it to the header. No keys: none is asked for."""

    tenants: dict[bytes, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tenants)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.tenants)} keys)"

    def find(self, headers: Headers) -> str | None:
        """The tenant of the key that was sent, maybe empty; None where no accepted one was."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        found = None
        # Every key is compared with every value, so that the time tells nothing about where they differ.
        for value in given:
            for key, tenant in self.tenants.items():
                if hmac.compare_digest(value.encode(), key):
                    found = tenant
        return found


def tenant_of(key_tenant: str, headers: Headers) -> str:
    """The tenant to charge: that of the key, else of the header, else the default one. Raises ApiError.

    The header is believed from whoever may use the gateway without a key of its own tenant: a proxy that knows its users.
    """
    asked = headers.get(TENANT_HEADER, "")
    if len(asked.encode()) > MAX_ID_BYTES or not asked.isprintable():
        raise ApiError(
            400,
            f"{TENANT_HEADER} must be printable and at most {MAX_ID_BYTES} bytes long; it has {len(asked.encode())}",
            code="invalid_tenant",
            param=TENANT_HEADER,
        )
    if key_tenant and asked and asked != key_tenant:
        raise ApiError(
            403,
            f"the API key is for another tenant than {TENANT_HEADER} says; leave the header out, or send that tenant's key",
            code="tenant_mismatch",
            param=TENANT_HEADER,
        )
    return key_tenant or asked


def read_keys(api_key: str, path: Path | None) -> ApiKeys:
    """The keys of an option and of a file: a line each, the key and maybe its tenant. Raises ValueError, without a key."""
    keys = {api_key.encode(): ""} if api_key else {}
    if path is None:
        return ApiKeys(keys)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"--api-key-file {path} cannot be read: {why}") from None
    found: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        tenant = words[1] if len(words) == 2 else ""
        if len(words) > 2 or len(tenant.encode()) > MAX_ID_BYTES or not tenant.isprintable():
            raise ValueError(
                f"--api-key-file {path}:{number}: expected a key, and maybe its tenant of at most {MAX_ID_BYTES} bytes"
            )
        if found.get(key := words[0].encode(), tenant) != tenant:
            raise ValueError(f"--api-key-file {path}:{number}: the key is above with another tenant; give each its own")
        found[key] = tenant
    if not found:
        raise ValueError(f"--api-key-file {path} holds no key; write one a line")
    return ApiKeys(keys | found)
