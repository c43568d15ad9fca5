"""Runs every case, or those named, on one subject, without pytest. Prints `ok CASE` or `OFF CASE: reason`; exit 1 when one is off.

PYTHONPATH=. python -m tests.agent.device.conformance.run interpreted|listed|deterministic|float8|null|cpu|cuda [CASE...]
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.agent.device.conformance.subjects import Subject

GROUPS = ("null", "cpu", "interpreted", "listed", "deterministic", "float8", "cuda")


def main(argv: list[str]) -> int:
    """Run the cases on the subjects of one group."""
    if not argv or argv[0] not in GROUPS:
        print(f"usage: python -m tests.agent.device.conformance.run {'|'.join(GROUPS)} [CASE...]", file=sys.stderr)
        return 2
    if argv[0] in ("interpreted", "listed", "deterministic", "float8"):
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
    from tests.agent.device.conformance import subjects

    groups: dict[str, Callable[[], list[Subject]]] = {
        "null": lambda: [subjects.null_subject()],
        "cpu": subjects.cpu_subjects,
        "interpreted": lambda: [subjects.interpreted_subject()],
        "listed": lambda: [subjects.interpreted_listed_subject()],
        "deterministic": lambda: [subjects.interpreted_deterministic_subject()],
        "float8": lambda: [subjects.interpreted_float8_subject()],
        "cuda": lambda: [
            subjects.cuda_subject(),
            subjects.listed_subject(),
            subjects.deterministic_subject(),
            subjects.float8_subject(),
            subjects.hip_on_cuda_subject(),
        ],
    }
    return report(groups[argv[0]](), argv[1:])


def report(chosen: Iterable[Subject], names: Sequence[str] = ()) -> int:
    """Every case on each subject; 1 when one is off."""
    from tests.agent.device.conformance.bench import Bench
    from tests.agent.device.conformance.cases import CASES

    num_off = 0
    for subject in chosen:
        bench = Bench(subject)
        for case in (case for case in CASES if not names or case.__name__ in names):
            begun = time.perf_counter()
            try:
                case(bench)
            except Exception as error:
                num_off += 1
                traceback.print_exc(file=sys.stderr)
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                print(f"OFF {case.__name__} ({subject.name}): {type(error).__name__}: {reason}", flush=True)
            else:
                print(f"ok {case.__name__} ({subject.name}) {time.perf_counter() - begun:.2f} s", flush=True)
        bench.close()
    print(f"{num_off} cases off", flush=True)
    return 1 if num_off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
