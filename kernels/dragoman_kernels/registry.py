"""The kernels by name. Registration needs a contract; a factory imports its kernel only when asked for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dragoman_kernels.contract import ContractError, KernelContract

Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One registered kernel: `load()` imports it and returns its callable or class."""

    name: str
    contract: KernelContract
    load: Factory


class Registry:
    """Kernels by name, each with its contract."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}

    def register(self, name: str, contract: KernelContract | None = None) -> Callable[[Factory], Factory]:
        """Decorate the factory of a kernel. Raises ContractError without a contract, ValueError on a taken name."""
        if not isinstance(contract, KernelContract):
            raise ContractError(
                f"kernel {name!r} has no contract; pass contract=KernelContract(...) so that its cost can be predicted"
            )
        if name in self._kernels:
            raise ValueError(f"kernel {name!r} is already registered; names are unique")
        checked = contract

        def add(factory: Factory) -> Factory:
            self._kernels[name] = Kernel(name, checked, factory)
            return factory

        return add

    def get(self, name: str) -> Kernel:
        """Raises KeyError listing the registered names."""
        if name not in self._kernels:
            raise KeyError(f"no kernel {name!r}; registered: {', '.join(self.names()) or 'none'}")
        return self._kernels[name]

    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._kernels))


def default_registry() -> Registry:
    """A registry of every kernel of this package."""
    from dragoman_kernels.cpu.register import register_cpu
    from dragoman_kernels.probe.contracts import register_probe
    from dragoman_kernels.triton.contracts import register_triton

    registry = Registry()
    register_cpu(registry)
    register_triton(registry)
    register_probe(registry)
    return registry
