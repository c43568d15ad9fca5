"""Why there is no CUDA device, in words that a user can act on: the driver's answer held against the host's own facts."""

from __future__ import annotations

import getpass
import logging
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from dragoman_agent.pal import troubles
from dragoman_agent.pal.container import capabilities, container_kind
from dragoman_agent.pal.cuda_facts import DriverCallError
from dragoman_agent.pal.found import SUPPORTED_KINDS, UNTESTED_KINDS
from dragoman_agent.pal.host import Host
from dragoman_agent.pal.pci import NVIDIA, PciGpu
from dragoman_agent.pal.runtime import TORCH_FOR, Runtime
from dragoman_cli.failure import pip_install

logger = logging.getLogger(__name__)

_NODE = re.compile(r"nvidia(ctl|-uvm|\d+)")


@dataclass(frozen=True, slots=True)
class ClosedNode:
    """A device node that this user may not open."""

    path: str
    mode: str
    owner: str
    group: str


def why_no_cuda(error: DriverCallError | ImportError, host: Host, cards: list[PciGpu]) -> str:
    """What keeps CUDA from listing any device, and what to do. `cards` are all display devices of the PCI bus."""
    given = capabilities(host.environ)
    if given is not None and "compute" not in given:
        return troubles.NO_COMPUTE_CAPABILITY.text(value=host.environ.get("NVIDIA_DRIVER_CAPABILITIES", ""))
    if isinstance(error, ImportError):
        return (
            _no_driver(host, cards) if error.name == "libcuda" else troubles.NO_BINDINGS.text(pip_install=pip_install())
        )
    _log_versions(host)
    closed = closed_node(host)
    if closed is not None:
        return troubles.NO_PERMISSION.text(
            user=_user(), node=closed.path, mode=closed.mode, owner=closed.owner, group=closed.group
        )
    if error.code == "CUDA_ERROR_NO_DEVICE" and "CUDA_VISIBLE_DEVICES" in host.environ:
        return "every card is " + _hidden(host)
    if error.code == "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER":
        return troubles.DRIVER_LACKS_FUNCTION.text(call=error.call)
    known = troubles.DRIVER_ANSWERS.get(error.code)
    return known.text() if known else troubles.ANSWERED.text(code=error.code, number=error.number)


def why_unlisted(card: PciGpu, host: Host, cuda_problem: str, runtime: Runtime, torch_problem: str) -> str:
    """Why CUDA does not list a card of the PCI bus, or why a GPU of another maker cannot be used.

    `torch_problem` is what kept torch from listing its devices, empty where it listed some.
    """
    if card.kind == "display":
        return "a display adapter, it computes nothing"
    if card.kind not in (*SUPPORTED_KINDS, *UNTESTED_KINDS):
        return f"this version has no {card.kind} backend"
    if card.kind != "cuda":
        needed = TORCH_FOR[card.kind]
        if runtime.other_kind != card.kind:
            return troubles.TORCH_OF_ANOTHER_MAKER.text(built=runtime.built_for, needed=needed)
        return troubles.NOT_LISTED_BY_TORCH.text(needed=needed, reason=torch_problem or "it lists others")
    if card.kernel_driver not in ("", "nvidia"):
        return troubles.OTHER_KERNEL_DRIVER.text(driver=card.kernel_driver)
    if cuda_problem:
        return cuda_problem
    if "CUDA_VISIBLE_DEVICES" in host.environ:
        return _hidden(host)
    return troubles.NOT_LISTED.text()


def closed_node(host: Host) -> ClosedNode | None:
    """The first of the driver's device nodes that exists and that this user may not read and write."""
    folder = host.path("/dev")
    try:
        nodes = sorted(entry for entry in folder.iterdir() if _NODE.fullmatch(entry.name))
    except OSError:
        return None
    for node in nodes:
        if not host.can_open(node):
            status = node.stat()
            return ClosedNode(f"/dev/{node.name}", stat.filemode(status.st_mode)[1:], _owner(node), _group(node))
    return None


def _hidden(host: Host) -> str:
    return troubles.HIDDEN.text(value=host.environ["CUDA_VISIBLE_DEVICES"] or '""')


def _no_driver(host: Host, cards: list[PciGpu]) -> str:
    kind = container_kind(host)
    if kind == "wsl":
        return troubles.NO_DRIVER_IN_WSL.text()
    if host.path("/sys/bus/pci/devices").is_dir() and not any(card.vendor == NVIDIA for card in cards):
        return troubles.NO_GPU.text()
    return (troubles.NO_DRIVER_IN_CONTAINER if kind else troubles.NO_DRIVER).text()


def _log_versions(host: Host) -> None:
    """Which kernel module and which library were loaded: what a mismatch is about."""
    module = host.read("/proc/driver/nvidia/version").splitlines()
    logger.debug("kernel module: %s", module[0] if module else "not loaded")
    paths = {line.split()[-1] for line in host.read("/proc/self/maps").splitlines() if "libcuda.so" in line}
    logger.debug("libcuda: %s", ", ".join(sorted(paths)) or "not loaded")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry
        return "this user"


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, NotImplementedError):  # an id without a name, a system without owners
        return str(path.stat().st_uid)


def _group(path: Path) -> str:
    try:
        return path.group()
    except (KeyError, NotImplementedError):  # an id without a name, a system without owners
        return str(path.stat().st_gid)
