"""Settings of every process: a frozen dataclass filled from flags, environment, a TOML file and defaults, in this order.

A process writes one dataclass and calls `parse`. Field metadata: `help`, `unit`, `group`, `min`, `max`, `choices`.
Standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shutil
import sys
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from dragoman_cli.values import describe_kind, is_flag, read_value

ENV_PREFIX = "DRAGOMAN_"
SECTIONS = ("agent", "controller", "gateway", "up")
SETTINGS_TYPES = {
    "agent": ("dragoman_agent.config", "AgentSettings"),
    "controller": ("dragoman_controller.config", "ControllerSettings"),
    "gateway": ("dragoman_gateway.config", "GatewaySettings"),
    "up": ("dragoman_cli.up_settings", "UpSettings"),
}
# Read elsewhere than in the settings.
_OTHER_VARIABLES = ("CONFIG", "DEBUG", "CONTROLLER", "AGENT", "CACHE_DIR", "REQUIRE", "FAULTS")
_EXIT_USAGE = 2


class DataclassInstance(Protocol):
    """Any dataclass."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]


S = TypeVar("S", bound=DataclassInstance)


class ConfigError(ValueError):
    """A setting that cannot be used: what, from where, why, and what is allowed. One line."""


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """Settings, for each field where its value came from ("flag --port", "default"), and the file that was read."""

    settings: S
    origins: dict[str, str]
    path: Path | None = None


def parse(
    settings_type: type[S], prog: str, argv: list[str] | None = None, environ: Mapping[str, str] | None = None
) -> S:
    """The settings of the process `prog` ("dragoman-agent" reads the section [agent]).

    `--help` prints and exits 0; a setting that cannot be used prints one line to stderr and exits 2.
    """
    return parse_with_origins(settings_type, prog, argv, environ).settings


def parse_with_origins(
    settings_type: type[S], prog: str, argv: list[str] | None = None, environ: Mapping[str, str] | None = None
) -> Resolved[S]:
    """As `parse`, with the origin of each value."""
    environ = os.environ if environ is None else environ
    parser = build_parser(settings_type, prog)
    flags, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if unknown:
        parser.error(_unknown_argument(unknown[0], parser))
    given = vars(flags)
    config = given.pop("config", None) or environ.get(f"{ENV_PREFIX}CONFIG") or None
    try:
        file = read_file(Path(config).expanduser()) if config else None
        return resolve(settings_type, given, environ, file, section=section_of(prog))
    except ConfigError as error:
        parser.error(str(error))


def section_of(prog: str) -> str:
    """The section of the config file that a program reads: the last word of its name."""
    return prog.replace("-", " ").split()[-1]


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file that was read."""

    path: Path
    sections: dict[str, Any]


def read_file(path: Path) -> ConfigFile:
    """Reads a TOML config file. Raises ConfigError when it is missing, not TOML, or has an unknown section."""
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not valid TOML: {error}") from None
    for name, section in sections.items():
        if name not in SECTIONS:
            known = ", ".join(f"[{known}]" for known in SECTIONS)
            raise ConfigError(f"{path}: unknown section [{name}]{did_you_mean(name, SECTIONS)} (known: {known})")
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name!r} must be a section; write [{name}] and its keys below")
    return ConfigFile(path, sections)


def resolve(
    settings_type: type[S],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    file: ConfigFile | None = None,
    *,
    section: str = "",
) -> Resolved[S]:
    """Picks each field's value: flag, then environment, then file, then default.

    An empty variable counts as unset. Raises ConfigError.
    """
    kinds = typing.get_type_hints(settings_type)
    fields = dataclasses.fields(settings_type)
    table = file.sections.get(section, {}) if file else {}
    names = [field.name for field in fields]
    for key in table:
        if key.replace("-", "_") not in names:
            raise ConfigError(f"{file and file.path}: unknown key {key!r} in [{section}]{did_you_mean(key, names)}")
    in_file = {key.replace("-", "_"): value for key, value in table.items()}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in fields:
        name, variable = field.name, ENV_PREFIX + field.name.upper()
        if name in flags:
            raw, origin = flags[name], f"flag {flag_of(name)}"
        elif environ.get(variable):
            raw, origin = environ[variable], f"env {variable}"
        elif name in in_file:
            raw, origin = in_file[name], f"file {file and file.path} [{section}].{name}"
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{flag_of(name)} is required (or set {variable})")
        else:
            origins[name] = "default"
            continue
        try:
            values[name] = read_value(kinds[name], raw, field.metadata)
        except ValueError as error:
            raise ConfigError(f"{flag_of(name)}: {error} (from {origin})") from None
        origins[name] = origin
    try:
        return Resolved(settings_type(**values), origins, file.path if file else None)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def build_parser(settings_type: type[DataclassInstance], prog: str) -> argparse.ArgumentParser:
    """An argparse parser whose values stay text: `resolve` reads them, so that every source gives the same errors."""
    # A dataclass without a docstring gets its signature as one.
    documented = not (settings_type.__doc__ or "").startswith(f"{settings_type.__name__}(")
    description = (settings_type.__doc__ or "").strip() if documented else ""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=_HelpFormatter)
    kinds = typing.get_type_hints(settings_type)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(settings_type):
        title = field.metadata.get("group", "options of this program")
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        kind = kinds[field.name]
        arguments: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help_of(field)}
        if is_flag(kind):
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["metavar"] = describe_kind(kind, field.metadata)
        group.add_argument(flag_of(field.name), **arguments)
    common = parser.add_argument_group("configuration")
    common.add_argument(
        "--config",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help=f"TOML file; this program reads the section [{section_of(prog)}] [env {ENV_PREFIX}CONFIG]",
    )
    return parser


def misspelled_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each DRAGOMAN_ variable that nothing reads and whose name is near one that something reads."""
    given = [name for name in environ if name.startswith(ENV_PREFIX)]
    known = {f"{ENV_PREFIX}{name}": None for name in _OTHER_VARIABLES}
    for module, settings in SETTINGS_TYPES.values() if given else ():
        try:
            fields = dataclasses.fields(getattr(import_module(module), settings))
        except ImportError:  # that part is not installed
            continue
        known |= {f"{ENV_PREFIX}{field.name.upper()}": None for field in fields}
    warnings = []
    for name in given:
        near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            warnings.append(f"the variable {name} is not read by anything; did you mean {near[0]}?")
    return warnings


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the nearest known name, or nothing when none is near."""
    by_shape = {entry.replace("-", "_").lower(): entry for entry in known}
    near = difflib.get_close_matches(name.replace("-", "_").lower(), by_shape, n=1, cutoff=0.6)
    return f"; did you mean {by_shape[near[0]]}?" if near else ""


def _help_of(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    default = "required" if field.default is MISSING and field.default_factory is MISSING else _default_of(field)
    return f"{text} [{default}; env {ENV_PREFIX}{field.name.upper()}]".lstrip()


def _default_of(field: dataclasses.Field[Any]) -> str:
    value = field.default_factory() if callable(field.default_factory) else field.default
    if value is None or value in ("", ()):
        return "default: none"
    if isinstance(value, tuple):
        value = ",".join(str(item) for item in value)
    return f"default: {str(value).replace('%', '%%')}"


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; settings are given as --name VALUE"
    flag = argument.split("=", 1)[0]
    known = [option for action in parser._actions for option in action.option_strings]
    return f"unknown option {flag}{did_you_mean(flag, known)}"


class _Parser(argparse.ArgumentParser):
    """Prints an error as one line, without the usage block that pushes it off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_USAGE, f"{self.prog}: {message} (--help lists all options)\n")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(120, shutil.get_terminal_size((100, 24)).columns))
