"""Settings from flags, environment, file and defaults, and what is said when one is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from dragoman_agent.config import AgentSettings
from dragoman_cli.config import ConfigError, misspelled_variables, parse, parse_with_origins, read_file, resolve
from dragoman_cli.up_settings import UpSettings, agent_arguments, controller_arguments, gateway_arguments
from dragoman_cli.values import read_value
from dragoman_controller.config import ControllerSettings
from dragoman_gateway.config import GatewaySettings

PROCESSES = {
    "agent": AgentSettings,
    "controller": ControllerSettings,
    "gateway": GatewaySettings,
    "up": UpSettings,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """An example process."""

    model: str = field(default="embedded", metadata={"help": "What to serve.", "group": "model"})
    device: Literal["auto", "cpu", "null"] = field(default="auto", metadata={"help": "Where to run.", "group": "model"})
    kv_bytes: int | None = field(default=None, metadata={"help": "KV memory.", "unit": "bytes", "min": 1})
    max_context_tokens: int = field(default=2048, metadata={"help": "Context.", "unit": "tokens"})
    port: int = field(default=8000, metadata={"help": "Port; 100% of it.", "min": 0, "max": 65535})
    grace_seconds: float = field(default=5.0, metadata={"help": "Grace.", "unit": "seconds", "min": 0})
    open: bool = field(default=False, metadata={"help": "Accept requests without a ticket."})
    controllers: tuple[str, ...] = field(default=("127.0.0.1:50050",), metadata={"help": "Where to register."})
    cache_dir: Path = field(default=Path("/tmp/x"), metadata={"help": "Cache."})

    def __post_init__(self) -> None:
        if self.open and self.controllers == ():
            raise ValueError("--open: needs --controllers")


@dataclass(frozen=True, slots=True)
class Needs:
    """A process with a setting that has no default."""

    key: str


def run(*argv: str, environ: dict[str, str] | None = None):
    return parse_with_origins(Settings, "dragoman-agent", list(argv), environ or {})


def failure(capsys: pytest.CaptureFixture[str], *argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as exit_:
        run(*argv, environ=environ)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, "an error is one line"
    assert captured.err.startswith("dragoman-agent: ")
    return captured.err


def test_defaults() -> None:
    resolved = run()
    assert resolved.settings == Settings()
    assert set(resolved.origins.values()) == {"default"}


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.toml"
    file.write_text('[agent]\nport = 1\nmodel = "file"\nkv-bytes = "1GiB"\nopen = true\n[gateway]\nport = 99\n')
    environ = {"DRAGOMAN_PORT": "2", "DRAGOMAN_MODEL": "env", "DRAGOMAN_DEVICE": ""}
    resolved = run("--port", "3", "--config", str(file), environ=environ)
    assert (resolved.settings.port, resolved.settings.model, resolved.settings.kv_bytes) == (3, "env", 1 << 30)
    assert resolved.settings.open is True
    assert resolved.origins["port"] == "flag --port"
    assert resolved.origins["model"] == "env DRAGOMAN_MODEL"
    assert resolved.origins["kv_bytes"] == f"file {file} [agent].kv_bytes"
    assert resolved.origins["device"] == "default"
    by_variable = parse(Settings, "dragoman-agent", [], {"DRAGOMAN_CONFIG": str(file)})
    assert by_variable.port == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("32k", 32768), ("64KiB", 65536), ("500MB", 500_000_000), ("1.5g", 3 << 29), ("1_000", 1000)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_value(int, text, {"unit": "bytes"}) == size
    assert run("--kv-bytes", text).settings.kv_bytes == size


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("2m", 120.0), ("1.5", 1.5), ("30 s", 30.0)])
def test_durations(text: str, seconds: float) -> None:
    assert run("--grace-seconds", text).settings.grace_seconds == seconds


def test_lists_flags_paths_and_none() -> None:
    settings = run("--controllers", "a:1, b:2", "--open", "--cache-dir", "~/m", "--kv-bytes", "none").settings
    assert settings.controllers == ("a:1", "b:2")
    assert settings.open is True
    assert settings.cache_dir == Path("~/m").expanduser()
    assert settings.kv_bytes is None
    assert run("--no-open", environ={"DRAGOMAN_OPEN": "yes"}).settings.open is False
    assert run("--max-context-tokens", "8k").settings.max_context_tokens == 8192


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--prot", "1"], ["unknown option --prot", "did you mean --port?"]),
        (["--port", "abc"], ["--port", "'abc' is not a whole number", "flag --port"]),
        (["--port", "70000"], ["70000 is above the most allowed, 65535"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--device", "cuda9"], ["'cuda9' is not one of auto, cpu, null"]),
        (["--kv-bytes", "8GiX"], ["'8GiX' is not a size in bytes", "8GiB"]),
        (["--kv-bytes", "5ib"], ["is not a size in bytes"]),
        (["--kv-bytes", "0"], ["0 is below the least allowed, 1"]),
        (["--max-context-tokens", "8kB"], ["is not a size in tokens"]),
        (["--grace-seconds", "nan"], ["'nan' is not a finite number"]),
        (["--grace-seconds", "-1"], ["-1.0 is below the least allowed, 0"]),
        (["serve"], ["unexpected argument 'serve'"]),
        (["--open", "--controllers", ""], ["--open: needs --controllers"]),
        (["--config", "/nowhere/x.toml"], ["cannot read the config file /nowhere/x.toml", "No such file"]),
        (["--por", "1"], ["unknown option --por", "--port"]),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    line = failure(capsys, *argv)
    for part in parts:
        assert part in line


def test_error_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    line = failure(capsys, environ={"DRAGOMAN_OPEN": "maybe"})
    assert "'maybe' is not a truth value" in line
    assert "env DRAGOMAN_OPEN" in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[agent]\nprot = 1\n", ["unknown key 'prot' in [agent]", "did you mean port?"]),
        ("[agnet]\nport = 1\n", ["unknown section [agnet]", "did you mean agent?"]),
        ("port = 1\n", ["unknown section [port]"]),
        ("agent = 1\n", ["'agent' must be a section"]),
        ("[agent\n", ["is not valid TOML"]),
        ('[agent]\nport = "x"\n', ["'x' is not a whole number", "[agent].port"]),
        ("[agent]\nport = true\n", ["True is not a whole number"]),
        ("[agent]\nmodel = 3\n", ["3 is not a text"]),
        ("[agent]\ncontrollers = 3\n", ["3 is not a list"]),
        ("[agent]\ngrace_seconds = inf\n", ["is not a finite number"]),
    ],
)
def test_file_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    line = failure(capsys, "--config", str(file))
    for part in parts:
        assert part in line


def test_a_required_field_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="--key is required \\(or set DRAGOMAN_KEY\\)"):
        resolve(Needs, {}, {})


def test_file_of_binary_rubbish_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_file(file)


def test_help_is_grouped_and_names_variables_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "An example process." in text
    assert "model:" in text
    assert "options of this program:" in text
    assert "--port INT Port; 100% of it. [default: 8000; env DRAGOMAN_PORT]" in text
    assert "--open, --no-open" in text
    assert "{auto,cpu,null}" in text
    assert "[env DRAGOMAN_CONFIG]" in text


def test_the_readme_shows_a_file_that_is_understood(tmp_path: Path) -> None:
    readme = Path(__file__).resolve().parents[2] / "clients" / "cli" / "README.md"
    path = tmp_path / "dragoman.toml"
    path.write_text(readme.read_text().split("```toml\n")[1].split("```")[0])
    file = read_file(path)
    assert len(file.sections) == 3
    for name in file.sections:
        origins = resolve(PROCESSES[name], {}, {}, file, section=name).origins
        assert any(origin.startswith("file") for origin in origins.values())


def test_up_passes_on_only_options_that_its_processes_have() -> None:
    settings = UpSettings(
        model="null", device="null", max_context=64, served_model_name=("a", "b"), threads=1, dtype="float32",
        memory_utilization=0.5, cache_dir=Path("/c"), null_oracle="echo", null_speed=1.0, profile="rtx4090",
        profile_force=True, deterministic=True, pal="off", pal_arena="off", chat_template=Path("/t.jinja"),
        trace_dir=Path("/trace"), kv_host_bytes=5, kv_disk_dir=Path("/kv"), kv_disk_bytes=7,
    )  # fmt: skip
    given = dict.fromkeys(UpSettings.__dataclass_fields__, "flag")
    agent = parse(AgentSettings, "dragoman-agent", agent_arguments(settings, given, "h:1"), {})
    assert (agent.served_model_name, agent.null_oracle, agent.controllers) == (("a", "b"), "echo", ("h:1",))
    assert (agent.cache_dir, agent.chat_template) == (Path("/c"), Path("/t.jinja"))
    assert (agent.profile, agent.profile_force, agent.pal, agent.pal_arena) == ("rtx4090", True, "off", "off")
    assert agent.deterministic and agent.trace_dir == Path("/trace")
    assert (agent.kv_host_bytes, agent.kv_disk_dir, agent.kv_disk_bytes) == (5, Path("/kv"), 7)
    assert parse(ControllerSettings, "dragoman-controller", controller_arguments(settings), {}).port == 50050
    assert parse(GatewaySettings, "dragoman-gateway", gateway_arguments(settings, "h:1"), {}).controller == "h:1"


def test_a_misspelled_variable_is_warned_about() -> None:
    environ = {"DRAGOMAN_PROT": "1", "DRAGOMAN_API_KEY": "x", "DRAGOMAN_MODEL": "m", "DRAGOMAN_OF_ANOTHER_TOOL": "1"}
    (warning,) = misspelled_variables(environ)
    assert warning == "the variable DRAGOMAN_PROT is not read by anything; did you mean DRAGOMAN_PORT?"
