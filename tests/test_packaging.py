"""The layers hold: who may import what, and what a process may not even load."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    path.name: ROOT / path
    for path in map(
        Path,
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
    )
}
TORCH = {"torch", "triton"}
OURS = set(PACKAGES)
STDLIB = sys.stdlib_module_names


def imports(path: Path) -> set[str]:
    """Top-level names imported anywhere in a file, whole dotted names for our own packages."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


def sources(package: str) -> list[Path]:
    return [path for path in PACKAGES[package].rglob("*.py") if "_pb2" not in path.name]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("dragoman_controller", TORCH | {"numpy", "dragoman_agent", "dragoman_kernels", "dragoman_gateway"}),
        ("dragoman_gateway", TORCH | {"numpy", "dragoman_agent", "dragoman_kernels", "dragoman_controller"}),
        ("dragoman_kernels", {"grpc", "dragoman_agent", "dragoman_controller", "dragoman_gateway"}),
        ("dragoman_agent", {"dragoman_controller", "dragoman_gateway"}),
    ],
)
def test_layers(package: str, forbidden: set[str]) -> None:
    for path in sources(package):
        assert not imports(path) & forbidden, path


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("dragoman", {"grpc", "google", "dragoman"}), ("dragoman_text", {"tokenizers", "jinja2", "dragoman_text"})],
)
def test_thin_packages_import_little(package: str, allowed: set[str]) -> None:
    for path in sources(package):
        assert not imports(path) - allowed - STDLIB, path


def test_torch_names_a_makers_gpu_only_where_the_device_is() -> None:
    """`torch_runtime.py` is the one place that knows all makers; what is NVIDIA's alone is in `cuda*.py`."""
    for package in OURS - {"dragoman_kernels"}:
        for path in sources(package):
            allowed = path.parent.name == "device" and path.name.startswith(("cuda", "torch_runtime"))
            assert allowed or not re.search(r"torch\.(cuda|xpu)\b", path.read_text()), path


def test_component_roots_hold_one_package_each() -> None:
    for name, path in PACKAGES.items():
        found = [entry.parent.name for entry in path.parent.glob("*/__init__.py")]
        assert found == [name]
        assert not (path.parent / "__init__.py").exists()


def test_our_kernels_folder_does_not_shadow_the_kernels_package() -> None:
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec is None or spec.origin is not None)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("dragoman_controller.main", TORCH | {"numpy"}),
        ("dragoman_gateway.main", TORCH | {"numpy"}),
        ("dragoman_agent.main", TORCH),
        ("dragoman_cli.main", TORCH | {"numpy", "grpc"}),
        ("dragoman", TORCH | {"numpy"}),
        ("dragoman_kernels", TORCH | {"grpc"}),
    ],
)
def test_importing_a_process_loads_no_more_than_it_needs(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(sorted(set({sorted(forbidden)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_base_package_and_all_extras_but_agent_never_pull_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, wanted in project["optional-dependencies"].items():
        if extra != "agent":
            assert not any(requirement.startswith(tuple(TORCH)) for requirement in wanted), extra
    assert not any(requirement.startswith(tuple(TORCH)) for requirement in project["dependencies"])


def test_lock_files_name_no_address() -> None:
    locks = [*ROOT.glob("requirements*.lock"), ROOT / "clients" / "typescript" / "package-lock.json"]
    assert len(locks) == 3
    for lock in locks:
        assert "://" not in lock.read_text(), lock
