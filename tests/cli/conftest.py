"""What the tests of the command line share."""

from __future__ import annotations

import os

import pytest
from tests.cli.command import Done, Dragoman

from dragoman_cli.main import main


@pytest.fixture
def dragoman(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dragoman:
    """Runs the command in this process, with only the DRAGOMAN_ variables that are given."""
    for name in [name for name in os.environ if name.startswith("DRAGOMAN_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str, environ: dict[str, str] | None = None) -> Done:
        with monkeypatch.context() as patch:
            patch.setenv("DRAGOMAN_DEBUG", "")  # so that what -v sets is undone
            for name, value in (environ or {}).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as exit_:
                main(list(arguments))
        captured = capsys.readouterr()
        code = exit_.value.code
        return Done(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run
