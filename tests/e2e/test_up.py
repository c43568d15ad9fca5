"""`dragoman up` as a newcomer runs it: start, the curl of the box pasted as it stands, Ctrl-C, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

FREE_PORTS = [
    "--port=0", "--controller-port=0", "--agent-port=0", "--controller-metrics-port=0", "--agent-metrics-port=0",
]  # fmt: skip


@dataclass
class Run:
    """One `dragoman up`; its output goes to files, as on a machine without a terminal."""

    folder: Path
    process: psutil.Popen
    seen: list[psutil.Process] = field(default_factory=list)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def wait_for(self, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.out:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, f"{text!r} not within {seconds} s: {self.err}"
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        self.seen = [self.process, *self.process.children(recursive=True)]
        return self.seen

    def assert_nothing_left(self) -> None:
        _, alive = psutil.wait_procs(self.seen, timeout=5)
        assert not alive, f"left behind: {alive}"
        assert socket_folders() == set(), "an engine's socket was left behind"


def socket_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("dragoman-agent-*"))


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """up(*arguments) -> Run. The temporary folder is the test's own, so that a socket left behind is seen."""
    # A Unix socket's path has 107 bytes at most.
    scratch = Path(tempfile.mkdtemp(prefix="up-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    runs: list[Run] = []

    def start(*arguments: str, environ: dict[str, str] | None = None) -> Run:
        given = environ or {}
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
        if "DRAGOMAN_CACHE_DIR" in os.environ:
            environ["DRAGOMAN_CACHE_DIR"] = os.environ["DRAGOMAN_CACHE_DIR"]
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            process = psutil.Popen(
                [sys.executable, "-P", "-m", "dragoman_cli.main", "up", *arguments],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env={**environ, "TMPDIR": str(scratch), **given},
            )
        runs.append(Run(tmp_path, process))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.family()
        for process in run.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.process.wait(5)
    shutil.rmtree(scratch, ignore_errors=True)


def curl_of(run: Run) -> str:
    return next(line for line in run.out.splitlines() if line.startswith("curl "))


def url_of(run: Run) -> str:
    found = re.search(r"http://[\d.:]+(?=/v1/chat)", curl_of(run))
    assert found is not None
    return found[0]


def assert_stream(text: str) -> str:
    """A whole stream: content, a finish reason, [DONE]. Returns the content."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_from_start_to_a_curl_to_ctrl_c(up) -> None:
    run: Run = up("--device", "null", *FREE_PORTS)
    run.wait_for("Ctrl-C stops everything.", 60)
    family = run.family()
    assert len(family) == 5, "up, controller, agent, its engine, gateway"
    for part in (
        "Dragoman is ready",
        "null device",
        "context",
        "KV cache",
        "first token",
        "ready in",
        "/metrics",
        "defaults",
    ):
        assert part in run.out
    assert "device   null device (null):" in run.err
    assert "warming up" in run.err, "plain lines where there is no terminal"
    assert "\x1b" not in run.out + run.err

    pasted = subprocess.run(["bash", "-c", curl_of(run)], capture_output=True, text=True, timeout=30)
    assert pasted.returncode == 0, pasted.stderr
    assert assert_stream(pasted.stdout)
    assert httpx.get(f"{url_of(run)}/health").status_code == 200

    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(6) == 0
    assert time.monotonic() - began < 5.0
    run.assert_nothing_left()
    assert "Traceback" not in run.err


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, which is not installed")
def test_with_the_embedded_model(up, embedded_model_path: Path) -> None:
    run: Run = up("--device", "cpu", "--max-context", "1k", *FREE_PORTS)
    run.wait_for("Ctrl-C stops everything.", 180)
    assert "SmolLM2-135M-Instruct (135M parameters" in run.out
    assert "loading weights" in run.err
    # Why it computes as it does: a machine without a compiler is told so here.
    assert re.search(r"^ +(native|torch)-\w+: .*compiled kernels", run.err, re.MULTILINE), run.err
    assert re.search(r"computed +(native|torch)-\w+, KV \w+: ", run.out)
    run.family()
    pasted = subprocess.run(["bash", "-c", curl_of(run)], capture_output=True, text=True, timeout=120)
    assert len(assert_stream(pasted.stdout).split()) > 5
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(6) == 0
    run.assert_nothing_left()


def test_a_model_without_a_chat_template_serves_plain_prompts(up, embedded_model_path: Path, tmp_path: Path) -> None:
    model = tmp_path / "base.gguf"
    model.write_bytes(
        embedded_model_path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX", 1)
    )
    run: Run = up("--device=cpu", f"--model={model}", *FREE_PORTS)
    run.wait_for("Ctrl-C stops everything.", 120)
    assert "no chat" in run.out and "this model has no chat template" in " ".join(run.out.split()), run.out
    command = curl_of(run)
    assert "/v1/completions " in command and '"prompt": ' in command
    pasted = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert pasted.stdout.count('"text":') > 10 and pasted.stdout.endswith("data: [DONE]\n\n"), pasted.stdout
    found = re.search(r"http://[\d.:]+(?=/v1/)", command)
    assert found is not None
    (listed,) = httpx.get(f"{found[0]}/v1/models").json()["data"]
    assert listed["capabilities"] == {"completion": True, "chat": False, "embeddings": True}
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(6) == 0


def test_json_summary_config_file_and_sigterm(up, tmp_path: Path) -> None:
    config = tmp_path / "dragoman.toml"
    config.write_text('[up]\ndevice = "null"\n[gateway]\napi_key = "secret"\n[agent]\nserved_model_name = ["tiny"]\n')
    run: Run = up("--json-summary", "--config", str(config), *FREE_PORTS)
    run.wait_for("}\n", 60)
    summary = json.loads(run.out)
    assert (summary["model"], summary["device_kind"], summary["road"]) == ("tiny", "null", "null")
    assert summary["first_token"]
    assert summary["num_kv_tokens"] > 0
    for url in summary["metrics_urls"]:
        assert "dragoman_" in httpx.get(url).text
    models = f"{summary['http_url']}/v1/models"
    assert httpx.get(models).status_code == 401
    listed = httpx.get(models, headers={"Authorization": "Bearer secret"}).json()["data"]
    assert [model["id"] for model in listed] == ["tiny"]
    assert "secret" not in run.out + run.err
    pasted = ["bash", "-c", summary["curl"]]
    done = subprocess.run(pasted, env={**os.environ, "DRAGOMAN_API_KEY": "secret"}, capture_output=True, text=True)
    assert assert_stream(done.stdout)
    run.family()
    check_other_verbs(summary["controller"])
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(6) == 0
    run.assert_nothing_left()


def check_other_verbs(controller: str) -> None:
    """`ps` and `chat` against what is up: one start serves them all."""

    said_aside = ""

    def dragoman(*arguments: str, text: str = "") -> str:
        nonlocal said_aside
        command = [sys.executable, "-P", "-m", "dragoman_cli.main", *arguments, "--controller", controller]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        said_aside = done.stderr
        return done.stdout

    (row,) = json.loads(dragoman("ps", "--json"))
    assert (row["state"], row["models"], row["running"]) == ("serving", ["tiny"], 0)
    assert row["tokens_per_second"] == 0
    assert row["agent_id"] in dragoman("ps")
    said = dragoman("chat", "hello", "--max-tokens", "5", "--temperature", "0")
    assert said.strip()
    assert said_aside == "[cut at 5 tokens, --max-tokens for more]\n"
    dragoman("chat", "hello")
    assert said_aside == "[cut at 512 tokens, --max-tokens for more]\n"
    assert dragoman("chat", "--max-tokens", "5", "--temperature", "0", text="hello\n") == said
    check_conversation(controller)


def check_conversation(controller: str) -> None:
    """A conversation at a terminal: two turns, a failed one, and the end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "dragoman_cli.main", "chat", "--max-tokens", "4", "--controller", controller]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        shown = ""
        for line in ("hello\n", "/new\n", "again\n", "/exit\n"):
            shown += read_until(ours, "> ")
            os.write(ours, line.encode())
        assert process.wait(10) == 0
    os.close(ours)
    assert "/exit or Ctrl-D leaves" in shown
    assert "Traceback" not in shown
    assert "error" not in shown


def read_until(terminal: int, prompt: str) -> str:
    text = ""
    deadline = time.monotonic() + 20
    while not text.endswith(prompt):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 4096).decode("utf-8", "replace")
    return text


def test_streams_under_way_end_with_a_reason(up) -> None:
    run: Run = up("--device", "null", "--null-speed", "1", "--json-summary", *FREE_PORTS)
    run.wait_for("}\n", 60)
    run.family()
    summary = json.loads(run.out)
    body = {
        "model": summary["model"],
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "max_tokens": 20000,
    }
    body["ignore_eos"] = True
    lines = []
    with httpx.stream("POST", f"{summary['http_url']}/v1/chat/completions", json=body, timeout=20) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                run.process.send_signal(signal.SIGINT)
    assert any('"error"' in line or '"finish_reason":"' in line for line in lines[-6:]), lines[-6:]
    assert run.process.wait(6) == 0
    run.assert_nothing_left()


def test_kill_9_of_the_parent_leaves_no_children(up) -> None:
    run: Run = up("--device", "null", *FREE_PORTS)
    run.wait_for("Ctrl-C stops everything.", 60)
    assert len(run.family()) == 5
    run.process.kill()
    run.process.wait(5)
    run.assert_nothing_left()


@pytest.mark.parametrize("victim", ["dragoman_agent", "dragoman_gateway", "engine.process"])
def test_a_part_that_dies_stops_everything(up, victim: str) -> None:
    run: Run = up("--device", "null", *FREE_PORTS)
    run.wait_for("Ctrl-C stops everything.", 60)
    family = run.family()
    next(p for p in family if any(victim in word for word in p.cmdline()[:6])).kill()
    assert run.process.wait(10) == 1
    assert "error: the " in run.err
    assert "Traceback" not in run.err
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("process", "module"),
    [("engine.process", "numpy"), ("engine.process", "msgpack"), ("dragoman_agent.main", "msgpack"),
     ("dragoman_gateway.main", "uvicorn")],
)  # fmt: skip
def test_a_part_that_lacks_a_module_says_so_in_one_line(up, tmp_path: Path, process: str, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif any({process!r} in word for word in sys.orig_argv): sys.modules[{module!r}] = None\n"
    )
    run: Run = up("--device", "null", *FREE_PORTS, environ={"PYTHONPATH": str(tmp_path)})
    assert run.process.wait(30) == 1
    said = run.err[run.err.index("error: the ") :]
    assert f"the Python module {module!r} is missing" in said
    assert "make setup" in said
    assert "Traceback" not in run.err
    assert "cannot reach" not in run.err
    run.assert_nothing_left()


def test_ctrl_c_while_it_starts(up) -> None:
    run: Run = up("--device", "null", *FREE_PORTS)
    deadline = time.monotonic() + 20
    while len(run.process.children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.family()
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(6) == 0
    run.assert_nothing_left()


def test_a_port_in_use_is_found_before_anything_starts(up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run: Run = up("--device", "null", f"--port={port}", *FREE_PORTS[1:])
        assert run.process.wait(20) == 1
    assert f"error: port {port} for HTTP cannot be used" in run.err
    assert f"(pid {os.getpid()}) holds it" in run.err
    assert "--port PORT" in run.err


def test_a_model_that_was_not_fetched(up, tmp_path: Path) -> None:
    run: Run = up(f"--cache-dir={tmp_path / 'empty'}", *FREE_PORTS)
    assert run.process.wait(20) == 1
    assert "the embedded model is not here yet" in run.err
    assert f"do:  dragoman models fetch embedded --cache-dir {tmp_path / 'empty'}\n" in run.err


@pytest.mark.parametrize(
    ("content", "part"), [(None, "/m.gguf"), (b"GGUF\x03\x00\x00\x00", "m.gguf"), (b"not a model", "not a GGUF file")]
)
def test_a_model_file_that_cannot_be_used(up, tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    run: Run = up("--device=cpu", f"--model={path}", *FREE_PORTS)
    assert run.process.wait(30) == 1
    assert "error: the agent cannot start: " in run.err
    assert part in run.err
    assert run.err.count("m.gguf") == 1, "told once"
    assert "Traceback" not in run.err
    run.assert_nothing_left()
