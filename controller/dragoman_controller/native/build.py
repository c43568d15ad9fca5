"""Compiles the native code at first use into Dragoman's cache, by a key of source, compiler and machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCES = tuple(Path(__file__).resolve().parent / name for name in ("search.cpp", "quote.cpp", "learn.cpp"))
COMPILERS = ("g++", "c++", "clang++")
# Without contraction: a fused product and sum would round otherwise than the Python code, and choices could differ.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared")
LIBRARY = "libdragoman_controller.so"
BUILD_TIMEOUT_SECONDS = 60.0


class NativeUnavailable(Exception):
    """There is no library, for the reason that the message gives."""


def cache_dir(environ: Mapping[str, str]) -> Path:
    """`$DRAGOMAN_CACHE_DIR`, else ~/.cache/dragoman."""
    given = environ.get("DRAGOMAN_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "dragoman"


def build(cache: Path, compiler: str | None = None) -> Path:
    """Path of the library; compiled (about a second) where the cache lacks it. Raises NativeUnavailable.

    Several processes may do this at once: each compiles aside, and one rename wins.
    """
    path = compiler or next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if path is None:
        raise NativeUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH; install one, such as g++")
    version = _run([path, "--version"])
    digest = hashlib.sha256(b"\0".join([*map(Path.read_bytes, SOURCES), version.encode(), *map(str.encode, FLAGS)]))
    digest.update(f"{platform.machine()} {platform.libc_ver()}".encode())
    target = cache / "controller" / f"native-{digest.hexdigest()[:24]}"
    try:
        if not (target / LIBRARY).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            _build_into(target, path)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache {target.parent} cannot be written ({error.strerror or error}); make it writable or choose another "
            "with DRAGOMAN_CACHE_DIR"
        ) from None
    return target / LIBRARY


def _build_into(target: Path, compiler: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as temporary:
        ready = Path(temporary) / "out"
        ready.mkdir()
        _run([compiler, *FLAGS, *map(str, SOURCES), "-o", str(ready / LIBRARY)])
        try:
            os.rename(ready, target)
        except OSError:
            # Another process won with the same content; a folder without a library is a real failure.
            if not (target / LIBRARY).is_file():
                raise


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not be run: {error}") from None
    if done.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed with exit status {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
