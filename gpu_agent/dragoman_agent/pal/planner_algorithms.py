"""By which of the library's algorithms steps of many rows multiply. Pure.

A library chooses by rules that know neither a card's power limit nor how far below its clock it runs there: under the load of
long prompts another of its algorithms can be quicker than the one that it takes itself.
"""

from __future__ import annotations

import itertools

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import LIBRARY_BANDS, LIBRARY_GEMM_RANKS, library_gemm_matrices
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import LibraryGemm
from dragoman_agent.pal.profile import Profile

_WORTH = 0.97  # of the seconds of its own choice: two readings of one algorithm differ by up to 2%, and the least of nine is lucky


def choose_library_gemm(
    times: KernelTimes, model: ModelConfig, profile: Profile, off: str | None
) -> tuple[tuple[LibraryGemm, ...], Decision]:
    """The quickest algorithm of each matrix where it is worth it. `off`: why nothing is to be chosen."""
    subject, inputs = "gemm-library", profile_inputs(profile, "compute.matmul_bfloat16")
    if off:
        return (), Decision(subject, "none", off, inputs)
    chosen: list[LibraryGemm] = []
    candidates: list[Candidate] = []
    gains: list[str] = []
    for band, (n, k) in itertools.product(LIBRARY_BANDS, library_gemm_matrices(model)):
        found = {
            rank: times.measured(step_cost.library_gemm_call(band.timed_rows, n, k, rank))
            for rank in (None, *LIBRARY_GEMM_RANKS)
        }
        seconds = {rank: taken for rank, taken in found.items() if taken is not None}
        if None not in seconds or len(seconds) < 2:
            continue
        own = seconds[None]
        best = min(seconds, key=lambda rank: seconds[rank])
        if best is not None and seconds[best] <= _WORTH * own:
            chosen.append(LibraryGemm(n, k, band.min_rows, band.max_rows, band.timed_rows, best))
            gains.append(f"{seconds[best] / own - 1:+.1%}")
        else:
            best = None
        candidates += [
            Candidate(
                f"{n}x{k} at {band.timed_rows} {_words(rank)}",
                taken,
                "" if rank == best else f"{taken / seconds[best] - 1:+.1%}",
            )
            for rank, taken in seconds.items()
        ]
    if not candidates:
        return (), Decision(subject, "none", "the library's algorithms were not timed on this device", inputs)
    rows = " and ".join(f"{band.timed_rows:,}" for band in LIBRARY_BANDS)
    if not chosen:
        reason = f"the library's own choice is the quickest of what it offers for {rows} rows, within {1 - _WORTH:.0%}"
        return (), Decision(subject, "none", reason, inputs, tuple(candidates))
    words = ", ".join(f"{one.n}x{one.k} from {one.min_rows} rows {_words(one.rank)}" for one in chosen)
    reason = (
        f"of the algorithms that the library offers for {rows} rows these were the quickest on this device under the load of "
        f"such products, against its own choice {', '.join(gains)}"
    )
    return tuple(chosen), Decision(subject, words, reason, inputs, tuple(candidates))


def _words(rank: int | None) -> str:
    return "by its own choice" if rank is None else f"by number {rank + 1}"
