"""Times the kernels that a plan may choose among, once a device, model and set of kernels; later starts read the file.

The device is touched by processes of their own, so nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dragoman_agent.pal.candidates import TuningCase
from dragoman_agent.pal.group_timing import GroupCase
from dragoman_agent.pal.layer_timing import LayerCase
from dragoman_agent.pal.list_timing import ListCase
from dragoman_agent.pal.plan import MAX_LIBRARY_ALGORITHMS
from dragoman_agent.pal.timings import Timings, TimingsError

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 600.0
_MAX_COMPILERS = 12
_CASES_A_COMPILER = 4  # fewer are not worth a process, which takes seconds to start
_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12")  # whose products are timed: of CUDA 13, and of 12
# Errors that say what a device can never do. Others may pass: no memory beside a neighbour, a device that has failed.
_LASTING_ERRORS = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionError",
    "ValueError",
    "NotImplementedError",  # of Triton and torch: a form that this device has not
)


Case = TuningCase | LayerCase | GroupCase | ListCase


class TuningError(Exception):
    """Kernels could not be timed. The message says what, why and what to do."""


def kernel_hash() -> str:
    """Digest of the kernels' sources, of what compiles them, and of the library and what it is asked: timings of others are not
    these kernels'.
    """
    spec = importlib.util.find_spec("dragoman_kernels")
    if spec is None or not spec.submodule_search_locations:
        raise TuningError("the package dragoman_kernels is not installed; install the agent's extra")
    digest = hashlib.sha256()
    for path in sorted(Path(spec.submodule_search_locations[0], "triton").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(f"{MAX_LIBRARY_ALGORITHMS} algorithms".encode())
    for package in ("torch", "triton", *_LIBRARIES):
        try:
            digest.update(f"{package}=={importlib.metadata.version(package)}".encode())
        except importlib.metadata.PackageNotFoundError:
            digest.update(f"no {package}".encode())
    return digest.hexdigest()[:16]


def load_timings(cache_dir: Path, fingerprint: str) -> Timings:
    """What was timed before on the device with `fingerprint`; empty where nothing was, or where the kernels changed."""
    wanted = kernel_hash()
    path = _path(cache_dir, fingerprint, wanted)
    if os.path.exists(path):  # not pathlib's, which raises where a folder may not be entered
        try:
            held = Timings.from_json(path.read_text(encoding="utf-8"), str(path))
            if (held.fingerprint, held.kernel_hash) == (fingerprint, wanted):
                return held
        except (OSError, UnicodeDecodeError, TimingsError) as error:
            logger.warning("%s; the kernels are to be timed again", error)
    return Timings(fingerprint, wanted)


def tune(
    cases: Sequence[Case],
    held: Timings,
    cache_dir: Path,
    index: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Timings:
    """Time the `cases` that `held` lacks on CUDA device `index`, and keep them. Raises TuningError.

    A case that cannot run on this device is not chosen; why is kept too, so that later starts do not try it again.
    """
    missing = [case for case in cases if not held.knows(case.key)]
    if not missing:
        return held
    progress(f"timing {len(missing)} kernels, once for this device and model")
    started = time.monotonic()
    compile_kernels(missing, index)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for line in _run(missing, index).splitlines():
        answer = json.loads(line)
        if "seconds" in answer:
            found[answer["key"]] = float(answer["seconds"])
        else:
            logger.info("%s cannot run on this device: %s", answer["key"], answer["error"])
            if str(answer["error"]).startswith(_LASTING_ERRORS):
                failed[answer["key"]] = str(answer["error"])
    if not found and len(missing) == len(cases):
        raise TuningError(
            f"none of {len(missing)} kernels could be timed on GPU {index}; run with --log-level debug for the reasons, "
            "or plan from the profile alone with --tune off"
        )
    timings = held.with_seconds(found).with_failed(failed)
    _save(timings, cache_dir)
    lost = f", {len(missing) - len(found)} cannot run" if len(found) < len(missing) else ""
    progress(f"{len(found)} of {len(missing)} kernels timed in {time.monotonic() - started:.0f} s{lost}")
    return timings


def compile_kernels(cases: Sequence[Case], index: int) -> None:
    """Build the kernels in several processes; what fails here says so when it is timed."""
    count = min(_MAX_COMPILERS, max((os.cpu_count() or 1) - 1, 1), len(cases) // _CASES_A_COMPILER)
    if count < 2:
        return
    processes = []
    for share in (cases[start::count] for start in range(count)):
        process = subprocess.Popen(
            _command(index, "--compile"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(_to_json(share))
        process.stdin.close()
        processes.append(process)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _run(cases: Sequence[Case], index: int) -> str:
    try:
        done = subprocess.run(
            _command(index),
            input=_to_json(cases),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TuningError(
            f"timing kernels on GPU {index} took over {_TIMEOUT_SECONDS:g} s; another process may keep the GPU busy: "
            "try again when it is quiet, or plan from the profile alone with --tune off"
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TuningError(
            f"timing kernels on GPU {index} failed ({last}); run `dragoman doctor`, or plan from the profile alone with --tune off"
        )
    return done.stdout


def _command(index: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "dragoman_agent.device.cuda_tuning", str(index), *options]


def _to_json(cases: Sequence[Case]) -> str:
    return json.dumps([dataclasses.asdict(case) for case in cases])


def _path(cache_dir: Path, fingerprint: str, kernels: str) -> Path:
    return cache_dir / "timings" / f"{fingerprint}-{kernels}.json"


def _save(timings: Timings, cache_dir: Path) -> None:
    """Write beside and rename, so that a reader sees a whole file. A full or read-only disk costs the next start the time."""
    path = _path(cache_dir, timings.fingerprint, timings.kernel_hash)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_text(timings.to_json(), encoding="utf-8")
            os.replace(whole, path)
    except OSError as error:
        logger.warning("the kernels' times cannot be kept (%s); they will be taken again at the next start", error)
