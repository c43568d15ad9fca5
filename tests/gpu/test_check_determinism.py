"""The check of deterministic plans, on the GPU backend's code under the interpreter: it passes them, and catches usual ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from dataclasses import replace

import torch
from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.subjects import deterministic_plan, gpu_plan
from tests.agent.device.conformance.tiny_model import CONFIG, TinyModel
from tests.gpu import check_determinism, determinism_rig
from tests.gpu.check_determinism import Report, Rig, check_rows

check_determinism.CHUNKS = determinism_rig.CHUNKS = (5,)
check_determinism.DECODE_STEPS = 1

for make in (deterministic_plan, gpu_plan):
    none = {"graph_batch_sizes": (), "mixed_graph_tokens": (), "chunk_graph": False}  # graphs: the conformance suite
    plan, report = replace(make("cuda", "float32"), **none), Report()
    device = InterpretedDevice()
    device.load(TinyModel(), plan, lambda _: None)
    with torch.inference_mode():
        check_rows(report, make.__name__, Rig(device, plan), 70, 18, (3,), (7, 2, 2))
    print(make.__name__, report.num_off, report.values)
"""


def test_it_passes_a_deterministic_plan_and_catches_a_usual_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    verdicts = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("determ", "gpu_plan"))}
    assert verdicts["deterministic_plan"].split()[1] == "0", done.stdout + done.stderr
    assert "re-entry" in verdicts["deterministic_plan"] and "chunks" in verdicts["deterministic_plan"]
    assert verdicts["gpu_plan"].split()[1] != "0", (
        "the usual plan was found to be deterministic: the check sees nothing"
    )
