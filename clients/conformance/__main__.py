"""`python -m clients.conformance`: every case against every language whose toolchain is here, as one table."""

from __future__ import annotations

import argparse
import fnmatch
import sys

from dragoman.channel import quiet_grpc

quiet_grpc()

from clients.conformance.case import load_cases  # noqa: E402
from clients.conformance.harness import Harness, Outcome  # noqa: E402
from clients.conformance.language import BuildError, load_languages  # noqa: E402


def main() -> int:
    """Exit 0 when every case that was played passed."""
    parser = argparse.ArgumentParser(prog="python -m clients.conformance", description=__doc__)
    languages = load_languages()
    parser.add_argument("--language", action="append", choices=languages, help="only this language; may be repeated")
    parser.add_argument("--case", default="*", help="only the cases whose name fits this pattern, such as 'resume/*'")
    parser.add_argument("--verbose", action="store_true", help="every difference, not the first three of a case")
    parser.add_argument("--list", action="store_true", help="list the cases and why each is there")
    arguments = parser.parse_args()
    cases = [case for case in load_cases() if fnmatch.fnmatch(case.name, arguments.case)]
    if not cases:
        print(f"conformance: no case fits {arguments.case!r}; see --list", file=sys.stderr)
        return 2
    if arguments.list:
        for case in cases:
            print(f"{case.name}\n    {case.why}")
        return 0
    wanted = arguments.language or list(languages)
    results: dict[str, dict[str, Outcome]] = {name: {} for name in wanted}
    notes = []
    with Harness() as harness:
        for name in wanted:
            missing = languages[name].missing()
            if missing:
                notes.append(f"{name}: skipped, {missing} is not on the PATH")
                continue
            try:
                for case in cases:
                    results[name][case.name] = outcome = harness.play(case, languages[name])
                    shown = outcome.problems if arguments.verbose else outcome.problems[:3]
                    notes += [f"{name} {case.name}: {problem}" for problem in shown]
            except BuildError as error:
                notes.append(str(error))
    print(table([case.name for case in cases], results))
    print("\n".join(notes))
    failed = any(outcome.problems for played in results.values() for outcome in played.values())
    unbuilt = any(not results[name] and not languages[name].missing() for name in wanted)
    return 1 if failed or unbuilt else 0


def table(cases: list[str], results: dict[str, dict[str, Outcome]]) -> str:
    """Case x language: ok, FAIL, or - where it was not played; the last line counts."""
    width = max(len(case) for case in cases)
    rows = [" ".join(["case".ljust(width), *(f"{name:>10}" for name in results)])]
    for case in cases:
        marks = [
            "-" if case not in played else "FAIL" if played[case].problems else "ok" for played in results.values()
        ]
        rows.append(" ".join([case.ljust(width), *(f"{mark:>10}" for mark in marks)]))
    totals = [f"{sum(not outcome.problems for outcome in played.values())}/{len(cases)}" for played in results.values()]
    rows.append(" ".join(["passed".ljust(width), *(f"{total:>10}" for total in totals)]))
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
