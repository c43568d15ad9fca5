"""What is told of an error of torch, a driver or a compiler."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What went wrong, without the advice behind it how to find out more; the error's type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
