"""Another card's profile forced on this one: visibly slower, or refused. Run by `benchmarks.pal_gpu`.

Its plan and this card's own, with the kernels timed here, take turns as in `benchmarks.small_card`. Where no plan can be made
from it, the refusal is what is recorded. `benchmarks.ablation` does the same through the engine for one such card.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.card import Result
from benchmarks.gpu_setup import Loaded, Setup
from benchmarks.small_card import CELLS, rates

from dragoman_agent.device.precompile import start_compilers
from dragoman_agent.pal.forced import find_profile, take_forced
from dragoman_agent.pal.limits import Limits, PlanError
from dragoman_agent.pal.plan import Plan
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.profile import Profile, ProfileError
from dragoman_agent.pal.switches import Switches

MODELS = ("qwen3-0.6b", "qwen3-8b")
TIMED_CARD = "l4"  # 24 GB: both models fit, at a fifteenth of this card's bandwidth
SMALL_CARD = "rtx4060-laptop"  # 8 GB: the larger model does not
CONTEXTS = (1024, 4096, 9216)  # that a refusal is asked for at
_OWN = "own"


def forced(here: Setup, card: str) -> tuple[Profile, str]:
    """The card's profile as `--profile-force` takes it, and what is said where nothing forces it."""
    named, device = find_profile(card), here.found
    said = "taken without force"
    try:
        take_forced(named, device.facts, device.fingerprint, device.values, force=False)
    except ProfileError as error:
        said = str(error)
    profile, _ = take_forced(named, device.facts, device.fingerprint, device.values, force=True)
    return profile, said


def refusals(here: Setup, profile: Profile) -> list[str]:
    """Why there is no plan from `profile`, by the contexts asked for; empty texts where there is one."""
    found = []
    for context in CONTEXTS:
        try:
            plan_for(profile, here.source.config, Limits(max_context_tokens=context), Switches())
            found.append("")
        except PlanError as error:
            found.append(str(error))
    return found


def refused_result(card: str, said: Sequence[str], unforced: str) -> Result:
    """1 a context at which the planner refused."""
    note = f"forced, at {', '.join(map(str, CONTEXTS))} tokens of context: {said[0]} | not forced: {unforced}"
    return {"bench": "wrong_profile", "case": card, "metric": "refused", "predicted": 1.0, "note": note[:900],
            "samples": [float(bool(text)) for text in said]}  # fmt: skip


def results_of(card: str, found: Mapping[str, Mapping[str, Sequence[float]]], changes: str) -> list[Result]:
    """Tokens a second of the card's plan over the own one's by case, and milliseconds of its decode steps."""
    results: list[Result] = []
    for case, by_plan in found.items():
        wrong, own = by_plan[card], by_plan[_OWN]
        ratio = statistics.median(wrong) / statistics.median(own)
        note = f"{ratio:.3f}: {card}'s plan {statistics.median(wrong):.0f}, own plan {statistics.median(own):.0f} tokens/s; {changes}"
        results.append(
            {"bench": "wrong_profile", "case": f"{card}-{case}", "metric": "wrong_profile_over_own", "predicted": None,
             "note": note, "samples": [a / b for a, b in zip(wrong, own, strict=True)]}
        )  # fmt: skip
        print(f"  {card} {case}: {note}", flush=True)
    for batch, context in CELLS:
        case = f"decode-b{batch}-c{context}"
        wrong_ms, own_ms = ([1e3 * batch / rate for rate in found[case][label]] for label in (card, _OWN))
        results.append(
            {"bench": "wrong_profile", "case": f"{card}-{case}", "metric": "ms_per_step", "predicted": None,
             "note": f"own plan {statistics.median(own_ms):.3f} ms", "samples": wrong_ms}
        )  # fmt: skip
    return results


def changed(own: Plan, wrong: Plan) -> str:
    """The two plans' widest differences."""
    fields = ("page_size", "max_batch_tokens", "num_blocks", "gemm_decode", "dependent_max_batch", "graph_batch_sizes")
    words = [f"chunk {own.max_batch_tokens} -> {wrong.max_batch_tokens}"]
    splits = [[bucket.num_splits for bucket in plan.decode_attention] for plan in (own, wrong)]
    words += [f"parts {splits[0]} -> {splits[1]}"] if splits[0] != splits[1] else []
    differ = [name for name in fields if getattr(own, name) != getattr(wrong, name)]
    return "; ".join([*words, f"also otherwise: {', '.join(differ)}" if differ else "nothing else"])


def wrong_profile(here: Setup, loaded: Loaded) -> list[Result]:
    """The refusal of the small card's profile where it is refused; the other card's plan beside the own one."""
    results: list[Result] = []
    small, unforced = forced(here, SMALL_CARD)
    said = refusals(here, small)
    if all(said):
        results.append(refused_result(SMALL_CARD, said, unforced))
        print(f"  the profile of {SMALL_CARD} is refused: {said[0]}", flush=True)
    profile, unforced = forced(here, TIMED_CARD)
    if all(said := refusals(here, profile)):
        return [*results, refused_result(TIMED_CARD, said, unforced)]
    wrong = plan_for(profile, here.source.config, here.limits, Switches())[0]
    sizes = tuple(batch for batch, _ in CELLS)  # graphs of other sizes would only cost loading
    plans = {_OWN: replace(here.plan, graph_batch_sizes=sizes), TIMED_CARD: replace(wrong, graph_batch_sizes=sizes)}
    start_compilers(
        here.source.config, plans[TIMED_CARD], str(here.found.values["compute.capability"].value)
    ).wait()  # the own one's have been compiled by tuning
    *_, found = rates(loaded, here, plans, in_graphs=True)
    return [*results, *results_of(TIMED_CARD, found, changed(here.plan, wrong))]
