"""Parts of `dragoman up` that need no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman_cli.up import gateway_key


@pytest.mark.parametrize(
    ("line", "key"), [("alpha", "alpha"), ("alpha team-a", "alpha"), ("  alpha\tteam-a  ", "alpha")]
)
def test_the_key_of_a_file_is_taken_without_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, key: str
) -> None:
    for name in ("DRAGOMAN_API_KEY", "DRAGOMAN_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "keys").write_text(f"\n{line}\nbeta team-b\n")
    config = tmp_path / "dragoman.toml"
    config.write_text(f'[gateway]\napi_key_file = "{tmp_path / "keys"}"\n')
    assert gateway_key(config) == key
    config.write_text('[gateway]\napi_key = "own"\n')
    assert gateway_key(config) == "own"
    assert gateway_key(None) == ""
