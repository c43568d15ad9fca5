"""The command as a user types it: quick, lazy, and with words for every mistake."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Dragoman, assert_error

COMMAND = [sys.executable, "-P", "-m", "dragoman_cli.main"]


def test_help_is_quick_and_lists_every_verb() -> None:
    spent = []
    for _ in range(3):  # a loaded machine makes CPU seconds longer too: the least is what it takes
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=30)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    for verb in (
        "up",
        "chat",
        "ps",
        "drain",
        "probe",
        "plan",
        "explain",
        "doctor",
        "models",
        "simulate",
        "bench",
        "config",
        "version",
    ):
        assert f"\n  {verb} " in done.stdout
    assert min(spent) < 0.3, f"--help took {min(spent):.2f} s of CPU"


def test_a_verb_imports_its_own_file_only() -> None:
    code = (
        "import sys\n"
        "from dragoman_cli.main import main\n"
        "try: main(['version'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'grpc', 'rich', 'dragoman_agent', 'dragoman_cli.up'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_b01_a_terminal_that_lacks_a_character_is_no_error() -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "DRAGOMAN_MODEL": "modèle-🙂"}
    done = subprocess.run([*COMMAND, "config", "show"], capture_output=True, text=True, timeout=30, env=environ)
    assert done.returncode == 0, done.stderr
    assert "mod?le-?" in done.stdout


@pytest.mark.parametrize(
    "verb",
    ["up", "chat", "ps", "probe", "plan", "explain", "doctor", "models", "simulate", "bench", "config", "version"],
)
def test_every_verb_has_help(dragoman: Dragoman, verb: str) -> None:
    done = dragoman(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert f"dragoman {verb}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("modles",), ("No such command 'modles'", "Did you mean 'models'")),
        (("ps", "--jsn"), ("--jsn", "--json")),
        (("up", "--prot", "1"), ("unknown option --prot", "did you mean --port")),
        (("up", "--port", "99999"), ("above the most allowed, 65535",)),
        (("up", "--device", "gpu"), ("'gpu' is not one of auto, cpu, cuda, hip, xpu, null",)),
        (("up", "--config", "/nowhere.toml"), ("cannot read the config file /nowhere.toml",)),
    ],
)
def test_mistakes_on_the_command_line(dragoman: Dragoman, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_error(dragoman(*arguments), *parts, code=2)


@pytest.mark.parametrize("verb", [("ps",), ("chat", "hi"), ("drain", "a"), ("drain", "a", "--undo")])
def test_no_controller(dragoman: Dragoman, verb: tuple[str, ...]) -> None:
    done = dragoman(*verb, "--controller", "127.0.0.1:1")
    assert_error(done, "cannot reach the controller at 127.0.0.1:1", "connection refused", "dragoman up")


def test_a_misspelled_variable_is_said_at_the_start(dragoman: Dragoman, tmp_path: Path) -> None:
    done = dragoman("up", "--cache-dir", str(tmp_path), "--port=0", environ={"DRAGOMAN_PROT": "1"})
    assert done.stderr.startswith(
        "warning: the variable DRAGOMAN_PROT is not read by anything; did you mean DRAGOMAN_PORT?"
    )


@pytest.mark.parametrize("said", ["", "  "])
def test_nothing_to_say(dragoman: Dragoman, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    assert_error(dragoman("chat", said, "--controller", "127.0.0.1:1"), "there is nothing to say", 'dragoman chat "')
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert_error(dragoman("chat", "--controller", "127.0.0.1:1"), "there is nothing to say")
    for errors in ("strict", "surrogateescape"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors))
        assert_error(dragoman("chat", "--controller", "127.0.0.1:1"), "the text on stdin is not UTF-8", "iconv")


@pytest.mark.parametrize(("given", "kept"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_is_quiet_unless_asked_otherwise(given: str | None, kept: str) -> None:
    code = (
        "import os, sys\n"
        "from dragoman_cli.main import main\n"
        "assert 'grpc' not in sys.modules\n"
        "try: main(['version'])\n"
        "except SystemExit: print(os.environ['GRPC_VERBOSITY'])\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if given:
        environ["GRPC_VERBOSITY"] = given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, env=environ)
    assert done.stdout.splitlines()[-1] == kept, done.stderr


def test_a_traceback_only_when_asked_for(dragoman: Dragoman) -> None:
    assert "Traceback" not in dragoman("ps", "--controller", "127.0.0.1:1").stderr
    assert "Traceback" in dragoman("-v", "ps", "--controller", "127.0.0.1:1").stderr


def test_version_and_config_as_json(dragoman: Dragoman) -> None:
    assert json.loads(dragoman("version", "--json").stdout)["python"] == sys.version.split()[0]
    shown = json.loads(dragoman("config", "show", "--json", environ={"DRAGOMAN_API_KEY": "secret"}).stdout)
    assert set(shown) == {"agent", "controller", "gateway", "up"}
    assert shown["gateway"]["api_key"] == {"value": "(set)", "origin": "env DRAGOMAN_API_KEY"}
    assert shown["up"]["port"] == {"value": 8000, "origin": "default"}


def test_config_show_says_where_values_came_from(dragoman: Dragoman, tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('[up]\nport = 9000\nmax_context = "4k"\n')
    done = dragoman("config", "show", "up", "--json", "--config", str(file), environ={"DRAGOMAN_THREADS": "3"})
    shown: dict[str, Any] = json.loads(done.stdout)["up"]
    assert shown["port"] == {"value": 9000, "origin": f"file {file} [up].port"}
    assert shown["max_context"]["value"] == 4096
    assert shown["threads"] == {"value": 3, "origin": "env DRAGOMAN_THREADS"}
    text = dragoman("config", "show", "up", "--origin").stdout
    assert "origin" in text and "DRAGOMAN_PORT" in text
    file.write_text("[up]\nprot = 1\n")
    assert_error(dragoman("config", "show", "--config", str(file)), "unknown key 'prot'", "did you mean port")
    assert_error(dragoman("config", "show", "agnet"), "no process 'agnet'", "did you mean agent")


def test_doctor(dragoman: Dragoman, tmp_path: Path) -> None:
    done = dragoman("doctor", "--json", "--cache-dir", str(tmp_path))
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["python"]["level"] == "ok"
    assert checks["cache"]["level"] == "ok"
    assert checks["model"]["level"] == "warn"
    assert checks["model"]["fix"] == f"dragoman models fetch embedded --cache-dir {tmp_path}"
    assert {"memory", "open files", "clock", "port 8000", "extra agent", "device cpu"} <= set(checks)
    assert all(check["level"] == "ok" or check["fix"] for check in checks.values() if check["level"] == "fail")
    file = tmp_path / "file"
    file.write_text("")
    broken = dragoman("doctor", "--cache-dir", str(file / "x"))
    assert broken.returncode == 1
    assert "fail cache" in broken.stdout
    assert "fix: set DRAGOMAN_CACHE_DIR" in broken.stdout
    unreachable = dragoman("doctor", "--cache-dir", "x" * 300)
    assert "fail cache" in unreachable.stdout and "warn model" in unreachable.stdout
    assert "cannot be reached (File name too long)" in unreachable.stdout


def test_probe(dragoman: Dragoman, tmp_path: Path) -> None:
    done = dragoman("probe", "--json", "--cache-dir", str(tmp_path))
    report = json.loads(done.stdout)
    assert "cpu" in {device["kind"] for device in report["devices"]}
    assert report["profiles"][0]["values"]
    text = dragoman("probe", "--cache-dir", str(tmp_path)).stdout
    assert "from the cache" in text
    assert "chosen" in text
    assert "measured" in text


def test_models(dragoman: Dragoman, tmp_path: Path) -> None:
    listed = json.loads(dragoman("models", "ls", "--json", "--cache-dir", str(tmp_path)).stdout)
    assert listed[0]["state"] == f"not fetched: dragoman models fetch embedded --cache-dir {tmp_path}"
    broken = tmp_path / "models" / "mine" / "broken.gguf"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    listed = json.loads(dragoman("models", "ls", "--json", "--cache-dir", str(tmp_path)).stdout)
    assert [row["model"] for row in listed] == ["embedded (SmolLM2-135M-Instruct)", "broken"]
    assert listed[1]["state"] != "ready"
    assert_error(dragoman("models", "show", "embedded", "--cache-dir", str(tmp_path)), "dragoman models fetch embedded")
    assert_error(dragoman("models", "show", "/nowhere/m.gguf"), "/nowhere/m.gguf")
    assert_error(dragoman("models", "fetch", "gpt"), "'gpt' cannot be fetched", "embedded is the only model")
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF")
    assert_error(
        dragoman("models", "fetch", "--from", str(wrong), "--cache-dir", str(tmp_path)), "98362432 were expected"
    )


def test_models_fetch_from_a_file(dragoman: Dragoman, tmp_path: Path, embedded_model_path: Path) -> None:
    done = dragoman("models", "fetch", "embedded", "--from", str(embedded_model_path), "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).stat().st_size == embedded_model_path.stat().st_size
    assert "checking and storing: 93.8 MiB of 93.8 MiB" in done.stderr
    shown = json.loads(dragoman("models", "show", "--json", "--cache-dir", str(tmp_path)).stdout)
    assert (shown["name"], shown["num_layers"]) == ("SmolLM2-135M-Instruct", 30)


@pytest.mark.parametrize("file", ["Makefile", "gpu_agent/Dockerfile"])
def test_the_commands_in_our_own_files_are_understood(dragoman: Dragoman, file: str) -> None:
    text = (Path(__file__).resolve().parents[2] / file).read_text()
    commands = re.findall(r"dragoman ((?:up|bench|models)(?: [a-z][a-z-]*)*)((?: --[a-z-]+)*)", text)
    assert commands
    for words, options in commands:
        shown = dragoman(*words.split(), "--help")
        assert shown.returncode == 0, words
        assert all(option in shown.stdout for option in options.split()), (words, options)


def test_models_verify_and_show(dragoman: Dragoman, tmp_path: Path, embedded_model_path: Path) -> None:
    done = dragoman("models", "verify", str(embedded_model_path))
    assert done.returncode == 0, done.stderr
    assert "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53" in done.stdout
    assert "272 tensors, 134515008 values, all finite (Q8_0 1, F32 61, Q4_1 210)" in done.stdout
    assert "hashing files: 93.8 MiB of 93.8 MiB" in done.stderr
    found = json.loads(dragoman("models", "verify", str(embedded_model_path), "--json").stdout)
    assert (found["num_tensors"], found["files"][0]["path"]) == (272, str(embedded_model_path))
    shown = dragoman("models", "show", "random:qwen3-8b").stdout
    assert "num_parameters           8190735360\n" in shown
    assert "chat_template            yes\n" in shown
    (tmp_path / "pytorch_model.bin").touch()
    assert_error(dragoman("models", "verify", str(tmp_path)), "only as pickles", "convert the model to safetensors")
