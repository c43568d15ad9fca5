"""Errors of the command line: what happened, why, what to do. A traceback only with -v or DRAGOMAN_DEBUG."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Collection
from importlib.util import find_spec


class Failure(Exception):
    """An error that a user can act on. `why` and `remedy` may be empty."""

    def __init__(self, what: str, why: str = "", remedy: str = "", *, exit_code: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy
        self.exit_code = exit_code


# What must be importable for each extra; the first one missing is named.
EXTRAS = {
    "agent": ("torch", "numpy", "msgpack", "psutil", "safetensors", "tokenizers"),
    "controller": ("cryptography", "grpc_health", "grpc_reflection", "prometheus_client"),
    "gateway": ("starlette", "uvicorn", "httptools", "orjson", "pydantic", "tokenizers"),
    "bench": ("xllamacpp",),
}


def missing_module(extra: str, unused: Collection[str] = ()) -> str | None:
    """The first module of the extra that is not installed, or None. `unused` need not be."""
    return next((name for name in EXTRAS[extra] if name not in unused and find_spec(name) is None), None)


def install_command(*extras: str) -> str:
    """The command that installs extras."""
    return f"{pip_install()} 'dragoman[{','.join(extras)}]'"


def pip_install() -> str:
    """What installs into this environment. One made by uv, as `make up` makes one, has no pip of its own."""
    return f"{sys.executable} -m pip install" if find_spec("pip") else f"uv pip install --python {sys.executable}"


def require_extras(*extras: str, purpose: str, unused: Collection[str] = ()) -> None:
    """Raises Failure naming the install command when one of the extras is not installed, modules of `unused` left aside."""
    missing = [extra for extra in extras if missing_module(extra, unused)]
    if missing:
        modules = ", ".join(str(missing_module(extra, unused)) for extra in missing)
        raise Failure(
            f"{purpose} needs parts of Dragoman that are not installed: {', '.join(missing)}",
            f"no module {modules} in {sys.prefix}",
            install_command(*missing),
        )


def import_problem(error: ImportError) -> str:
    """One line for a module that cannot be imported: what, why, what to do."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        what = f"the Python module {error.name!r} is missing in {sys.prefix}"
    else:
        what = f"a Python module cannot be imported ({error})"
    return f"{what}; run `make setup`, or: {install_command('agent', 'controller', 'gateway')}"


def wants_traceback() -> bool:
    """Whether the user asked to see where an error comes from."""
    return bool(os.environ.get("DRAGOMAN_DEBUG"))


def report(error: BaseException) -> int:
    """Prints an error to stderr and returns the exit status."""
    if wants_traceback():
        traceback.print_exception(error)
    failure = to_failure(error)
    print(f"error: {failure.what}", file=sys.stderr)
    if failure.why:
        print(f"  why: {failure.why}", file=sys.stderr)
    if failure.remedy:
        print(f"  do:  {failure.remedy}", file=sys.stderr)
    return failure.exit_code


def to_failure(error: BaseException) -> Failure:
    """The failure to show for an exception of any kind."""
    if isinstance(error, Failure):
        return error
    from dragoman.errors import DragomanError

    if isinstance(error, DragomanError):  # its message says all three
        return Failure(error.message)
    if isinstance(error, OSError):
        if error.filename and error.strerror:
            what = f"{error.filename} cannot be used: {error.strerror.lower()}"
            return Failure(what, remedy="check the path and the rights on it")
        return Failure(str(error))
    detail = "" if wants_traceback() else "run it again with -v to see where, and report that"
    return Failure(f"an unexpected {type(error).__name__}: {error}", "this is a fault of Dragoman", detail)
