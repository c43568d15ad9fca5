"""Building the CPU kernels: cached by content, atomic, loud when it cannot."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman_kernels.cpu import build as builder
from dragoman_kernels.cpu import native


def write_compiler(path: Path, version: str, body: str) -> str:
    """A compiler script that answers --version and else runs `body`."""
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


COPY_LAST = 'echo built >> "$(dirname "$0")/runs"; for last; do :; done; echo library > "$last"'


def test_a_second_build_is_found_and_a_change_of_compiler_is_not(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path / "cc", "one 1.0", COPY_LAST)
    first = builder.build(tmp_path / "cache", compiler=compiler)
    assert builder.build(tmp_path / "cache", compiler=compiler) == first
    assert (tmp_path / "runs").read_text() == "built\n"
    write_compiler(tmp_path / "cc", "one 2.0", COPY_LAST)
    assert builder.build(tmp_path / "cache", compiler=compiler) != first
    assert (tmp_path / "runs").read_text() == "built\nbuilt\n"
    assert sorted(p.name[:4] for p in (tmp_path / "cache" / "kernels").iterdir()) == ["cpu-", "cpu-"]


def test_the_key_holds_sources_compiler_flags_and_cpu() -> None:
    spec = builder.BuildSpec("/usr/bin/g++", "12", ("-O3",), "avx2")
    sources = {"a.h": b"x", "b.cpp": b"y"}
    keys = {
        spec.key(sources),
        spec.key({**sources, "a.h": b"z"}),
        spec.key({"a.h": b"x", "c.cpp": b"y"}),
        replace(spec, compiler_version="13").key(sources),
        replace(spec, flags=("-O2",)).key(sources),
        replace(spec, cpu_flags="avx2 avx512f").key(sources),
    }
    assert len(keys) == 6
    assert spec.key(dict(reversed(sources.items()))) == spec.key(sources)


def test_a_failing_compiler_gives_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path / "cc", "bad 1.0", 'echo "matrix.cpp:1: sorry" >&2; exit 3')
    with pytest.raises(builder.KernelBuildError, match="did not compile") as caught:
        builder.build(tmp_path / "cache", compiler=compiler)
    assert "matrix.cpp:1: sorry" in caught.value.log
    assert "exit status 3" in caught.value.message
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder.available() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = builder.available()
    assert reason is not None
    assert "g++" in reason
    with pytest.raises(builder.KernelBuildError, match="no C\\+\\+ compiler"):
        builder.build(tmp_path)
    assert builder.available("/no/such/compiler") is not None


def test_an_unwritable_cache_costs_a_build_for_this_process_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    compiler = write_compiler(tmp_path / "cc", "one 1.0", COPY_LAST)
    code = (
        "import sys; from pathlib import Path; from dragoman_kernels.cpu.build import build\n"
        "paths = {build(Path(sys.argv[1]), compiler=sys.argv[2]) for _ in range(2)}\n"
        "print(len(paths), paths.pop().read_text(), end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache"), compiler],
        env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "1 library\n"
    assert (tmp_path / "runs").read_text() == "built\n"
    assert done.stderr.count("cannot be written") == 1
    assert "DRAGOMAN_CACHE_DIR" in done.stderr
    assert list(scratch.iterdir()) == [], "removed at exit"


def test_nowhere_to_build_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    compiler = write_compiler(tmp_path / "cc", "one 1.0", COPY_LAST)
    with pytest.raises(builder.KernelBuildError, match="can be stored neither in"):
        builder.build(tmp_path / "cache", compiler=compiler)


def test_a_library_that_does_not_load_is_said(tmp_path: Path) -> None:
    path = tmp_path / builder.LIBRARY
    path.write_text("not a library")
    with pytest.raises(builder.KernelBuildError, match=r"do not load.*Delete"):
        native.load_library(path)


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    compiler = write_compiler(tmp_path / "cc", "slow 1.0", f"sleep 0.5; {COPY_LAST}")
    code = (
        "import sys; from pathlib import Path; from dragoman_kernels.cpu.build import build;"
        "print(build(Path(sys.argv[1]), compiler=sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), compiler]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0, 0]
    assert len(answers) == 1
    assert Path(answers.pop()).read_text() == "library\n"
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1
