"""Names the toolchains that some tests need: found or missing, and what a missing one skips. Exit 1 for a missing required one."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

# name, command that prints a version, what is skipped without it
TOOLCHAINS = (
    ("g++", ["g++", "--version"], "the native CPU road; the torch road is tested alone"),
    ("cc", ["cc", "--version"], "fault F15: clocks that are shifted by a preloaded library"),
    ("ip", ["ip", "-V"], "fault F5: agents in network namespaces that are cut off"),
    ("etcd", ["etcd", "--version"], "everything about several controllers that share their state in etcd"),
    ("go", ["go", "version"], "the Go client"),
    ("node", ["node", "--version"], "the TypeScript client"),
    ("cargo", ["cargo", "--version"], "the Rust client"),
    ("mvn", ["mvn", "--version"], "the Java client"),
    ("promtool", ["promtool", "--version"], "the check of /metrics by promtool"),
)


def version(command: list[str]) -> str:
    """First line that the command prints; empty when it is not there."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).splitlines()[0] if done.returncode == 0 else ""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", default="", help="names that must be there, separated by spaces")
    required = set(parser.parse_args().require.split())
    unknown = required - {name for name, _, _ in TOOLCHAINS} - {"model"}
    if unknown:
        print(f"toolchains: unknown name in --require: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    missing = []
    for name, command, skipped in TOOLCHAINS:
        found = version(command)
        print(f"toolchain {name}: {found or f'missing, skips {skipped}'}")
        if not found and name in required:
            missing.append(name)
    if missing:
        print(f"toolchains: required but missing: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
