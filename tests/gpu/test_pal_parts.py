"""The parts of `benchmarks.pal_gpu` and `small_card` that need no card: what they compare, what choosing costs, what is refused."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import (
    ablation,
    attention_variants,
    pal_gpu,
    plan_quality,
    record_gpu,
    selection,
    small_card,
    wrong_profile,
)
from benchmarks.attention_variants import planned_variant, shapes_of, share_of_best, timed, variants_of
from benchmarks.gpu_setup import LIMITS

from dragoman_agent.model.config import ModelConfig
from dragoman_agent.model.source import ModelSource, open_model
from dragoman_agent.pal.candidates import tuning_cases
from dragoman_agent.pal.library import load_library
from dragoman_agent.pal.plan import LibraryPrefill, LongPrefill, Plan, PrefillAttention
from dragoman_agent.pal.planner import plan_for
from dragoman_agent.pal.planner_attention import launch_of
from dragoman_agent.pal.planner_cuda import wanted_groups, wanted_layers, wanted_lists
from dragoman_agent.pal.profile import Profile
from dragoman_agent.pal.switches import Switches
from dragoman_agent.pal.timings import Timings
from dragoman_agent.pal.tuning import Case
from dragoman_kernels.triton.launches import MAX_PLAIN_WARPS, PrefillLaunch

NAMES = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b")
H200 = load_library("h200")
CARD = {"device": "a card", "driver": "1", "clocks_mhz": [1, 2], "versions": {"torch": "2"}}


@lru_cache
def source_of(name: str) -> ModelSource:
    return open_model(f"random:{name}", Path())


@lru_cache
def plan_of(name: str) -> Plan:
    return plan_for(H200, source_of(name).config, LIMITS, Switches())[0]


def setup(name: str, **more: Any) -> Any:
    """A Setup of a card that is as its profile says, nothing timed."""
    reported = {key: value for key, value in H200.values.items() if value.provenance == "reported"}
    found = SimpleNamespace(facts=H200.device, fingerprint="here", values=reported)
    return SimpleNamespace(
        source=source_of(name), found=found, profile=H200, plan=plan_of(name), untuned=plan_of(name), limits=LIMITS,
        timings=None, **more,
    )  # fmt: skip


def recorded(model: str, results: Any) -> list[dict[str, Any]]:
    """The results as records, none of them left out."""
    made = record_gpu.records_of({"model": model, "results": results, **CARD})
    assert len(made) == len(results)
    return made


# Forms of prefill attention.


@pytest.mark.parametrize("name", NAMES)
def test_every_form_that_the_planner_may_choose_is_compared_at_its_own_points(name: str) -> None:
    plan, model = plan_of(name), source_of(name).config
    assert shapes_of(9216) == [((1024, 0),), ((2048, 6144),), ((1024, 0),) * 16]
    assert shapes_of(512) == [((512, 0),), ((512, 0),) * 16]
    variants = variants_of(H200, model, plan)
    assert variants[-1] is None and len(set(variants)) == len(variants)
    own = [one for one in variants if one is not None]
    assert plan.prefill_attention is not None and launch_of(plan.prefill_attention) in own
    kinds = {(one.tma, one.num_warps > MAX_PLAIN_WARPS) for one in own}
    assert kinds == {(False, False), (True, False), (True, True)}, "by pointers, by descriptors, with roles for warps"


def test_the_planned_form_is_what_a_step_of_these_prompts_takes() -> None:
    plan = replace(plan_of("qwen3-8b"), library_prefill=LibraryPrefill("cudnn", 2048, 16))
    assert plan.prefill_attention is not None
    own = launch_of(plan.prefill_attention)
    assert [planned_variant(plan, shape) for shape in shapes_of(9216)] == [own, None, None]
    assert planned_variant(plan, ((1024, 0),) * 17) == own, "more prompts than the library is set up for"
    assert planned_variant(replace(plan, library_prefill=None), shapes_of(9216)[2]) == own


def test_the_planned_form_is_that_of_the_steps_length() -> None:
    plan = plan_of("qwen3-8b")
    other = PrefillAttention("paged", 128, 128, 12, 2, tma=True)
    assert plan.prefill_attention is not None
    own, long = launch_of(plan.prefill_attention), launch_of(other)
    assert own != long
    by_context = replace(plan, library_prefill=None, long_prefill=LongPrefill(other, 1024, 900))
    assert [planned_variant(by_context, shape) for shape in shapes_of(9216)] == [own, long, own]
    by_tokens = replace(by_context, long_prefill=LongPrefill(other, 1024, 900, many_tokens=2048))
    assert [planned_variant(by_tokens, shape) for shape in shapes_of(9216)] == [own, long, long]
    assert {own, long} <= set(variants_of(H200, source_of("qwen3-8b").config, by_context))


class FakeStep:
    """Forms that compute one right result but the fourth, a third that cannot run, and times by form."""

    def __init__(self) -> None:
        self.q = torch.ones(4)
        self.calls: list[str] = []

    def call(self, launch: PrefillLaunch, out: torch.Tensor) -> Callable[[], object]:
        if launch.block_n == 3:
            raise ValueError("does not fit")

        def body() -> None:
            out.fill_(2.0 if launch.block_n == 4 else 1.0)
            self.calls.append(f"n{launch.block_n}")

        return body

    def library_call(self, out: torch.Tensor) -> Callable[[], object]:
        def body() -> None:
            out.fill_(1.0)
            self.calls.append("cudnn")

        return body


def test_forms_take_turns_and_one_that_is_wrong_or_cannot_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    variants = [*(PrefillLaunch(64, number, 4, 3) for number in (1, 2, 3, 4)), None]
    step, cost = FakeStep(), {"n1": 3e-5, "n2": 2e-5, "cudnn": 4e-5}

    def seconds(body: Callable[[], object]) -> float:
        body()
        return cost[step.calls[-1]] * (10 if step.calls.count(step.calls[-1]) == 2 else 1)  # a hiccup in the first turn

    times = timed(step, variants, seconds)  # type: ignore[arg-type]
    assert {attention_variants.label(one).split("-")[0] for one in times} == {"m64", "cudnn"} and len(times) == 3
    assert times == {variants[0]: 3e-5, variants[1]: 2e-5, None: 4e-5}, "medians"
    turns = step.calls[4:]  # after the four that ran to be compared
    assert turns == ["n1", "n2", "cudnn", "cudnn", "n2", "n1", "n1", "n2", "cudnn"]
    said = capsys.readouterr().out
    assert "does not fit" in said and "off by" in said
    assert share_of_best(variants[0], times, "x") == pytest.approx(2 / 3)
    assert share_of_best(variants[1], times, "x") == 1.0
    assert share_of_best(variants[3], times, "x") == 0.0, "the planned one does not run"


# Chunks.


def test_a_chunk_is_compared_with_those_that_may_take_as_long_as_the_planner_lets_them() -> None:
    plan = plan_of("qwen3-8b")
    sizes = plan_quality.chunk_sizes(plan, 0.15)
    assert {512, 1024, 2048, 4096, *plan.full_tokens} <= set(sizes) and 16384 not in sizes, "which takes 0.4 s"
    assert {512, 16384} <= set(plan_quality.chunk_sizes(plan_of("qwen3-0.6b"), 0.15)), "which takes 0.03 s there"
    rates = {1024: [40e3] * 3, 2048: [44e3, 43e3, 44e3], 4096: [45e3] * 3, 8192: [50e3] * 3}
    assert plan_quality.chunk_shares(rates, 2048, 0.05) == pytest.approx([1.0, 43 / 44, 1.0])
    assert plan_quality.chunk_shares(rates, 2048, 0.10) == pytest.approx([44 / 45, 43 / 45, 44 / 45])
    assert plan_quality.chunk_shares(rates, 8192, 0.10) == [1.0] * 3, (
        "longer than it may be: no longer one is its rival"
    )


@pytest.mark.parametrize(("graphs", "company"), [(True, 0), (True, 2048), (False, 0)])
def test_each_chunk_has_a_graph_where_the_plan_has_them(
    graphs: bool, company: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = (256, 512) if graphs else ()
    plan = replace(plan_of("qwen3-8b"), mixed_graph_tokens=tokens, chunk_graph=graphs, company_tokens=company)
    plan = replace(plan, max_batch_tokens=4096)
    loaded: list[Plan] = []

    def device(given: Plan) -> SimpleNamespace:
        loaded.append(given)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(plan_quality, "step_seconds", lambda _, batch, steps: [len(batch.token_ids) / 45e3] * steps)
    here = SimpleNamespace(**{**vars(setup("qwen3-8b")), "plan": plan})
    shares = plan_quality.chunks(here, SimpleNamespace(device=device))  # type: ignore[arg-type]
    (one,) = loaded
    sizes = plan_quality.chunk_sizes(plan, 0.15)
    assert one.captured_tokens == (sizes if graphs else ()) and one.max_batch_tokens == sizes[-1]
    assert set(shares) == {"chunk-size", *(["chunk-size-beside-streams"] if company else [])}
    assert all(len(samples) == 6 and min(samples) == 1.0 for samples in shares.values())


# What choosing costs.


@lru_cache
def all_cases() -> tuple[Case, ...]:
    """What tuning asks for of all models, at first and once kernels are timed."""
    cases: dict[str, Case] = {}
    for name in NAMES:
        model = source_of(name).config
        found = tuning_cases(H200, model, plan_of(name))
        timings = Timings("", "", {case.key: case.predicted_seconds for case in found})
        layers = wanted_layers(H200, model, LIMITS, Switches(), timings)
        groups = wanted_groups(H200, model, LIMITS, Switches(), timings)
        lists = wanted_lists(H200, model, LIMITS, Switches(), timings)
        cases |= {case.key: case for case in (*found, *layers, *groups, *lists)}
    return tuple(cases.values())


def test_the_cost_of_choosing_is_shared_out_whole_over_shapes_with_a_choice() -> None:
    models = [source_of(name).config for name in NAMES]
    samples = [selection.seconds_by_shape(model, models, all_cases(), 116.0) for model in models]
    assert sum(map(sum, samples)) == pytest.approx(116.0), "nothing of it is lost"
    assert all(40 < len(each) < 100 and min(each) > 0 for each in samples)
    assert all(any(selection.is_of(case, model) for model in models) for case in all_cases())


def test_a_shape_is_one_kernel_at_one_problem_and_the_library_is_a_candidate_of_it() -> None:
    own = [case for case in all_cases() if selection.is_of(case, source_of("qwen3-0.6b").config)]
    shapes = selection.chosen_shapes(own)
    prefill = [shape for shape in shapes if shape[0] == "prefill-attention"]
    kinds = "decode-attention prefill-attention gemm gemm-library decode-layers decode-grouped decode-list"
    assert set(kinds.split()) == {shape[0] for shape in shapes}
    grouped = [count for shape, count in shapes.items() if shape[0] == "decode-grouped"]
    assert grouped and min(grouped) > 1, "how many sequences share a program is the candidate"
    listed = [count for shape, count in shapes.items() if shape[0] == "decode-list"]
    assert len(listed) >= 15 and set(listed) == {4}, "the number of items is the candidate, how contexts differ is not"
    assert any(("context", 8192) in shape and ("tokens", 2048) in shape for shape in prefill)
    assert any(("prompts", 16) in shape for shape in prefill), "many prompts at once are candidates of it too"
    alone = [case for case in own if case.kind == "rms-norm"]
    assert alone and not selection.chosen_shapes(alone), "one candidate is no choice"
    assert sum(selection.chosen_shapes([*own, *own]).values()) == sum(shapes.values()), "a case counts once"


def test_results_of_choosing_are_records(capsys: pytest.CaptureFixture[str]) -> None:
    models: list[ModelConfig] = [source_of(name).config for name in NAMES]
    here = setup("qwen3-0.6b", tuned_cases=all_cases(), all_tuning_seconds=120.0)
    cost, planning = recorded("qwen3-0.6b", selection.selection(here, models))
    assert (cost["bench"], cost["case"], cost["metric"]) == (
        "plan_quality", "selection-qwen3-0.6b", "selection_seconds_a_shape",
    )  # fmt: skip
    assert cost["unit"] == "s" and cost["note"].startswith(f"mean {sum(cost['samples']) / len(cost['samples']):.3f}")
    assert planning["case"] == "planning-qwen3-0.6b" and len(planning["samples"]) == selection.PLANNINGS
    assert planning["samples"][0] > 0 and not planning["note"].startswith("mean")
    (alone,) = selection.selection(setup("qwen3-0.6b", tuned_cases=(), all_tuning_seconds=0.0), models)
    assert alone["metric"] == "planning_seconds" and "no kernel was timed" in capsys.readouterr().out


# Another card's profile.


def test_a_card_too_small_for_the_model_is_refused_with_its_reason_in_the_record() -> None:
    here = setup("qwen3-8b")
    profile, unforced = wrong_profile.forced(here, wrong_profile.SMALL_CARD)
    assert "does not match" in unforced and "--profile-force" in unforced
    said = wrong_profile.refusals(here, profile)
    (record,) = recorded("qwen3-8b", [wrong_profile.refused_result(wrong_profile.SMALL_CARD, said, unforced)])
    assert record["case"] == "qwen3-8b-rtx4060-laptop" and record["samples"] == [1.0, 1.0, 1.0]
    assert "GiB are missing" in record["note"] and "architecture sm_89, this device has sm_90" in record["note"]
    assert wrong_profile.refusals(setup("qwen3-0.6b"), profile) == ["", "", ""], "it does fit the smaller model"


def test_a_card_that_holds_the_model_gets_a_plan_that_differs_and_is_compared_in_steps() -> None:
    here = setup("qwen3-8b")
    profile, _ = wrong_profile.forced(here, wrong_profile.TIMED_CARD)
    wrong = plan_for(profile, here.source.config, LIMITS, Switches())[0]
    changes = wrong_profile.changed(here.plan, wrong)
    assert f"chunk {here.plan.max_batch_tokens} -> {wrong.max_batch_tokens}" in changes and "parts" in changes
    found = {
        f"decode-b{batch}-c{context}": {"own": [200.0 * batch] * 4, "l4": [100.0 * batch] * 4}
        for batch, context in small_card.CELLS
    } | {"prefill": {"own": [9e4] * 4, "l4": [3e4] * 4}}
    made = {
        (one["case"], one["metric"]): one
        for one in recorded("qwen3-8b", wrong_profile.results_of("l4", found, changes))
    }
    assert made["qwen3-8b-l4-prefill", "wrong_profile_over_own"]["value"] == pytest.approx(1 / 3)
    step = made["qwen3-8b-l4-decode-b8-c512", "ms_per_step"]
    assert step["value"] == pytest.approx(10.0) and step["note"] == "own plan 5.000 ms" and step["unit"] == "ms"
    assert changes in made["qwen3-8b-l4-decode-b1-c256", "wrong_profile_over_own"]["note"]


def test_both_plans_run_their_own_full_steps_in_turns_and_everything_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = setup("qwen3-0.6b", tuned_cases=())
    loaded: list[Plan] = []
    closed: list[int] = []
    steps: list[tuple[int, int]] = []  # (which plan, tokens)

    def device(plan: Plan) -> SimpleNamespace:
        loaded.append(plan)
        return SimpleNamespace(number=len(loaded) - 1, close=lambda: closed.append(1))

    def step_seconds(device: Any, batch: Any, count: int) -> list[float]:
        steps.append((device.number, len(batch.token_ids)))
        return [1e-3 * (1 + device.number)] * count

    monkeypatch.setattr(small_card, "step_seconds", step_seconds)
    monkeypatch.setattr(wrong_profile, "start_compilers", lambda *_: SimpleNamespace(wait=lambda: None))
    results = wrong_profile.wrong_profile(here, SimpleNamespace(device=device))  # type: ignore[arg-type]
    own, wrong = loaded
    assert own.max_batch_tokens == here.plan.max_batch_tokens > wrong.max_batch_tokens
    assert own.chunk_graph == here.plan.chunk_graph and own.graph_batch_sizes == (1, 8, 32) == wrong.graph_batch_sizes
    assert len(closed) == 2
    longest = [max(tokens for number, tokens in steps if number == which) for which in (0, 1)]
    assert longest == [own.max_batch_tokens, wrong.max_batch_tokens]
    assert [number for number, _ in steps[::4]] == [0, 1, 1, 0, 0, 1, 1, 0], "turns, every second one backwards"
    made = {(one["case"], one["metric"]): one for one in recorded("qwen3-0.6b", results)}
    assert (
        len(made) == 7 and len(made["qwen3-0.6b-l4-prefill", "wrong_profile_over_own"]["samples"]) == small_card.TURNS
    )
    assert made["qwen3-0.6b-l4-decode-b8-c512", "wrong_profile_over_own"]["value"] == pytest.approx(0.5)


def test_what_a_small_card_plans_otherwise_is_a_record() -> None:
    small: Profile = load_library("rtx4060-laptop")
    plan = plan_for(small, source_of("qwen3-0.6b").config, LIMITS, Switches())[0]
    here = SimpleNamespace(**{**vars(setup("qwen3-0.6b")), "plan": plan, "untuned": plan, "profile": small})
    whole = small_card.whole_plan(here, "h200", None)  # type: ignore[arg-type]
    (record,) = recorded("qwen3-0.6b", [small_card.plan_result(here, whole, "h200")])  # type: ignore[arg-type]
    assert (record["case"], record["metric"], record["unit"]) == ("qwen3-0.6b-plan", "changed_fields", "1")
    assert min(record["samples"]) >= 4
    assert f"max_batch_tokens {plan.max_batch_tokens} for {whole.max_batch_tokens}" in record["note"]
    assert "decode_attention parts [1" in record["note"]
    assert small_card.changed_fields(plan, plan) == {}


# The run.


def test_a_part_that_fails_costs_no_other_and_the_exit_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = pal_gpu.Run(tmp_path, ("ablation",), 100.0)
    assert run.attempt("good", lambda: [{"x": 1}]) == [{"x": 1}] and not run.has_failed
    assert run.attempt("bad", lambda: [][1]) == [] and run.has_failed
    assert "FAILED: bad: IndexError" in capsys.readouterr().out
    assert run.has("ablation") and not run.has("step_model")
    over = pal_gpu.Run(tmp_path, ("ablation",), -1.0)
    assert not over.has("ablation") and "ablation left out" in capsys.readouterr().out


def test_a_run_keeps_what_each_part_of_each_model_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the files that are recorded; the last model's plan quality is ended half-way."""
    names = ("qwen3-0.6b", "qwen3-8b")
    here = {
        name: setup(name, tuned_cases=all_cases(), all_tuning_seconds=60.0, step_keys=None) for name in names
    }  # fmt: skip
    for one in here.values():
        one.timings = Timings("", "")
    row = {"bench": "x", "case": "b1", "samples": [1.0, 1.1, 1.2], "predicted": None, "note": ""}

    def part(bench: str, metric: str, real: Callable[..., Any]) -> Any:
        """Called as the real one may be, it gives one row, and to `keep` where it has it."""

        def work(*given: Any, **named: Any) -> list[dict[str, Any]]:
            results = [{**row, "bench": bench, "metric": metric}]
            bound = inspect.signature(real).bind(*given, **named).arguments
            if "keep" in bound:
                bound["keep"](results)
            if bench == "plan_quality" and given[0] is here["qwen3-8b"]:
                raise RuntimeError("out of memory")
            return results

        return work

    parts = {
        "step_model": part("step_model", "predicted_over_measured", pal_gpu.step_model),
        "ablation": part("ablation", "pal_on_over_off", pal_gpu.ablation),
        "plan_quality": part("plan_quality", "share_of_best", pal_gpu.plan_quality),
        "tuned": lambda models: here, "compile_kernels": lambda *_: None, "environment": lambda _: CARD,
        "Loaded": lambda _: SimpleNamespace(device=lambda _: SimpleNamespace(close=lambda: None)),
    }  # fmt: skip
    for name, value in parts.items():
        monkeypatch.setattr(pal_gpu, name, value)
    wrong = part("wrong_profile", "wrong_profile_over_own", wrong_profile.wrong_profile)
    monkeypatch.setattr(wrong_profile, "wrong_profile", wrong)
    monkeypatch.setattr("sys.argv", ["pal_gpu", *names, "--out", str(tmp_path)])
    assert (
        pal_gpu.main() == 1
        and "FAILED: plan quality of qwen3-8b: RuntimeError: out of memory" in capsys.readouterr().out
    )
    bodies = record_gpu.bodies_of(sorted(tmp_path.glob("*.json")))
    made = [entry for body in bodies for entry in record_gpu.records_in(body)]
    assert {(one["bench"], one["case"]) for one in made} >= {
        *(("plan_quality", f"{case}-{name}") for case in ("selection", "planning", "b1") for name in names),
        *((bench, f"{name}-b1") for bench in ("step_model", "ablation", "wrong_profile") for name in names),
    }
    monkeypatch.setattr("sys.argv", ["pal_gpu", *names, "--out", str(tmp_path), "--only", "ablation,plans"])
    with pytest.raises(SystemExit):
        pal_gpu.main()
    assert "no part plans; there are step_model, ablation, plan_quality, wrong_profile" in capsys.readouterr().err


def test_time_for_ablation_is_shared_among_the_models_that_are_left(tmp_path: Path) -> None:
    alone = pal_gpu.Run(tmp_path, ("ablation",), 300.0)
    assert alone.share_until(3) - time.monotonic() == pytest.approx(100.0, abs=1.0)
    beside = pal_gpu.Run(tmp_path, ("ablation", "plan_quality"), 300.0)
    assert beside.share_until(3) - time.monotonic() == pytest.approx(55.0, abs=1.0)
    assert beside.share_until(7) - time.monotonic() == pytest.approx(0.0, abs=1.0), "never before now"


@pytest.mark.parametrize(("seconds", "repeats"), [(-5.0, ablation.MIN_REPEATS), (math.inf, ablation.MAX_REPEATS)])
def test_short_time_takes_repeats_and_never_the_three_of_a_cell(
    seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "run", lambda *_: ablation.Run(1.0, 1.0, 1.0))
    monkeypatch.setattr(ablation, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))
    found = ablation.measure({"on": None, "off": None}, 8, seconds)  # type: ignore[dict-item]
    assert {label: len(runs) for label, runs in found.items()} == {"on": repeats, "off": repeats}
