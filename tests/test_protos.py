"""The committed stubs are what the protos say, and the protos are clean."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos" / "dragoman" / "v1").glob("*.proto"))


def test_committed_stubs_equal_a_fresh_generation(tmp_path: Path) -> None:
    names = [str(path.relative_to(ROOT / "protos")) for path in PROTOS]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *names],
        check=True,
        cwd=ROOT,
    )
    committed = ROOT / "clients" / "python" / "dragoman" / "v1"
    fresh = {path.name: path.read_text() for path in (tmp_path / "dragoman" / "v1").iterdir()}
    held = {path.name: path.read_text() for path in committed.glob("*_pb2*")}
    assert sorted(fresh) == sorted(held)
    for name, text in fresh.items():
        assert held[name] == text, f"{name} is stale: run `make protos`"


@pytest.mark.parametrize("arguments", [["lint"], ["format", "-d", "--exit-code"]])
def test_buf_is_content(arguments: list[str]) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "buf"), *arguments],
        cwd=ROOT / "protos",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
