"""Switches that turn the hardware layer off, whole or in part, to find out which part a problem comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Switches:
    """True: on. With `pal` off every other switch is off too: make it with `Switches.off()`."""

    pal: bool = True  # plan from the profile; off: the one fixed configuration of pal_off.py
    arena: bool = True  # memory budget to the byte; off: a fixed share of free memory
    launch_tuning: bool = True  # splits, blocks, warps, stages, graph sizes, padding of matrix products
    async_copy: bool = True  # copies beside computation: pinned staging, prefetch of offloaded KV
    link_policy: bool = True  # offload and prefetch decided by the link's measured rate

    @classmethod
    def off(cls) -> Switches:
        """`--pal off`."""
        return cls(**{field.name: False for field in fields(cls)})

    @classmethod
    def from_words(cls, pal: str = "on", **parts: str) -> Switches:
        """From "on" or "off" for `pal` and each part, as flags say it. Raises ValueError for another word or part."""
        known = [field.name for field in fields(cls)]
        for name, word in {"pal": pal, **parts}.items():
            if name not in known:
                raise ValueError(f"there is no switch {name!r}; there are {', '.join(known)}")
            if word not in ("on", "off"):
                raise ValueError(f"{word!r} is not one of on, off")
        if pal == "off":
            return cls.off()
        return cls(**{name: word == "on" for name, word in parts.items()})

    def names_off(self) -> tuple[str, ...]:
        """Names of what is off, in the order of the fields; only "pal" where that is."""
        if not self.pal:
            return ("pal",)
        return tuple(field.name for field in fields(self) if not getattr(self, field.name))

    def reason(self, name: str) -> str | None:
        """Why the part `name` is off, as decisions say it; None where it is on."""
        if not self.pal:
            return "switched off by --pal off"
        return None if getattr(self, name) else f"switched off by --pal-{name.replace('_', '-')} off"
