"""Which matrix products few rows run as, decided by whole layers that were timed with and without. Pure.

A product that is quicker alone can be slower in a step: it takes bandwidth and L2 from its neighbours, or hides less of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.pal import step_cost
from dragoman_agent.pal.candidates import FEW_ROWS, GEMM_ROWS
from dragoman_agent.pal.decisions import Candidate, Decision
from dragoman_agent.pal.layer_timing import LayerCase, LayerChoices, layer_case
from dragoman_agent.pal.plan import DecodeAttention, GemmDecode
from dragoman_agent.pal.timings import Timings

_TELLS_APART = 0.005  # of the layers: less is what measurements scatter by
Matrices = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Products:
    """How the products of few rows run: rows they are padded to, and the matrices of the kernel of few rows."""

    min_rows: int
    gemm: tuple[GemmDecode, ...]


@dataclass(frozen=True, slots=True)
class LayerQuestion:
    """What is asked of whole layers: `alone` is what the kernels' own times would choose."""

    model: ModelConfig
    page_size: int
    attention: tuple[DecodeAttention, ...]
    alone: Products
    max_num_seqs: int
    dependent: bool  # the device can start kernels early

    def batches(self) -> list[int]:
        """One sequence, and the most of each entry of the kernel of few rows."""
        return list(dict.fromkeys(min(batch, self.max_num_seqs) for batch in (1, *FEW_ROWS)))

    def cases(self) -> Iterator[LayerCase]:
        """Everything to be timed; keys may come twice."""
        for batch in self.batches():
            for min_rows in _paddings(batch):
                names = self.names(max(batch, min_rows))
                if not names and batch >= GEMM_ROWS[-1]:
                    continue
                for chosen in _variants(names):
                    yield self._case(batch, min_rows, chosen, dependent=False)
                    if self.dependent and chosen in (frozenset(), names):
                        yield self._case(batch, min_rows, chosen, dependent=True)

    def seconds(self, timings: Timings, batch: int, min_rows: int, chosen: Matrices) -> float | None:
        """Of the chain, by the quicker of the two ways to launch; None where it was not timed."""
        found = [timings.get(self._case(batch, min_rows, chosen, dependent=on).key) for on in (False, True)]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def names(self, rows: int) -> Matrices:
        """The layers' matrices that the kernel of few rows wins alone at `rows`."""
        layers = step_cost.matrices(self.model)
        return frozenset((one.n, one.k) for one in self.alone.gemm if rows <= one.max_rows and (one.n, one.k) in layers)

    def _case(self, batch: int, min_rows: int, chosen: Matrices, *, dependent: bool) -> LayerCase:
        gemm = tuple(one for one in self.alone.gemm if (one.n, one.k) in chosen)
        choices = LayerChoices(self.page_size, self.attention, min_rows, gemm)
        return layer_case(self.model, choices, batch, dependent=dependent)


def choose_products(
    question: LayerQuestion, timings: Timings | None, decisions: tuple[Decision, Decision]
) -> tuple[Products, tuple[Decision, Decision]]:
    """As the kernels alone tell (with their `decisions` on rows and matrices), but where layers were timed as these do."""
    if timings is None:
        return question.alone, decisions
    rows, rows_decision = _choose_rows(question, timings, decisions[0])
    kept: set[tuple[int, int, int]] = set()
    candidates: list[Candidate] = []
    shares: dict[int, float] = {}
    allowed: Matrices | None = None
    for band in FEW_ROWS:
        names = question.names(band)
        batches = [batch for batch in question.batches() if _band(max(batch, rows)) == band]
        costs = _costs(question, timings, batches, rows, names)
        if frozenset() not in costs:
            if shares or not names:
                break  # an entry serves every smaller number of rows too, so what comes after is not known
            return question.alone, (rows_decision, decisions[1])
        costs = {chosen: cost for chosen, cost in costs.items() if allowed is None or chosen <= allowed}
        best = min(costs, key=lambda chosen: (costs[chosen], len(chosen)))
        allowed = best if costs[best] <= 1 - _TELLS_APART else frozenset()
        shares[band] = costs[allowed]
        kept |= {(n, k, band) for n, k in allowed}
        candidates += [
            Candidate(f"{_words(chosen)} to {band} rows", cost, "" if chosen == allowed else f"{cost - 1:+.1%} of the layers")
            for chosen, cost in costs.items()
        ]  # fmt: skip
        if not allowed:
            break
    if not shares:
        return question.alone, (rows_decision, decisions[1])
    layers = step_cost.matrices(question.model)
    gemm = tuple(
        one for one in question.alone.gemm if (one.n, one.k) not in layers or (one.n, one.k, one.max_rows) in kept
    )
    words = ", ".join(f"{one.n}x{one.k} to {one.max_rows} rows" for one in gemm) or "library"
    each = ", ".join(f"{share - 1:+.1%} to {band} rows" for band, share in shares.items())
    reason = f"whole layers timed on the device with each, against the library's products: {each}"
    decision = Decision("gemm-decode", words, reason, decisions[1].inputs, tuple(candidates))
    return Products(rows, gemm), (rows_decision, decision)


def _choose_rows(question: LayerQuestion, timings: Timings, alone: Decision) -> tuple[int, Decision]:
    """The padding with the quickest layers of one sequence, each with its best matrices."""
    seconds: dict[int, float] = {}
    for rows in GEMM_ROWS:
        names = question.names(rows)
        found = [question.seconds(timings, 1, rows, chosen) for chosen in _variants(names)]
        if found[0] is not None:
            seconds[rows] = min(each for each in found if each is not None)
    if len(seconds) < len(GEMM_ROWS):
        return question.alone.min_rows, alone
    chosen = min(seconds, key=lambda rows: seconds[rows])
    if seconds[question.alone.min_rows] <= (1 + _TELLS_APART) * seconds[chosen]:
        chosen = question.alone.min_rows
    candidates = tuple(
        Candidate(f"{rows}", cost, "" if rows == chosen else f"{cost / seconds[chosen] - 1:+.2%}")
        for rows, cost in seconds.items()
    )
    reason = "the shortest for the layers of one sequence, timed on the device as a chain"
    return chosen, Decision("gemm-rows", f"{chosen}", reason, alone.inputs, candidates, seconds[chosen], unit="s")


def _costs(
    question: LayerQuestion, timings: Timings, batches: Sequence[int], min_rows: int, names: Matrices
) -> dict[Matrices, float]:
    """Mean seconds of the layers by the matrices of the kernel of few rows, as a share of the library's; only what was timed."""
    found: dict[Matrices, float] = {}
    for chosen in _variants(names):
        shares = []
        for batch in batches:
            base = question.seconds(timings, batch, min_rows, frozenset())
            own = question.seconds(timings, batch, min_rows, chosen)
            if base is None or own is None:
                break
            shares.append(own / base)
        else:
            if shares:
                found[chosen] = sum(shares) / len(shares)
    return found


def _variants(names: Matrices) -> list[Matrices]:
    """None, all, each alone, all but each."""
    ordered = sorted(names)
    singles = [frozenset((name,)) for name in ordered]
    return list(dict.fromkeys([frozenset(), names, *singles, *(names - single for single in singles)]))


def _paddings(batch: int) -> list[int]:
    """What a step of `batch` sequences may be padded to, as distinct numbers of rows."""
    return list({max(batch, rows): rows for rows in reversed(GEMM_ROWS)}.values())


def _band(rows: int) -> int:
    return next((most for most in FEW_ROWS if rows <= most), rows)


def _words(chosen: Matrices) -> str:
    return " and ".join(f"{n}x{k}" for n, k in sorted(chosen)) or "library"
