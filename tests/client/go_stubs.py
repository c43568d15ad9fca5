"""`python tests/client/go_stubs.py FOLDER`: the Go stubs of protos/ into FOLDER/dragomanv1, by the plugins pinned in clients/go/tools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE = "dragoman.dev/clients/go"


def tools() -> Path:
    """The folder of protoc-gen-go, protoc-gen-go-grpc and staticcheck, installed where they are not; kept between runs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman" / "go-tools"
    subprocess.run(
        ["go", "install", "tool"], cwd=ROOT / "clients/go/tools", env={**os.environ, "GOBIN": str(folder)}, check=True
    )
    return folder


def generate(folder: Path) -> None:
    """Writes the stubs. Raises CalledProcessError."""
    plugins = tools()
    names = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos/dragoman/v1").glob("*.proto"))
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}",
            *(f"--plugin={name}={plugins / name}" for name in ("protoc-gen-go", "protoc-gen-go-grpc")),
            f"--go_out={folder}", f"--go_opt=module={MODULE}", f"--go-grpc_out={folder}", f"--go-grpc_opt=module={MODULE}",
            *names,
        ],
        check=True,
        cwd=ROOT,
    )  # fmt: skip


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve())
