"""Compiles the C++ sources at first use into a cache keyed by everything that decides the result."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent.parent / "csrc" / "cpu"
# Contraction stays off: a compiler that fused differently in two instantiations would break row invariance.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
LIBRARY = "libdragoman_cpu.so"
COMPILERS = ("g++", "c++", "clang++")
BUILD_TIMEOUT_SECONDS = 300.0

logger = logging.getLogger(__name__)
_private: dict[Path, Path] = {}  # builds of this process alone: where each should have been, where it is


class KernelBuildError(Exception):
    """The CPU kernels could not be compiled or loaded. `log` is the compiler's own output, empty when it never ran."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(f"{message}\n{log}".rstrip())
        self.message = message
        self.log = log


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """One build: which compiler, its version text, the flags and the CPU it is for."""

    compiler: str
    compiler_version: str
    flags: tuple[str, ...]
    cpu_flags: str

    def key(self, sources: dict[str, bytes]) -> str:
        """Content key: 24 hex digits over sources, compiler version, flags and CPU flags."""
        digest = hashlib.sha256()
        parts = [self.compiler, self.compiler_version, "\0".join(self.flags), self.cpu_flags]
        for part in (p.encode() for p in parts):
            digest.update(len(part).to_bytes(8, "little") + part)
        for name in sorted(sources):
            for part in (name.encode(), sources[name]):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()[:24]


def find_compiler() -> str | None:
    """The first C++ compiler on PATH, or None."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def available(compiler: str | None = None) -> str | None:
    """None when the kernels can be built here, else the reason they cannot and what to do."""
    if compiler is not None and shutil.which(compiler) is None:
        return f"the C++ compiler {compiler} was not found; install it or name another"
    if compiler is None and find_compiler() is None:
        return f"no C++ compiler ({', '.join(COMPILERS)}) is on PATH; install one, e.g. the package g++"
    return None


def read_sources() -> dict[str, bytes]:
    """Every source and header by path relative to the source folder."""
    paths = (p for suffix in ("*.h", "*.cpp") for p in SOURCE_DIR.rglob(suffix))
    return {p.relative_to(SOURCE_DIR).as_posix(): p.read_bytes() for p in paths}


def cpu_flags() -> str:
    """The instruction sets of this CPU, as the kernel lists them; the machine's name where it lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(value.split()))
    return f"{platform.machine()} {platform.processor()}"


def describe(compiler: str | None = None, march: str = "native") -> BuildSpec:
    """The build this machine would make. Raises KernelBuildError when there is no compiler."""
    reason = available(compiler)
    if reason is not None:
        raise KernelBuildError(f"The CPU kernels cannot be built: {reason}.")
    path = shutil.which(compiler) if compiler is not None else find_compiler()
    assert path is not None
    version = _run([path, "--version"], timeout=30.0)
    if version.returncode != 0:
        raise KernelBuildError(f"{path} --version failed; the compiler is not usable, reinstall it.", version.stdout)
    # Arm compilers spell "this CPU" -mcpu; elsewhere -march is the one all of them know.
    option = "-mcpu" if platform.machine() in ("aarch64", "arm64") else "-march"
    flags = (*FLAGS, f"{option}={march}") if march else FLAGS
    return BuildSpec(path, version.stdout, flags, cpu_flags())


def build(cache_dir: Path, *, compiler: str | None = None, march: str = "native") -> Path:
    """Path of the compiled library, compiling it (about 5 s) when the cache has none for this content.

    `cache_dir` is Dragoman's cache folder; builds lie in its `kernels`. Safe to call from several processes: each
    compiles aside and one atomic rename wins. Where the cache cannot be written, a folder of this process alone takes the
    library, with a warning, and is removed at exit. Raises KernelBuildError with the compiler's log.
    """
    spec = describe(compiler, march)
    sources = read_sources()
    root = cache_dir / "kernels"
    target = root / f"cpu-{spec.key(sources)}"
    if not (target / LIBRARY).is_file():
        try:
            root.mkdir(parents=True, exist_ok=True)
            _build_into(target, spec, sources)
        except OSError as error:
            return _build_privately(target, spec, sources, error)
    return target / LIBRARY


def is_built(cache_dir: Path) -> bool:
    """Whether `build` would find the library in the cache; False also where nothing can be built."""
    try:
        return (cache_dir / "kernels" / f"cpu-{describe().key(read_sources())}" / LIBRARY).is_file()
    except (KernelBuildError, OSError):
        return False


def _build_privately(target: Path, spec: BuildSpec, sources: dict[str, bytes], problem: OSError) -> Path:
    """As `build`, where `target` cannot be made because of `problem`; once a process for each target."""
    if target not in _private:
        logger.warning(
            "the kernel cache %s cannot be written (%s): the CPU kernels are compiled for this process alone, at each start; "
            "make it writable or choose another cache folder (DRAGOMAN_CACHE_DIR)",
            target.parent,
            problem.strerror or problem,
        )
        try:
            folder = tempfile.mkdtemp(prefix="dragoman-kernels-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            _build_into(Path(folder) / target.name, spec, sources)
        except OSError as error:
            raise KernelBuildError(
                f"The CPU kernels can be stored neither in {target.parent} ({problem}) nor in a temporary folder ({error}). "
                "Make one of them writable or choose another cache folder."
            ) from error
        _private[target] = Path(folder) / target.name / LIBRARY
    return _private[target]


def _build_into(target: Path, spec: BuildSpec, sources: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as temporary:
        source_dir, ready = Path(temporary) / "src", Path(temporary) / "out"
        for name, content in sources.items():
            path = source_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        ready.mkdir()
        units = [str(source_dir / name) for name in sorted(sources) if name.endswith(".cpp")]
        command = [spec.compiler, *spec.flags, "-I", str(source_dir), *units, "-o", str(ready / LIBRARY)]
        done = _run(command, timeout=BUILD_TIMEOUT_SECONDS)
        if done.returncode != 0:
            raise KernelBuildError(
                f"The CPU kernels did not compile with {spec.compiler} (exit status {done.returncode}). "
                "Update the compiler (C++20 is needed) or name another.",
                done.stdout,
            )
        (ready / "build.log").write_text(" ".join(command) + "\n" + done.stdout, encoding="utf-8")
        try:
            os.rename(ready, target)
        except OSError:
            # Another process won the race with the same content; a folder without a library is a real failure.
            if not (target / LIBRARY).is_file():
                raise


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} could not be run: {error}") from error
