"""The embedded model under a grammar and with a scored prompt: real tokens of many bytes, on the road its plan takes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from dragoman_agent.device.cpu import CpuDevice
from dragoman_agent.device.cpu_road import choose_cpu_road
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Finished, GrammarSpec, Opened, Sampling, Start, Stop
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.source import open_model
from dragoman_text import TextTokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "grün"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(embedded_model_path: Path, make_plan: Any) -> Iterator[tuple[EngineCore, TextTokenizer]]:
    model = open_model("embedded", default_cache_dir(os.environ))
    device = CpuDevice()
    device.load(model, make_plan(model, choose_cpu_road(model, "auto").name, page_size=32), lambda _: None)
    yield build_core(device, model, make_plan(model, "", page_size=32)), TextTokenizer.from_files(model.tokenizer)
    device.close()


def ask(engine: tuple[EngineCore, TextTokenizer], prompt: str, max_tokens: int, **sampling: Any) -> list[Any]:
    core, tokenizer = engine
    eos = sorted(tokenizer.eos_ids)
    command = Start(
        "r", tokenizer.encode(prompt), Sampling(**{"temperature": 0.0, **sampling}),
        Stop(max_output_tokens=max_tokens, eos_token_ids=eos), credit=1 << 30,
    )  # fmt: skip
    return run_all(core, [command])


def text_of(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_real_model_writes_what_the_schema_says(engine: Any, seed: int | None) -> None:
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
    hot: dict[str, Any] = {} if seed is None else {"temperature": 1.0, "seed": seed}
    events = ask(engine, "A person as JSON: ", 160, grammar=spec, **hot)
    assert isinstance(events[0], Opened) and isinstance(events[-1], Finished)
    jsonschema.validate(json.loads(text_of(events)), SCHEMA)


def test_a_choice_of_words(engine: Any) -> None:
    events = ask(engine, "The sky is", 20, grammar=GrammarSpec("choices", choices=["blue", "green", "blueish grey"]))
    assert text_of(events) in ("blue", "green", "blueish grey")


def test_a_scored_prompt_is_likely_where_it_is_plain(engine: Any) -> None:
    def mean(text: str) -> float:
        opened = ask(engine, text, 1, num_prompt_logprobs=1)[0]
        return float(np.frombuffer(opened.logprobs, "<f4").mean())

    assert mean("The capital of France is Paris.") > mean("Capital the of is France Paris.") + 0.5


def test_bad_words_of_a_real_vocabulary(engine: Any) -> None:
    tokenizer = engine[1]
    free = text_of(ask(engine, "The capital of France is", 8))
    assert "Paris" in free
    words = [tokenizer.encode(text, add_special_tokens=False) for text in ("Paris", " Paris")]
    assert "Paris" not in text_of(ask(engine, "The capital of France is", 8, bad_word_ids=words))


def test_what_hangs_on_the_text_is_the_same_when_the_model_runs_ahead(engine: Any, make_plan: Any) -> None:
    """Grammar, penalties and bad words beside a plain row: run ahead, their sampling reaches the device late."""
    core, tokenizer = engine
    kinds: list[dict[str, Any]] = [
        {},
        {"grammar": GrammarSpec("regex", "[A-Z][a-z ]{8,40}\\.")},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.8, "seed": 3},
        {"bad_word_ids": [tokenizer.encode(word, add_special_tokens=False) for word in (" Paris", " the", ",")]},
    ]

    def play(on: EngineCore) -> dict[str, list[int]]:
        starts = [
            Start(str(i), tokenizer.encode("The capital of France is"), Sampling(**{"temperature": 0.0, **kind}),
                  Stop(max_output_tokens=12), credit=1 << 30, cache_salt=str(i))
            for i, kind in enumerate(kinds)
        ]  # fmt: skip
        found: dict[str, list[int]] = {start.request_id: [] for start in starts}
        for event in run_all(on, starts):
            if isinstance(event, Delta):
                found[event.request_id].extend(event.token_ids)
        return found

    late: list[bool] = []
    supply = core._supply
    core._supply = lambda flight: (late.append(True), supply(flight))
    try:
        ahead = play(core)
    finally:
        core._supply = supply
    model = open_model("embedded", default_cache_dir(os.environ))
    waiting = EngineCore(
        core._device, tokenizer, bytes.fromhex(model.digest), make_plan(model, "", page_size=32),
        vocab_size=model.config.vocab_size, run_ahead=False,
    )  # fmt: skip
    assert ahead == play(waiting) and len(late) >= 8
    assert ahead["1"] and [len(ahead[i]) for i in "023"] == [12] * 3
