"""The embedded model in fp32 writes what transformers writes: 64 greedy tokens on 20 prompts, through the engine."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman_agent.device.cpu_road import NATIVE_FLOAT32, TORCH_FLOAT32

GOLDEN = Path(__file__).parents[1] / "golden"
RECORD = json.loads((GOLDEN / "transformers_smollm2.json").read_text(encoding="utf-8"))


def test_the_record_is_of_the_model_under_test(embedded_model_path: Path) -> None:
    assert hashlib.sha256(embedded_model_path.read_bytes()).hexdigest() == RECORD["model"]["sha256"]
    assert len(RECORD["greedy"]) == 20
    assert all(len(entry["token_ids"]) == 64 for entry in RECORD["greedy"])


@pytest.mark.parametrize("road", [NATIVE_FLOAT32, TORCH_FLOAT32])
def test_greedy_tokens_equal_the_record(road: str, generate: Callable[..., list[list[int]]]) -> None:
    prompts = [entry["prompt_ids"] for entry in RECORD["greedy"]]
    written = generate(road, prompts, [64] * len(prompts))
    wrong = {
        entry["name"]: next(i for i, (a, b) in enumerate(zip(tokens, entry["token_ids"], strict=True)) if a != b)
        for entry, tokens in zip(RECORD["greedy"], written, strict=True)
        if tokens != entry["token_ids"]
    }
    assert not wrong, f"first different token by prompt: {wrong}"


def test_the_record_is_what_transformers_writes_now(embedded_model_path: Path) -> None:
    """One prompt live, a few tokens: the record is not our own doing and has not gone stale."""
    import importlib.util
    import sys

    sys.path.insert(0, str(GOLDEN))
    try:
        spec = importlib.util.spec_from_file_location("record_transformers", GOLDEN / "record_transformers.py")
        assert spec is not None
        assert spec.loader is not None
        recorder: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(recorder)
    finally:
        sys.path.remove(str(GOLDEN))
    model = recorder.load_reference(embedded_model_path)
    for entry in (RECORD["greedy"][1], RECORD["greedy"][12]):
        tokens, _ = recorder.greedy(model, entry["prompt_ids"], 12)
        assert tokens == entry["token_ids"][:12]
