"""The languages there are: languages/*.toml says what each needs, how its runner is built, and how it is started."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "languages"
_KEYS = {"folder", "needs", "sources", "build", "run"}
_BUILD_SECONDS = 900


class BuildError(Exception):
    """A runner that cannot be built; the message has the end of the compiler's output."""


@dataclass(frozen=True, slots=True)
class Language:
    """One language. `needs` are programs on the PATH; `sources` are patterns below `folder` that the build depends on."""

    name: str
    folder: Path
    needs: tuple[str, ...]
    sources: tuple[str, ...]
    build: tuple[tuple[str, ...], ...]
    run: tuple[str, ...]

    def missing(self) -> str:
        """The first program that is needed and not there; empty when all are."""
        return next((program for program in self.needs if shutil.which(program) is None), "")

    def command(self, build_folder: Path) -> list[str]:
        """How the built runner is started."""
        return [_filled(part, build_folder) for part in self.run]


def load_languages() -> dict[str, Language]:
    """Every language by name. Raises ValueError for a file that is not as it must be."""
    return {path.stem: _read(path) for path in sorted(FOLDER.glob("*.toml"))}


def _read(path: Path) -> Language:
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    if set(raw) - _KEYS or "run" not in raw or "folder" not in raw:
        raise ValueError(f"{path.name}: has the keys {', '.join(sorted(raw))}; known are {', '.join(sorted(_KEYS))}")
    return Language(
        name=path.stem,
        folder=ROOT / raw["folder"],
        needs=tuple(raw.get("needs", ())),
        sources=tuple(raw.get("sources", ())),
        build=tuple(tuple(command) for command in raw.get("build", ())),
        run=tuple(raw["run"]),
    )


def cache_folder() -> Path:
    """Where built runners are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dragoman" / "conformance"


def built(language: Language) -> Path:
    """The folder of the built runner; builds it unless sources and protos are the same as at the last build.

    Raises BuildError.
    """
    folder = cache_folder() / language.name
    folder.mkdir(parents=True, exist_ok=True)
    stamp, digest = folder / "stamp", _digest(language)
    if stamp.exists() and stamp.read_text() == digest:
        return folder
    stamp.unlink(missing_ok=True)
    for command in language.build:
        done = subprocess.run(
            [_filled(part, folder) for part in command],
            cwd=language.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise BuildError(f"{language.name}: {' '.join(command)} failed:\n{done.stdout[-4000:]}")
    stamp.write_text(digest)
    return folder


def _digest(language: Language) -> str:
    digest = hashlib.sha256(repr(language).encode())
    paths = {path for pattern in language.sources for path in language.folder.glob(pattern)}
    for path in sorted(paths | set((ROOT / "protos").rglob("*.proto"))):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _filled(part: str, build_folder: Path) -> str:
    return part.replace("{build}", str(build_folder)).replace("{python}", sys.executable).replace("{root}", str(ROOT))
