"""`dragoman version`."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

import typer

app = typer.Typer()
_PACKAGES = ("dragoman", "grpcio", "protobuf", "torch", "triton", "numpy", "tokenizers", "starlette", "uvicorn")


@app.command()
def show(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Show the versions of Dragoman and of the packages that matter to it."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<12} {value}")
