"""A network namespace joined to ours by a pair of interfaces, that can be cut in either direction or both.

One direction is cut by a wrong hardware address for the other end: frames leave and nobody takes them, as behind a switch
that has lost its way. Tests are skipped by name where namespaces may not be made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from tests.needs import need, skip_without

Cut = Literal["both ways", "to it", "from it"]
_NOBODY = "02:00:00:00:00:99"
_READ = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"


@dataclass(frozen=True, slots=True)
class Namespace:
    """`here` and `there` are the addresses of our end and of the one inside."""

    name: str
    outer: str
    inner: str
    here: str
    there: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs it inside."""
        return ("ip", "netns", "exec", self.name)

    def cut(self, how: Cut) -> None:
        """Nothing passes in this direction any more."""
        if how == "both ways":
            _ip("link", "set", self.outer, "down")
        elif how == "to it":
            _ip("neigh", "replace", self.there, "lladdr", _NOBODY, "nud", "permanent", "dev", self.outer)
        else:
            _ip(
                "-n", self.name, "neigh", "replace", self.here, "lladdr", _NOBODY, "nud", "permanent", "dev", self.inner
            )

    def heal(self) -> None:
        """Both directions pass."""
        _ip("link", "set", self.outer, "up")
        _ip("neigh", "replace", self.there, "lladdr", self._address(("-n", self.name), self.inner), "nud", "permanent", "dev", self.outer)  # fmt: skip
        _ip("-n", self.name, "neigh", "replace", self.here, "lladdr", self._address((), self.outer), "nud", "permanent", "dev", self.inner)  # fmt: skip

    def _address(self, where: tuple[str, ...], device: str) -> str:
        return str(json.loads(_ip(*where, "-j", "link", "show", device))[0]["address"])

    def metric(self, address: str, sample: str) -> float:
        """A sample of a /metrics page, such as `name{label="x"}`, read from inside."""
        command = [*self.prefix, sys.executable, "-c", _READ, f"http://{address}/metrics"]
        page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        found = re.search(rf"^{re.escape(sample)} (\S+)$", page, re.MULTILINE)
        assert found is not None, f"{address} has no {sample}"
        return float(found[1])


@contextmanager
def namespaces(count: int) -> Iterator[tuple[str, list[Namespace]]]:
    """So many of their own for this process, and an address of ours that all of them reach whichever is cut off."""
    need("ip")
    number = os.getpid() % 100
    ours = f"10.213.{number}.254"
    with ExitStack() as stack:
        _added(stack, ("address", "{}", f"{ours}/32", "dev", "lo"))
        yield ours, [_made(stack, number, index) for index in range(count)]


def _made(stack: ExitStack, number: int, index: int) -> Namespace:
    network = f"10.{214 + index}.{number}"
    name = f"dragoman-{os.getpid()}-{index}"
    made = Namespace(name, f"dgo{number}x{index}", f"dgi{number}x{index}", f"{network}.1", f"{network}.2")
    _added(stack, ("netns", "{}", name))
    _ip("link", "add", made.outer, "type", "veth", "peer", "name", made.inner, "netns", name)
    _ip("address", "add", f"{made.here}/24", "dev", made.outer)
    _ip("-n", name, "address", "add", f"{made.there}/24", "dev", made.inner)
    _ip("-n", name, "link", "set", made.inner, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    made.heal()
    _ip("-n", name, "route", "add", "default", "via", made.here)
    return made


def _added(stack: ExitStack, command: tuple[str, ...]) -> None:
    """Run the command with `add` now and with `delete` at the end; the test is skipped by name where that is not permitted."""
    try:
        _ip(*(part.format("add") for part in command))
    except subprocess.CalledProcessError as error:
        skip_without("netns", f"needs a network namespace, which may not be made here: {error.stderr.strip()}")
    stack.callback(_ip, *(part.format("delete") for part in command))


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout
