"""Probe: the profile of a device, measured once a fingerprint and then read from the cache."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dragoman_agent.pal.analysis import is_unresolved
from dragoman_agent.pal.attributes import FoundDevice, Inventory, take_inventory, usable_cores
from dragoman_agent.pal.found import UNTESTED_KINDS
from dragoman_agent.pal.matrix import capability_matrix
from dragoman_agent.pal.microbench import measure_cpu
from dragoman_agent.pal.probe_process import run_probe
from dragoman_agent.pal.probe_steps import FULL_STEPS, NEEDED, QUICK_STEPS, TORCH_STEPS
from dragoman_agent.pal.profile import Profile, ProfileError, Value, load_profile, now
from dragoman_agent.pal.steps import probe_step

logger = logging.getLogger(__name__)

EXTENT = "probe.extent"  # "quick" or "full"


@dataclass(frozen=True, slots=True)
class PalReport:
    """What `dragoman probe` shows."""

    inventory: Inventory
    profiles: tuple[Profile, ...]
    from_cache: bool

    def to_json(self) -> str:
        """The capability matrix, see `pal/capability_matrix.schema.json`."""
        return json.dumps(capability_matrix(self.inventory, self.profiles, from_cache=self.from_cache), indent=1)


def probe(cache_dir: Path, *, fresh: bool = False, full: bool = False) -> PalReport:
    """Look at all devices and profile those this version can run on; one that cannot be measured is listed with its reason.

    `full` takes every measurement (a minute a GPU), else only what a plan needs; `fresh` measures although a result is kept.
    """
    inventory = take_inventory()
    devices, profiles = [], []
    cached = True
    for device in inventory.devices:
        if device.usable:
            try:
                profile, hit = profile_device(device, cache_dir, fresh=fresh, full=full)
                profiles.append(profile)
                cached = cached and hit
            except ProfileError as error:
                device = dataclasses.replace(device, problem=str(error))
        devices.append(device)
    return PalReport(dataclasses.replace(inventory, devices=tuple(devices)), tuple(profiles), cached)


def profile_device(
    device: FoundDevice,
    cache_dir: Path,
    *,
    fresh: bool = False,
    full: bool = False,
    before_measuring: Callable[[], None] = lambda: None,
) -> tuple[Profile, bool]:
    """The device's profile and whether its measurements came from the cache. Reported values are always new.

    A quick result does not answer for a full one. A quick measurement replaces what it measures and keeps the rest of an
    earlier full one. `before_measuring` ends what would disturb it. Raises ProfileError.
    """
    path = cache_dir / "profiles" / f"{device.fingerprint}.json"
    held = _held(device, path)
    was_full = held is not None and held.values.get(EXTENT) == _extent(True)
    if held is not None and not fresh and (was_full or not full):
        return held.with_values(device.values), True
    before_measuring()
    measured = _measure(device, cache_dir, full)
    kept = {} if full or held is None else held.values
    profile = Profile(
        name=f"{device.facts.kind}-{device.fingerprint[:8]}",
        device=device.facts,
        fingerprint=device.fingerprint,
        created=now(),
        values={**kept, **device.values, **measured, EXTENT: _extent(full or was_full)},
    )
    _keep(profile, path)
    return profile, False


def measure_cuda(index: int, cache_dir: Path | None = None, *, full: bool = False) -> dict[str, Value]:
    """Measure a GPU in a process of its own: this one stays free of torch and of a CUDA context.

    A step that fails leaves its values out, with the reason in the log. Raises ProfileError when the GPU cannot be opened,
    or what no plan can be made without is missing.
    """

    def command(steps: Sequence[str]) -> list[str]:
        options = [*(["--full"] if full else []), *(["--cache", str(cache_dir)] if cache_dir else [])]
        module = [sys.executable, "-P", "-m", "dragoman_agent.device.cuda_probe"]
        return [*module, str(index), *options, "--steps", ",".join(steps)]

    return _run_steps(command, FULL_STEPS if full else QUICK_STEPS, f"GPU {index}")


def measure_torch(kind: str, index: int) -> dict[str, Value]:
    """Measure a GPU of another maker in a process of its own, through torch and Triton. Raises ProfileError as above."""

    def command(steps: Sequence[str]) -> list[str]:
        module = [sys.executable, "-P", "-m", "dragoman_agent.device.torch_probe"]
        return [*module, kind, str(index), "--steps", ",".join(steps)]

    return _run_steps(command, TORCH_STEPS, f"{kind} device {index}")


def _run_steps(command: Callable[[Sequence[str]], list[str]], steps: Sequence[str], name: str) -> dict[str, Value]:
    try:
        run = run_probe(command, steps)
    except ProfileError as error:
        raise ProfileError(
            f"{name} could not be measured ({error}); run `dragoman doctor`, or use --device cpu"
        ) from None
    for needed, step in NEEDED.items():
        if needed not in run.values:
            why = run.problems.get(step, "no reason given")
            raise ProfileError(
                f"{name} could not be measured: {needed} is missing ({why}); run `dragoman doctor`, or use --device cpu"
            )
    return run.values


def _measure(device: FoundDevice, cache_dir: Path, full: bool) -> dict[str, Value]:
    with probe_step(f"measure {device.facts.kind} {device.facts.index}") as step:
        if device.facts.kind == "cuda":
            measured = measure_cuda(device.facts.index, cache_dir, full=full)
        elif device.facts.kind in UNTESTED_KINDS:
            measured = measure_torch(device.facts.kind, device.facts.index)
        else:
            try:
                measured = measure_cpu(usable_cores())
            except ValueError as error:  # times of 0, of a clock that does not go on
                raise ProfileError(f"the CPU could not be measured ({error}); try again when it is quiet") from None
        step.outcome = f"{len(measured)} values"
    return measured


def _extent(full: bool) -> Value:
    return Value("full" if full else "quick", "", "reported", note="which set of measurements was taken")


def _held(device: FoundDevice, path: Path) -> Profile | None:
    """The cached profile of this fingerprint; None where there is none that can be used."""
    if not os.path.exists(path):  # not pathlib's, which raises where a folder may not be entered
        return None
    try:
        held = load_profile(path)
    except ProfileError as error:
        logger.warning("%s; measuring again", error)
        return None
    if held.fingerprint != device.fingerprint:
        return None
    return dataclasses.replace(held, values={name: one for name, one in held.values.items() if not is_unresolved(one)})


def _keep(profile: Profile, path: Path) -> None:
    """Write the cache entry; a full or read-only disk costs the next start a second, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(profile.to_json())
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        logger.warning("the profile cannot be cached (%s); it will be measured again at the next start", error)
