"""The facts through the real cuda.bindings, which load a driver library that a test built: types and calls are the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import need

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is for Linux on x86-64")

SOURCE = Path(__file__).parents[2] / "fakes" / "libcuda.cpp"
LOOK = """
import json
from dragoman_agent.pal.attributes import take_inventory
from dragoman_agent.pal.matrix import capability_matrix
print(json.dumps(capability_matrix(take_inventory(), [], from_cache=False)))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    target = folder / "libcuda.so.1"
    subprocess.run([need("g++"), "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return folder


def look(library: Path, **environ: str) -> dict[str, object]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), **environ}
    done = subprocess.run([sys.executable, "-P", "-c", LOOK], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    matrix: dict[str, object] = json.loads(done.stdout)
    return matrix


def test_a_card_is_read(library: Path) -> None:
    devices = look(library)["devices"]
    assert isinstance(devices, list)
    card = next(device for device in devices if device["kind"] == "cuda")
    assert (card["name"], card["architecture"], card["memory_bytes"]) == ("Played Card", "sm_90", 8 << 30)
    assert card["uuid"] == "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert card["address"] == "00000000:01:00.0"
    values = {name: value["value"] for name, value in card["values"].items()}
    assert values["compute.multiprocessors"] == 16
    assert values["memory.shared_per_block"] == 97
    assert values["driver.version"] == "13.0"
    assert "compute.max_clock" not in values, "that call fails"
    assert "memory.l2_size" not in values, "that one answers 0"
    assert len(values) >= 35
    assert any("L2 cache" in note for note in card["notes"])


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("803", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803); reboot after a driver update"),
        ("7", "CUDA_ERROR_OF_TOMORROW (7); update the NVIDIA driver"),
    ],
)
def test_what_cuinit_answers_is_told(library: Path, status: str, words: str) -> None:
    assert words in str(look(library, FAKE_CUDA_INIT=status)["cuda_problem"])
