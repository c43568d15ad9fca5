"""By which of the library's algorithms steps of many rows multiply. Pure.

A library chooses by rules that know neither a card's power limit nor how far below its clock it runs there: under the load of
long prompts another of its algorithms can be quicker than the one that it takes itself.
"""

from __future__ import annotations

import itertools

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import LIBRARY_BANDS, LIBRARY_GEMM_RANKS, library_bands, library_gemm_matrices
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.kernel_times import KernelTimes
from dragoman_agent.pal.limits import profile_inputs
from dragoman_agent.pal.plan import LibraryGemm
from dragoman_agent.pal.profile import Profile

# Of the seconds of its own choice: two readings of one algorithm differ by up to 2%, and the least of nine is lucky.
_WORTH = 0.97
_SUBJECT = "gemm-library"


def choose_library_gemm(
    times: KernelTimes, model: ModelConfig, profile: Profile, max_batch_tokens: int, off: str | None
) -> tuple[tuple[LibraryGemm, ...], Decision]:
    """The quickest algorithm of each matrix where it is worth it, of steps up to `max_batch_tokens`. `off`: why nothing is chosen."""
    inputs = profile_inputs(profile, "compute.matmul_bfloat16")
    bands = library_bands(max_batch_tokens)
    if off is None and not bands:
        off = (
            f"no step has the {LIBRARY_BANDS[0].min_rows:,} tokens from which on the library's algorithms are compared"
        )
    if off:
        return (), Decision(_SUBJECT, "none", off, inputs)
    chosen: list[LibraryGemm] = []
    candidates: list[Candidate] = []
    gains: list[str] = []
    for band, (n, k) in itertools.product(bands, library_gemm_matrices(model)):
        rows = band.timed_rows(max_batch_tokens)
        own = times.measured(step_cost.library_gemm_call(rows, n, k, None))
        calls = {rank: step_cost.library_gemm_call(rows, n, k, rank) for rank in LIBRARY_GEMM_RANKS}
        seconds = {rank: taken for rank, call in calls.items() if (taken := times.measured(call)) is not None}
        if own is None or not seconds:
            continue
        best = min(seconds, key=lambda rank: seconds[rank])
        over = f"{seconds[best] / own - 1:+.1%}"
        is_worth = seconds[best] <= _WORTH * own
        if is_worth:
            chosen.append(LibraryGemm(n, k, band.min_rows, band.max_rows, rows, best))
            gains.append(over)
        name = f"{n}x{k} at {rows}"
        candidates += [
            Candidate(
                f"{name} by number {best + 1}",
                seconds[best],
                "" if is_worth else f"{over}, under the {1 - _WORTH:.0%} that count",
            ),
            Candidate(f"{name} by its own choice", own, "slower" if is_worth else ""),
        ]
    if not candidates:
        reason = "the library's algorithms were not timed on this device, which --tune now does"
        return (), Decision(_SUBJECT, "none", reason, inputs)
    if not chosen:
        reason = f"the library's own choice is the quickest of what it offers, within {1 - _WORTH:.0%}"
        return (), Decision(_SUBJECT, "none", reason, inputs, tuple(candidates), unit="s")
    words = ", ".join(f"{one.n}x{one.k} from {one.min_rows} rows by number {one.rank + 1}" for one in chosen)
    reason = (
        "of the algorithms that the library offers these were the quickest on this device under the load of such products, "
        f"against its own choice {', '.join(gains)}"
    )
    return tuple(chosen), Decision(_SUBJECT, words, reason, inputs, tuple(candidates), unit="s")
