"""Teacher-forced next tokens of the embedded model against llama.cpp's record, on the compiled roads."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.needs import need_cpu_kernels

from dragoman_agent.device.cpu_native import NativeRoad
from dragoman_agent.device.cpu_road import NATIVE_FLOAT32, NATIVE_INT8
from dragoman_agent.model.embedded import default_cache_dir
from dragoman_agent.model.source import open_model

RECORD = Path(__file__).parents[2] / "golden" / "llamacpp_smollm2.json"
CLEAR_MARGIN = 0.5


@pytest.fixture(scope="module")
def texts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["teacher_forced"]
    assert sum(len(text["token_ids"]) for text in found) >= 1000
    return found


@pytest.fixture(scope="module")
def forced(
    texts: list[dict[str, Any]], embedded_model_path: Path, make_plan: Any, pages: Any, new_sequence: Any
) -> dict[str, list[np.ndarray]]:
    """Best two tokens and their logits after each token of each text, by road: [n, 4] a text."""
    need_cpu_kernels()
    model = open_model("embedded", default_cache_dir(os.environ))
    found = {}
    for name in (NATIVE_INT8, NATIVE_FLOAT32):
        plan = make_plan(model, name, num_blocks=400, num_threads=2)
        road = NativeRoad(model, plan, default_cache_dir(os.environ), lambda _: None)
        layout, sequences = pages(plan), [new_sequence([]) for _ in texts]
        rows: list[list[tuple[float, ...]]] = [[] for _ in texts]
        for at in range(max(len(text["token_ids"]) for text in texts)):
            alive = [i for i, text in enumerate(texts) if at < len(text["token_ids"])]
            for i in alive:
                sequences[i].tokens.append(texts[i]["token_ids"][at])
            batch, _ = layout.batch([(sequences[i], 1) for i in alive])
            logits, _ = road.run(batch)
            best = np.argpartition(logits, -2, axis=1)[:, -2:]
            for i, row, pair in zip(alive, logits, best, strict=True):
                second, first = sorted(pair.tolist(), key=lambda token: (row[token], -token))
                rows[i].append((first, second, float(row[first]), float(row[second])))
        road.close()
        found[name] = [np.array(row) for row in rows]
    return found


@pytest.mark.parametrize("road", [NATIVE_INT8, NATIVE_FLOAT32])
def test_next_tokens_agree_with_llamacpp(
    road: str, texts: list[dict[str, Any]], forced: dict[str, list[np.ndarray]]
) -> None:
    theirs = np.concatenate([text["top1"] for text in texts])
    ours = np.concatenate([rows[:, 0] for rows in forced[road]])
    exact = np.concatenate(forced[NATIVE_FLOAT32])
    clear = exact[:, 2] - exact[:, 3] > CLEAR_MARGIN
    agrees = theirs == ours
    assert clear.sum() > 500
    assert agrees.mean() >= 0.95, f"{agrees.mean():.3f} of {len(agrees)} positions"
    assert agrees[clear].all(), f"positions {np.flatnonzero(clear & ~agrees)} with margins over {CLEAR_MARGIN}"


def test_int8_agrees_with_float32(forced: dict[str, list[np.ndarray]]) -> None:
    rounded, exact = (np.concatenate(forced[road]) for road in (NATIVE_INT8, NATIVE_FLOAT32))
    clear = exact[:, 2] - exact[:, 3] > CLEAR_MARGIN
    agrees = rounded[:, 0] == exact[:, 0]
    assert agrees.mean() >= 0.95
    assert agrees[clear].all()
