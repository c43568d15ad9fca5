"""Every check of tests/gpu on this machine's GPU, beside each other as far as memory goes, each with a time limit of its own.

    python -m benchmarks.gpu_checks OUT [--models qwen3-0.6b,...] [--only NAME,...] [--skip NAME,...] [--seconds 500]

Prints a line a check and the end of what a failed one said; all that they said goes to OUT/<check>.log, the figures of those that have
some to OUT/<check>.json, the verdicts to OUT/checks.json, the card to OUT/environment.json: benchmarks.record_gpu records OUT/*.json.
What is new in tests/gpu is run too. What never ran on a GPU comes first, long checks that always passed come last.
Exit 1 when a check failed or ran past its own limit; 3 when none did and the time for all ended before some had theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")
GIGABYTES = 110  # of the card that checks may take together
MAX_PARALLEL = 6
NOT_CHECKS = ("check_probe",)  # has its own group: it measures, and needs the card to itself
POLL_SECONDS = 0.1
END_LINES = 25
FIRST, USUAL, LAST = range(3)  # ranks: never ran on a GPU, ran, long and always passed
EXIT_FAILED, EXIT_NO_TIME = 1, 3
# The card's quick profile, which the checks plan from: made once before they start together. And what a record says of the card.
PROFILE = """
import json, sys
from pathlib import Path
from benchmarks.card import environment, usable_gpu
from dragoman_agent.pal.probe import profile_device
card = usable_gpu()
profile_device(card, Path("/tmp/dragoman-check"))
Path(sys.argv[1]).write_text(json.dumps(environment(card.facts.index)))
"""
MAX_SAID = 600  # letters of a check's cases in its record


@dataclass(frozen=True, slots=True)
class Check:
    """One command."""

    name: str
    command: tuple[str, ...]
    gigabytes: int = 30
    limit_seconds: float = 120.0
    alone: bool = False  # it counts, times or breaks on purpose what belongs to the whole card
    rank: int = USUAL


@dataclass(slots=True)
class Running:
    """A check under way."""

    check: Check
    process: subprocess.Popen[bytes]
    begun: float


def script(name: str, *arguments: str, out: Path | None = None, **settings: Any) -> Check:
    """A file of tests/gpu. In `out` it leaves its figures."""
    label = "-".join([name, *arguments]).removeprefix("check_")
    return Check(label, (sys.executable, f"tests/gpu/{name}.py", *arguments, *_into(out, label)), **settings)


def _into(out: Path | None, label: str) -> tuple[str, ...]:
    return ("--out", str(out.absolute() / f"{_stem(label)}.json")) if out else ()


def _stem(label: str) -> str:
    return label.replace("/", "_").replace(":", "_")


def figure_checks(model: str, out: Path) -> list[Check]:
    """Those that time or count what is recorded, and so have the card to themselves."""

    def timed(label: str, *command: str, limit: float, rank: int = USUAL) -> Check:
        return Check(label, (sys.executable, *command, *_into(out, label)), 100, limit, alone=True, rank=rank)

    traces = ("--traces", str(out.absolute() / "traces"))
    return [
        script("check_tiers", model, out=out, gigabytes=100, limit_seconds=150, alone=True, rank=FIRST),
        timed(f"overlap-{model}", "tests/gpu/check_overlap.py", model, *traces, limit=150, rank=FIRST),
        timed("determinism-cost", "tests/gpu/check_determinism.py", "--cost", "--no-rows", limit=160),
        timed("kv_fp8", "tests/gpu/check_kv_fp8.py", "--speed", "--models", model, limit=120),
        timed("sampling_gpu", "-m", "benchmarks.sampling_gpu", limit=120),
        timed("submit_gpu", "-m", "benchmarks.submit_gpu", model, limit=90),
    ]


def all_checks(models: Sequence[str], out: Path, embedded: str = "") -> list[Check]:
    """Those known here, then whatever else tests/gpu has. Figures go to `out`."""
    ops = "tests/kernels/triton/check_ops.py"
    known = [
        script("check_sticky", f"random:{models[0]}", gigabytes=70, limit_seconds=180, alone=True, rank=FIRST),
        *figure_checks(models[0], out),
        script("check_mixed_graphs", models[0], gigabytes=45, limit_seconds=150, rank=FIRST),
        script("check_embedding", out=out, gigabytes=40, limit_seconds=180, rank=FIRST),
        script("check_determinism", out=out, limit_seconds=150),
        script("check_grouping", gigabytes=8, limit_seconds=90, alone=True, rank=FIRST),
        script("check_facts", gigabytes=2, limit_seconds=40, alone=True),
        script("check_indices", gigabytes=8, limit_seconds=80, alone=True),
        *(Check(f"ops-{dtype}", (sys.executable, ops, "cuda", dtype), 8, 200) for dtype in ("bfloat16", "float16")),
        script("check_device", gigabytes=20, limit_seconds=200),
        *(script("check_parity", model, gigabytes=55 if model.endswith("8b") else 25, limit_seconds=200, rank=LAST) for model in models),
        script("check_features", models[0], gigabytes=25, limit_seconds=150),
        script("check_sampling", gigabytes=8, limit_seconds=150),
    ]  # fmt: skip
    if embedded:
        known.append(script("check_engine", embedded, gigabytes=25, limit_seconds=150))
    named = {file_of(check).stem for check in known} | {"check_engine", *NOT_CHECKS}
    found = sorted(path.stem for path in (ROOT / "tests/gpu").glob("check_*.py"))
    return [*known, *(script(name, limit_seconds=150) for name in found if name not in named)]


def file_of(check: Check) -> Path:
    """What it runs, from the root."""
    name, module = check.command[1:3] if len(check.command) > 2 else (check.command[1], "")
    return Path(*module.split(".")).with_suffix(".py") if name == "-m" else Path(name)


def cases_of(log: str) -> dict[str, Any]:
    """How many cases a check's log calls good and off, and what it says of them: a line a case, "ok ..." or "... ok", and else."""
    good, off = [], []
    for line in (line.strip() for line in log.splitlines()):
        if line.startswith("OFF") or line.endswith("TOO LARGE"):
            off.append(line)
        elif line.startswith("ok ") or line.endswith(" ok"):
            good.append(line)
    if not good and not off:
        return {}
    said = "; ".join([*off, *(line.removeprefix("ok ") for line in good)])
    return {
        "num_good": len(good),
        "num_off": len(off),
        "said": said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]}...",
    }


class Runner:
    """Starts what fits, ends what is late, tells what came of each."""

    def __init__(self, out: Path, seconds: float) -> None:
        """`seconds`: nothing runs longer than that from now."""
        self._out = out
        self._deadline = time.monotonic() + seconds
        self.verdicts: dict[str, dict[str, Any]] = {}

    def run(self, checks: Sequence[Check]) -> None:
        """By rank: the first of those alone one after another, then those beside each other, then the rest of those alone."""
        alone = sorted((one for one in checks if one.alone), key=lambda one: one.rank)
        for check in (one for one in alone if one.rank == FIRST):
            self._together([check])
        self._together(sorted((one for one in checks if not one.alone), key=lambda one: (one.rank, -one.gigabytes)))
        for check in (one for one in alone if one.rank != FIRST):
            self._together([check])

    def _together(self, waiting: list[Check]) -> None:
        running: list[Running] = []
        while waiting or running:
            room = GIGABYTES - sum(one.check.gigabytes for one in running)
            fitting = [check for check in waiting if not running or check.gigabytes <= room]
            if fitting and len(running) < MAX_PARALLEL:
                check = fitting[0]
                waiting.remove(check)
                if time.monotonic() > self._deadline:
                    self._tell(check, 0.0, "the time for all checks was over before it began", no_time=True)
                    continue
                running.append(self._start(check))
                continue
            time.sleep(POLL_SECONDS)
            running = [one for one in running if not self._ended(one)]

    def _start(self, check: Check) -> Running:
        with self._log(check).open("wb") as log:
            process = subprocess.Popen(
                check.command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OUT": str(self._out.absolute())},
            )  # fmt: skip
        return Running(check, process, time.monotonic())

    def _ended(self, one: Running) -> bool:
        """Whether it has; one past its limit is made to, with all that it started."""
        code, now = one.process.poll(), time.monotonic()
        seconds = now - one.begun
        if code is not None:
            self._tell(one.check, seconds, "" if code == 0 else f"exit {code}")
            return True
        is_late = seconds > one.check.limit_seconds
        if is_late or now > self._deadline:
            os.killpg(one.process.pid, 9)  # its own group: made with its session
            one.process.wait()
            why = f"its limit is {one.check.limit_seconds:g} s" if is_late else "the time for all checks was over"
            self._tell(one.check, seconds, f"ended after {seconds:.0f} s, {why}", no_time=not is_late)
            return True
        return False

    def _tell(self, check: Check, seconds: float, problem: str, *, no_time: bool = False) -> None:
        verdict = "no time" if no_time else "failed" if problem else "ok"
        log = self._log(check)
        cases = cases_of(log.read_text(errors="replace") if log.exists() and not no_time else "")
        self.verdicts[check.name] = {"verdict": verdict, "seconds": round(seconds, 1), "problem": problem, **cases}
        print(f"{'FAILED' if verdict == 'failed' else verdict:7} {check.name} {seconds:.1f} s {problem}", flush=True)
        if problem and log.exists():
            lines = log.read_text(errors="replace").splitlines()[-END_LINES:]
            print("\n".join(f"       | {line[:300]}" for line in lines), flush=True)
        (self._out / "checks.json").write_text(json.dumps(self.verdicts, indent=1) + "\n")

    def named(self, verdict: str) -> list[str]:
        """The checks with this verdict: ok, failed, no time."""
        return [name for name, one in self.verdicts.items() if one["verdict"] == verdict]

    def _log(self, check: Check) -> Path:
        return self._out / f"{_stem(check.name)}.log"


def main() -> int:
    """Run and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default="", help="names of checks, or beginnings of them")
    parser.add_argument("--skip", default="", help="names of checks to leave out, or beginnings of them")
    parser.add_argument("--seconds", type=float, default=500.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    checks = all_checks(options.models.split(","), options.out, os.environ.get("EMBEDDED_MODEL", ""))
    for flag, names in (("--only", options.only), ("--skip", options.skip)):
        for name in names.split(",") if names else ():
            if not name or not any(one.name.startswith(name) for one in checks):
                parser.error(
                    f"{flag}: no check's name begins with {name!r}; there are {', '.join(one.name for one in checks)}"
                )
    if options.only:
        checks = [one for one in checks if one.name.startswith(tuple(options.only.split(",")))]
    if options.skip:
        checks = [one for one in checks if not one.name.startswith(tuple(options.skip.split(",")))]
    runner = Runner(options.out, options.seconds)
    environment = str(options.out.absolute() / "environment.json")
    profile = Check("profile", (sys.executable, "-c", PROFILE, environment), 4, 60, alone=True, rank=FIRST)
    runner.run([profile, *checks])
    failed, no_time = runner.named("failed"), runner.named("no time")
    print(
        f"{len(runner.named('ok'))} of {len(runner.verdicts)} checks are good"
        + (f"; failed: {', '.join(failed)}" if failed else "")
        + (f"; no time: {', '.join(no_time)}" if no_time else "")
    )
    return EXIT_FAILED if failed else EXIT_NO_TIME if no_time else 0


if __name__ == "__main__":
    sys.exit(main())
