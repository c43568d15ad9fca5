"""`python clients/typescript/build.py FOLDER`: the package, its stubs, tests and runner, built in FOLDER, which `npm install FOLDER` takes.

Needs Node 20.9 or newer, and grpcio-tools in this Python for protoc. Nothing in the checkout is touched. Packages are
installed anew only when the lock file has changed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parents[1] / "protos"
FOLDERS = ("src", "conformance", "examples", "tests")
# The services that a client calls; the messages they need come with them.
SERVICES = ("admission", "embedding", "fleet", "generation", "hardware", "telemetry", "tokenizer")
OPTIONS = (
    "outputServices=grpc-js",
    "env=node",
    "esModuleInterop=true",
    "importSuffix=.js",
    "forceLong=bigint",  # a seed or an epoch has all 64 bits
    "oneof=unions-value",
    "removeEnumPrefix=true",
    "unrecognizedEnum=false",
    "useExactTypes=false",
    "outputJsonMethods=false",
)


def build(folder: Path) -> None:
    """Raises CalledProcessError for a step that fails; its output is on stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    copy(folder)
    install(folder)
    generate(folder)
    run(folder, "node_modules/.bin/tsc", "--project", ".")


def copy(folder: Path) -> None:
    """The sources as they are now, and no file that is gone."""
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.rmtree(folder / "dist" / name, ignore_errors=True)
        shutil.copytree(HERE / name, folder / name)
    (folder / "dist" / "tsbuildinfo").unlink(missing_ok=True)
    for path in [*HERE.iterdir(), HERE.parent / "conformance/hashes.json"]:
        if path.is_file():
            shutil.copy2(path, folder / path.name)


def install(folder: Path) -> None:
    """The packages of package-lock.json."""
    stamp = folder / "node_modules" / ".dragoman"
    digest = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != digest:
        run(folder, "npm", "ci", "--ignore-scripts", "--loglevel=error")
        stamp.write_text(digest, encoding="utf-8")


def generate(folder: Path) -> None:
    """The stubs, in gen/."""
    shutil.rmtree(folder / "gen", ignore_errors=True)
    (folder / "gen").mkdir()
    names = [f"dragoman/v1/{service}_service.proto" for service in SERVICES]
    plugin = folder / "node_modules/.bin/protoc-gen-ts_proto"
    run(
        folder, sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"--plugin=protoc-gen-ts_proto={plugin}",
        "--ts_proto_out=gen", f"--ts_proto_opt={','.join(OPTIONS)}", *names,
    )  # fmt: skip


def run(folder: Path, *command: str) -> None:
    """One step, in the folder."""
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").splitlines()[0])
    try:
        build(Path(sys.argv[1]).resolve())
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(str(part) for part in error.cmd[:3])} failed with {error.returncode}")
