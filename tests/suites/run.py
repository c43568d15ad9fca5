"""Runs public test suites against a live gateway on the null device and prints a table of what passed.

    python tests/suites/run.py [--uv uv]

A suite is installed into a folder of its own, never into the project's environment. One that cannot be installed is named
and skipped with its reason.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cell import running_cell  # noqa: E402 - the project's folder is not on the path of a script

ENVIRONMENTS = ROOT / ".venv" / "suites"
SCHEMATHESIS = "schemathesis==4.32.5"
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
MAX_EXAMPLES = 20
SEED = 1
INSTALL_SECONDS, RUN_SECONDS = 600, 900


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `passed` None: skipped."""

    suite: str
    check: str
    passed: bool | None
    note: str


def install(uv: str, name: str, requirement: str) -> tuple[Path | None, str]:
    """The command of a suite in an environment of its own, or None and why not."""
    folder = ENVIRONMENTS / name
    command = folder / "bin" / name
    if command.exists():
        return command, ""
    for step in (
        [uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "-q", "--python", str(folder / "bin" / "python"), requirement],
    ):
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{step[0]}: {error}"
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return command, ""


def schemathesis(uv: str, url: str) -> list[Result]:
    """Each check by itself, so that the table says which one failed."""
    command, reason = install(uv, "schemathesis", SCHEMATHESIS)
    if command is None:
        return [Result("schemathesis", "all", None, f"not installed: {reason}")]
    results = []
    for check in CHECKS:
        done = subprocess.run(
            [str(command), "run", f"{url}/openapi.json", "--url", url, "--checks", check, "--max-examples",
             str(MAX_EXAMPLES), "--seed", str(SEED), "--request-timeout", "30", "--no-color"],
            capture_output=True, text=True, timeout=RUN_SECONDS, check=False, cwd=ENVIRONMENTS,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout + done.stderr)
        summary = next((line.strip() for line in done.stdout.splitlines() if " generated, " in line), "")
        results.append(Result("schemathesis", check, done.returncode == 0, summary))
    return results


def main() -> int:
    """Run the suites; 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv", help="the uv command")
    arguments = parser.parse_args()
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    # A short context: a legal request without a limit must end within the suite's patience.
    with running_cell(("--max-context", "256"), gateway=("--served-model-name", "*")) as cell:
        results = schemathesis(arguments.uv, cell.url)
        cell.quiesce(60)
    for result in results:
        verdict = {True: "passed", False: "FAILED", None: "skipped"}[result.passed]
        print(f"{result.suite:14} {result.check:32} {verdict:8} {result.note}")
    return 1 if any(result.passed is False for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
