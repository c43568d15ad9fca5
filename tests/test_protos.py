"""The committed stubs are what the protos say, and the protos are clean."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
PACKAGES = sorted({path.parent.relative_to(ROOT / "protos") for path in PROTOS})


def test_committed_stubs_equal_a_fresh_generation(tmp_path: Path) -> None:
    names = [str(path.relative_to(ROOT / "protos")) for path in PROTOS]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *names],
        check=True,
        cwd=ROOT,
    )
    assert [str(package) for package in PACKAGES] == ["dragoman/compat", "dragoman/v1"]
    committed = ROOT / "clients" / "python"
    fresh = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    held = {
        str(path.relative_to(committed)): path.read_text()
        for package in PACKAGES
        for path in (committed / package).glob("*_pb2*")
    }
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
