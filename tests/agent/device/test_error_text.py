from __future__ import annotations

import pytest

from dragoman_agent.device.error_text import first_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("CUDA error: so\nSearch for it in\nCompile with"), "CUDA error: so"),
        (RuntimeError("\n  ptxas fatal: so\n"), "ptxas fatal: so"),
        (MemoryError(), "MemoryError"),
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_one_line_that_is_never_empty(error: Exception, text: str) -> None:
    assert first_line(error) == text
