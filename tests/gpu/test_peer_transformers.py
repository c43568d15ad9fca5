"""transformers as the peer, on the CPU with a model of two layers: what is timed, how it is compared, what is recorded."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import peer_transformers, record_gpu
from benchmarks.peer_transformers import Part, Peer, Session, chosen_parts, ratio, read_ours

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 200, "max_position_embeddings": 256,
    "rope_theta": 10000, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
CARD = {"device": "a card", "driver": "1", "clocks_mhz": [1, 2], "versions": {"torch": "2"}}
PREFILL = Part("1x32", 1, 32, 0, False, 0.0, ("prefill", "1x8192"))
STATIC = Part("b2", 2, 8, 6, True, 0.0, ("decode", "b32"))
EAGER = Part("b1-eager", 1, 8, 6, False, 0.0, ("decode", "b1"))
OURS = [
    {"bench": "decode", "case": "b32", "metric": "ms_per_step", "samples": [2.0, 1.0, 3.0], "predicted": 1.5},
    {"bench": "prefill", "case": "1x8192", "metric": "tokens_per_second", "samples": [50.0, 60.0, 40.0], "predicted": 100.0},
]  # fmt: skip


def session(**more: Any) -> Session:
    return Session("qwen3-0.6b", time.monotonic() + 60.0, **more)


def theirs(part: Part, samples: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"case": part.case, "metric": part.metric, "samples": samples, "note": "as told", **more}


@pytest.fixture(scope="module")
def peer() -> Peer:
    return Peer(TINY, "cpu", compiles=False)


def test_weights_are_random_bfloat16_and_attention_is_the_one_compared(peer: Peer) -> None:
    weights = [one for name, one in peer.model.named_parameters() if "norm" not in name]
    assert {one.dtype for one in weights} == {torch.bfloat16}
    assert all(0.001 < float(one.detach().float().std()) < 0.1 for one in weights)
    assert peer.model.config._attn_implementation == "sdpa" and not peer.model.training


def test_every_part_is_timed_with_its_own_cache_and_runs_to_its_length(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts of each call are others; a sample is what the tokens behind the first one took."""
    calls: list[tuple[Any, int, Any]] = []
    generate = peer.model.generate

    def noted(prompts: Any, **more: Any) -> Any:
        calls.append((prompts, more["max_new_tokens"], more.get("cache_implementation")))
        return generate(prompts, **more)

    monkeypatch.setattr(peer.model, "generate", noted)
    clock = iter(range(100))
    monkeypatch.setattr(peer_transformers, "time", SimpleNamespace(perf_counter=lambda: next(clock) ** 2))
    static = peer_transformers.decode(peer, STATIC)
    assert [tokens for _, tokens, _ in calls] == [6, *(1, 3, 6) * 3]
    assert {cache for *_, cache in calls} == {"static"}
    assert all(prompts.shape == (2, 8) and prompts.max() < TINY["vocab_size"] for prompts, *_ in calls)
    assert len({tuple(prompts.flatten().tolist()) for prompts, *_ in calls}) == len(calls)
    # Call number n takes 4 n + 1 seconds of this clock, and the long one is the second behind the short one.
    assert static["samples"] == [pytest.approx(8 / 5 * 1e3)] * 3
    assert static["note"].endswith(f"{4 / 3 * 1e3:.3f} ms a step over the second half; not compiled")
    calls.clear()
    eager = peer_transformers.decode(peer, EAGER)
    assert {cache for *_, cache in calls} == {None} and "dynamic cache" in eager["note"]
    monkeypatch.undo()
    rates = peer_transformers.prefill(peer, PREFILL)["samples"]
    assert len(rates) == 3 and min(rates) > 0


def test_a_generation_that_ends_early_is_no_figure(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(range(TINY["vocab_size"]))
    monkeypatch.setattr(peer.model.generation_config, "eos_token_id", every)
    with pytest.raises(RuntimeError, match="made 1 tokens of 6"):
        peer_transformers.decode(peer, EAGER)


def test_each_batch_is_compiled_once_for_itself() -> None:
    """With the compiler's own front end; what it makes of the graph needs a GPU. A part whose figure is none loses no other."""
    import transformers

    config = transformers.CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    one = Part("b1", 1, 8, 6, True, 0.0, ("decode", "b1"))
    here = session()
    here.run(Peer({**TINY, "num_hidden_layers": 1}, "cpu", compile_config=config), [one, STATIC])
    assert not here.failed and [each["case"] for each in here.results] == ["b1", "b2"]
    assert all("unique_graphs 1, cudagraph_skips 0" in each["note"] for each in here.results)
    assert not any("COMPILED AGAIN" in each["note"] for each in here.results)

    here = session()
    here.run(Peer({**TINY, "num_hidden_layers": 1}, "cpu", disable_compile=True), [one, PREFILL])
    assert "compiled nothing" in here.failed["b1"] and [each["case"] for each in here.results] == ["1x32"]


def test_a_ratio_above_one_means_that_ours_is_quicker() -> None:
    made = ratio(theirs(STATIC, [4.0, 8.0, 6.0], predicted=3.0), STATIC, OURS, "transformers-5")
    assert made is not None and made["samples"] == [2.0, 4.0, 3.0] and made["predicted"] == 2.0
    assert made["peer"] == {"name": "transformers-5", "value": 6.0} and "2 ms (decode b32)" in str(made["note"])
    made = ratio(theirs(PREFILL, [25.0, 10.0, 100.0], predicted=20.0), PREFILL, OURS, "transformers-5")
    assert made is not None and made["samples"] == [2.0, 5.0, 0.5] and made["predicted"] == 5.0
    made = ratio(theirs(PREFILL, [1.0, 2.0, 3.0], predicted=None), PREFILL, OURS, "transformers-5")
    assert made is not None and made["predicted"] is None
    assert ratio(theirs(EAGER, [1.0, 2.0, 3.0]), EAGER, OURS, "transformers-5") is None


def test_results_are_kept_after_each_part_and_recorded(peer: Peer, tmp_path: Path) -> None:
    out, kept = tmp_path / "new" / "qwen-transformers.json", []

    def keep(one: Session) -> None:
        peer_transformers.write(out, one, {**CARD, "versions": {"torch": "2", "transformers": "5"}})
        kept.append(len(json.loads(out.read_text())["results"]))

    late = Part("b256-eager", 1, 8, 6, False, 1000.0, ("decode", "b256"))
    here = session(keep=keep, ours=OURS, peer_name="transformers-5")
    here.run(peer, [PREFILL, STATIC, late])
    assert kept == [2, 4, 4] and "of about 1000 s" in here.left_out["b256-eager"]
    (body,) = record_gpu.bodies_of([out])
    assert body["left_out"] == here.left_out and body["failed"] == {}
    made = {(one["case"], one["metric"]): one for one in record_gpu.records_in(body)}
    assert set(made) == {
        ("qwen3-0.6b-1x32", "tokens_per_second"), ("qwen3-0.6b-1x32", "ours_over_transformers"),
        ("qwen3-0.6b-b2-uncompiled", "ms_per_step"), ("qwen3-0.6b-b2-uncompiled", "ours_over_transformers"),
    }  # fmt: skip
    assert {one["bench"] for one in made.values()} == {"peer_transformers"}
    compared = made["qwen3-0.6b-1x32", "ours_over_transformers"]
    assert compared["unit"] == "ratio" and compared["versions"]["transformers"] == "5"
    assert compared["peer"]["name"] == "transformers-5" and compared["command"].endswith("peer_transformers qwen3-0.6b")
    assert compared["value"] == pytest.approx(50.0 / made["qwen3-0.6b-1x32", "tokens_per_second"]["value"], rel=1e-4)


def test_what_the_first_compilation_took_is_expected_of_the_second(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "compiles", True)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(peer_transformers, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def decode(_: Peer, part: Part) -> dict[str, Any]:
        clock.now += 70.0
        return theirs(part, [1.0, 1.0, 1.0])

    monkeypatch.setattr(peer_transformers, "decode", decode)
    here = Session("m", 130.0)
    here.run(peer, chosen_parts("b32,b1,b1-eager"))
    assert [one["case"] for one in here.results] == ["b1", "b1-eager"], "60 s were left"
    assert here.left_out == {"b32": "60 s were left of about 70 s that it takes"}


@pytest.mark.parametrize(
    ("change", "age", "message"),
    [
        ({"model": "llama-3.2-1b"}, 0, "'llama-3.2-1b', not 'qwen3-0.6b'"),
        ({"device": "another"}, 0, "'another', not 'a card'"),
        ({"driver": "2"}, 0, "'2', not '1'"),
        ({}, 7200, "120 minutes old"),
        ({"results": None}, -1, "holds no results of engine_gpu"),
    ],
)
def test_figures_of_another_run_are_refused(change: dict[str, Any], age: float, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.json"
    body = {"model": "qwen3-0.6b", **CARD, "results": OURS}
    path.write_text(json.dumps(body))
    assert read_ours(path, "qwen3-0.6b", CARD, time.time()) == OURS
    path.write_text(json.dumps(body | change) if age >= 0 else "[")
    os.utime(path, (time.time() - age,) * 2)
    with pytest.raises(SystemExit, match=message):
        read_ours(path, "qwen3-0.6b", CARD, time.time())


def test_the_command_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in ((["x"], "no packaged config of model 'x'; there are llama"), (["qwen3-8b", "--parts", "b7"], "b7 is none of")):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["-", *arguments])
        with pytest.raises(SystemExit, match=message):
            peer_transformers.main()


def test_the_command_runs_all_parts_in_bfloat16_where_the_card_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command but for the card, in whose place the CPU is."""
    ours, out = tmp_path / "ours.json", tmp_path / "out.json"
    ours.write_text(json.dumps({"model": "qwen3-0.6b", **CARD, "results": OURS}))
    monkeypatch.setattr(peer_transformers, "usable_gpu", lambda: SimpleNamespace(facts=SimpleNamespace(index=0)))
    monkeypatch.setattr(peer_transformers, "environment", lambda index: dict(CARD))
    monkeypatch.setattr(peer_transformers, "read_config", lambda name: TINY)
    monkeypatch.setattr(peer_transformers, "Peer", lambda config, device, **more: Peer(config, device.replace("cuda:0", "cpu"), **more))  # fmt: skip
    monkeypatch.setattr(peer_transformers, "PARTS", (PREFILL, STATIC, EAGER))
    arguments = [
        "-",
        "qwen3-0.6b",
        "--ours",
        str(ours),
        "--out",
        str(out),
        "--parts",
        "1x32,b2,b1-eager",
        "--no-compile",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert peer_transformers.main() == 0
    body = json.loads(out.read_text())
    assert [(one["case"], one["metric"]) for one in body["results"]] == [
        ("1x32", "tokens_per_second"), ("1x32", "ours_over_transformers"), ("b2-uncompiled", "ms_per_step"),
        ("b2-uncompiled", "ours_over_transformers"), ("b1-eager", "ms_per_step"),
    ]  # fmt: skip
    assert body["versions"]["transformers"].split(".")[0] == "5" and body["results"][4]["predicted"] == 23.95
    assert "b1-eager: our results have no decode b1" in capsys.readouterr().out
