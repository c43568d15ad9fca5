"""CUDA C++ sources to binaries: NVRTC once, then a file in the cache. Needs no GPU and no compiler."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "probe"
_OPTIONS = ("--std=c++17", "--ptxas-options=-v")


class KernelCompileError(RuntimeError):
    """A kernel source did not compile, or NVRTC is missing. The message has the compiler's log."""


def target_for(capability: int, supported: Sequence[int]) -> str:
    """The NVRTC architecture for compute capability `capability` (90 for 9.0), from those the compiler knows.

    A binary runs on a later minor version of its major one; where the compiler knows none of that major, PTX of the
    newest older one is left to the driver. Raises KernelCompileError for a card older than all.
    """
    older = [known for known in sorted(supported) if known <= capability]
    if not older:
        raise KernelCompileError(
            f"NVRTC compiles for {min(supported)} and later, not for compute capability {capability}"
        )
    newest = older[-1]
    return f"sm_{newest}" if newest // 10 == capability // 10 else f"compute_{newest}"


def build(name: str, capability: int, cache_dir: Path | None = None) -> bytes:
    """The binary of `csrc/probe/<name>.cu` for a compute capability (90 for 9.0); PTX where no binary can be made.

    Kept in `cache_dir`/kernels under a hash of source, options, target and compiler version. A cache that cannot be read
    or written costs a compilation, nothing else. Raises KernelCompileError.
    """
    nvrtc = _nvrtc()
    target = target_for(capability, _call(nvrtc, nvrtc.nvrtcGetSupportedArchs()))
    source = (SOURCES / f"{name}.cu").read_bytes()
    version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    key = hashlib.sha256(b"\0".join([source, target.encode(), version.encode(), *map(str.encode, _OPTIONS)]))
    path = cache_dir / "kernels" / f"probe-{name}-{target}-{key.hexdigest()[:16]}.bin" if cache_dir else None
    if path is not None:
        try:
            return path.read_bytes()
        except OSError:
            pass
    binary, _ = compile_source(source, f"{name}.cu", target)
    if path is not None:
        _keep(path, binary)
    return binary


def compile_source(source: bytes, name: str, target: str) -> tuple[bytes, str]:
    """Compile for `target` (sm_90: a binary, compute_90: PTX); the result and the compiler's log, which names registers
    and spills of each kernel. Raises KernelCompileError."""
    nvrtc = _nvrtc()
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(source, name.encode(), 0, [], []))
    try:
        options = [option.encode() for option in (f"--gpu-architecture={target}", *_OPTIONS)]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        log = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if int(status):
            raise KernelCompileError(f"{name} does not compile for {target}: {log.decode(errors='replace').strip()}")
        if target.startswith("sm_"):
            binary = _text(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        else:
            binary = _text(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        return binary, log.decode(errors="replace").strip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelCompileError(
            f"NVRTC cannot be loaded ({error}); install the agent extra of this package"
        ) from error
    return nvrtc


def _call(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        raise KernelCompileError(f"NVRTC answered {_call(nvrtc, nvrtc.nvrtcGetErrorString(answer[0]))!r}")
    return answer[1] if len(answer) > 1 else None


def _text(nvrtc: Any, program: Any, get_size: Any, get: Any) -> bytes:
    buffer = bytes(_call(nvrtc, get_size(program)))  # written in place by the binding
    _call(nvrtc, get(program, buffer))
    return buffer


def _keep(path: Path, binary: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        os.replace(name, path)
    except OSError:
        return
