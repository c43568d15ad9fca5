"""Probe: the profile of a device, measured once a fingerprint and then read from the cache."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dragoman_agent.pal.attributes import FoundDevice, Inventory, take_inventory, usable_cores
from dragoman_agent.pal.microbench import measure_cpu
from dragoman_agent.pal.profile import Profile, ProfileError, Value, load_profile, now

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_SECONDS = 120  # the first run compiles the kernels


@dataclass(frozen=True, slots=True)
class PalReport:
    """What `dragoman probe` shows."""

    inventory: Inventory
    profiles: tuple[Profile, ...]
    from_cache: bool

    def to_json(self) -> str:
        """The capability matrix: every device looked at, and the profile of each that can be used."""
        body = {
            "cuda_problem": self.inventory.cuda_problem,
            "devices": [
                {
                    "kind": device.facts.kind,
                    "index": device.facts.index,
                    "name": device.facts.name,
                    "architecture": device.facts.architecture,
                    "memory_bytes": device.facts.memory_bytes,
                    "problem": device.problem,
                }
                for device in self.inventory.devices
            ],
            "profiles": [json.loads(profile.to_json()) for profile in self.profiles],
        }
        return json.dumps(body, indent=1)


def probe(cache_dir: Path, *, fresh: bool = False) -> PalReport:
    """Look at all devices and profile those this version can run on."""
    inventory = take_inventory()
    profiles = []
    cached = True
    for device in inventory.devices:
        if not device.problem:
            profile, hit = profile_device(device, cache_dir, fresh=fresh)
            profiles.append(profile)
            cached = cached and hit
    return PalReport(inventory, tuple(profiles), cached)


def profile_device(device: FoundDevice, cache_dir: Path, *, fresh: bool = False) -> tuple[Profile, bool]:
    """The device's profile and whether its measurements came from the cache. Reported values are always new."""
    path = cache_dir / "profiles" / f"{device.fingerprint}.json"
    if not fresh and path.exists():
        try:
            held = load_profile(path)
            if held.fingerprint == device.fingerprint:
                return held.with_values(device.values), True
        except ProfileError as error:
            logger.warning("%s; measuring again", error)
    measured = measure_cuda(device.facts.index) if device.facts.kind == "cuda" else measure_cpu(usable_cores())
    profile = Profile(
        name=f"{device.facts.kind}-{device.fingerprint[:8]}",
        device=device.facts,
        fingerprint=device.fingerprint,
        created=now(),
        values={**device.values, **measured},
    )
    _keep(profile, path)
    return profile, False


def measure_cuda(index: int) -> dict[str, Value]:
    """Measure a GPU in a process of its own: this one stays free of torch and of a CUDA context. Raises ProfileError."""
    command = [sys.executable, "-P", "-m", "dragoman_agent.device.cuda_probe", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ProfileError(
            f"measuring GPU {index} took over {_PROBE_TIMEOUT_SECONDS} s; is another process holding it? Try again, or use --device cpu"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ProfileError(f"GPU {index} could not be measured ({last}); run `dragoman doctor`, or use --device cpu")
    return {name: Value(**{**body, "labels": tuple(body["labels"])}) for name, body in json.loads(done.stdout).items()}


def _keep(profile: Profile, path: Path) -> None:
    """Write the cache entry; a full or read-only disk costs the next start a second, nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(profile.to_json())
        os.replace(name, path)
    except OSError as error:
        logger.warning("the profile cannot be cached (%s); it will be measured again at the next start", error)
