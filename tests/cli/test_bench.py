"""`dragoman bench cpu-peer`: bounded in time, clear about what stops it, records only what can be one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dragoman_cli import bench, cpu_peer
from dragoman_cli.failure import Failure


def run(model: Path, *, timeout_seconds: float) -> list[dict[str, object]]:
    arguments = [str(model), "1", "int8", "native", "1", str(model.parents[2])]
    return list(bench._lines(arguments, dict(os.environ), timeout_seconds))


def test_a_run_that_takes_too_long_is_ended_and_says_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"did not finish within 0\.2 s: the start was under way") as failure:
        run(tmp_path / "a" / "b" / "model.gguf", timeout_seconds=0.2)
    assert "--timeout-seconds" in failure.value.remedy


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a model at all, only bytes")
    with pytest.raises(Failure, match="cannot run") as failure:
        run(path, timeout_seconds=60.0)
    assert "not a GGUF file" in failure.value.why


def test_a_busy_machine_and_few_rounds_make_no_record() -> None:
    with pytest.raises(Failure, match="load average of 1 or less"):
        bench._record_keeper(7, 1.5)
    with pytest.raises(Failure, match="--rounds 5"):
        bench._record_keeper(4, 0.0)


def test_a_measurement_becomes_a_record(tmp_path: Path) -> None:
    keeper = bench._record_keeper(5, 0.3)
    result = {"case": "prefill", "ours": [20.0, 22.0, 21.0], "peer": [10.0, 10.0], "ratios": [2.0, 2.2, 2.1]}
    packages = SimpleNamespace(make_record=lambda **values: keeper.make_record(**(values | {"packages": ("numpy",)})))
    record = bench._record(packages, result, "", {"instruction_set": "avx2", "peer": "1", "system": "CPU"}, 0.3)
    path = keeper.save("cpu", [record], tmp_path)
    assert record["value"] == 2.1
    assert record["predicted"] == bench.PREDICTED["prefill"]
    assert '"case": "prefill"' in path.read_text(encoding="utf-8")


def test_each_road_has_its_own_case_and_prediction() -> None:
    assert bench._predicted("decode-b1", "") == bench.PREDICTED["decode-b1"]
    assert bench._predicted("decode-b1", "-torch-int4") == bench.PREDICTED_INT4["decode-b1"]
    assert bench._predicted("decode-b1", "-torch-float32") is None
    assert bench.PREDICTED_INT4.keys() == bench.PREDICTED.keys()


def test_what_is_timed_of_torch_is_the_model(embedded_model_path: Path) -> None:
    """The harness' own bookkeeping: the greedy token after a prompt, alone, as one of three, and in two steps."""
    engine = cpu_peer.TorchEngine(embedded_model_path, 2, "torch-int4", embedded_model_path.parents[2])
    record = json.loads((Path(__file__).parents[1] / "golden" / "transformers_smollm2.json").read_text())
    prompt = record["greedy"][1]["prompt_ids"][:30]
    first = engine.forward([prompt], 0)
    assert engine.forward([prompt] * 3, 0).tolist() == first.tolist() * 3
    engine.forward([prompt[:-1]], 0)
    assert engine.forward([prompt[-1:]], len(prompt) - 1).tolist() == first.tolist()
