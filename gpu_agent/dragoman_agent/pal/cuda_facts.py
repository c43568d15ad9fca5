"""Facts of every CUDA device through the driver API. No context and no allocation; a failing call costs its value alone."""

from __future__ import annotations

import logging
import uuid as uuid_module
from dataclasses import dataclass
from typing import Any

from dragoman_agent.pal import troubles
from dragoman_agent.pal.cuda_values import ATTRIBUTES, derived_values
from dragoman_agent.pal.host import Host
from dragoman_agent.pal.profile import DeviceFacts, Value
from dragoman_agent.pal.steps import probe_step

logger = logging.getLogger(__name__)

_MODE_PROHIBITED = 2


class DriverCallError(Exception):
    """A driver call failed: which one, and the driver's code and number."""

    def __init__(self, call: str, code: str, number: int) -> None:
        super().__init__(f"{call}: {code} ({number})")
        self.call = call
        self.code = code
        self.number = number


@dataclass(frozen=True, slots=True)
class CudaReading:
    """One device as the driver describes it. `problem` is empty when it can be used."""

    facts: DeviceFacts
    values: dict[str, Value]
    address: str
    uuid_body: str  # without prefix; empty where the driver did not tell
    integrated: bool
    under_mps: bool | None
    unreported: frozenset[str]
    problem: str = ""


class Driver:
    """The driver API with errors for statuses."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of one call. Raises DriverCallError, also for a function that the installed driver lacks."""
        try:
            status, *results = getattr(self._library, name)(*arguments)
        except (AttributeError, RuntimeError) as error:
            logger.debug("%s: %s", name, error)
            raise DriverCallError(name, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", 36) from error
        if status != self._library.CUresult.CUDA_SUCCESS:
            raise DriverCallError(name, self._code(status), int(status))
        return results[0] if results else None

    def attribute(self, name: str, device: Any) -> int | None:
        """A device attribute; None, with the reason in the log, where the driver does not give it."""
        key = getattr(self._library.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if key is None:  # a binding that is older than the attribute
            return None
        try:
            return int(self.call("cuDeviceGetAttribute", key, device))
        except DriverCallError as error:
            logger.debug("attribute %s is absent: %s", name, error)
            return None

    def _code(self, status: Any) -> str:
        named, text = self._library.cuGetErrorName(status)
        if named == self._library.CUresult.CUDA_SUCCESS and isinstance(text, bytes):
            return text.decode(errors="replace")
        return str(getattr(status, "name", "an unknown error"))


def read_cuda(host: Host) -> tuple[list[CudaReading], DriverCallError | ImportError | None]:
    """Every device the driver lists, or what kept it from listing any."""
    try:
        with probe_step("driver") as step:
            driver, count = _start(host)
            step.outcome = f"{count} devices"
    except (DriverCallError, ImportError) as error:
        return [], error
    readings = []
    for index in range(count):
        with probe_step(f"attributes of cuda {index}") as step:
            reading = _read_device(driver, index)
            step.outcome = reading.problem or f"{len(reading.values)} values"
        readings.append(reading)
    return readings, None


def _start(host: Host) -> tuple[Driver, int]:
    """Load and initialise the driver. Raises ImportError with name "libcuda" where there is no driver library."""
    library = host.load_driver()
    try:
        status = library.cuInit(0)[0]
    except RuntimeError as error:  # the binding found no libcuda
        raise ImportError(str(error), name="libcuda") from error
    driver = Driver(library)
    if status != library.CUresult.CUDA_SUCCESS:
        driver.call("cuInit", 0)  # the same answer, as an error
    return driver, int(driver.call("cuDeviceGetCount"))


def _read_device(driver: Driver, index: int) -> CudaReading:
    """Facts of one device. A call that fails half-way makes it a device with a problem, and the others go on."""
    try:
        device = driver.call("cuDeviceGet", index)
        name = driver.call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(errors="replace")
        total = int(driver.call("cuDeviceTotalMem", device))
        version = int(driver.call("cuDriverGetVersion"))
    except DriverCallError as error:
        problem = troubles.FAILED_HALF_WAY.text(call=error.call, code=error.code, number=error.number)
        facts = DeviceFacts("cuda", index, f"CUDA device {index}", "unknown", 0, f"cuda-{index}")
        return CudaReading(facts, {}, "", "", False, None, frozenset(), problem)
    raw = {fact.attribute: driver.attribute(fact.attribute, device) for fact in ATTRIBUTES}
    values = {fact.name: value for fact in ATTRIBUTES if (value := fact.value(raw[fact.attribute])) is not None}
    unreported = frozenset(fact.name for fact in ATTRIBUTES if fact.name not in values)
    major, minor = (driver.attribute(f"COMPUTE_CAPABILITY_{part}", device) for part in ("MAJOR", "MINOR"))
    values["memory.total"] = Value(total, "bytes", "reported")
    values["driver.version"] = Value(f"{version // 1000}.{version % 1000 // 10}", "", "reported")
    if major is not None and minor is not None:
        values["compute.capability"] = Value(f"{major}.{minor}", "", "reported")
    values.update(derived_values(values))
    address = _address(driver, device)
    body = _uuid_body(driver, device)
    identity = f"GPU-{body}" if body else f"pci-{address}"
    architecture = f"sm_{major}{minor}" if major is not None else "unknown"
    problem = ""
    if major is None:
        problem = troubles.FAILED_HALF_WAY.text(call="cuDeviceGetAttribute", code="no compute capability", number=0)
    elif driver.attribute("COMPUTE_MODE", device) == _MODE_PROHIBITED:
        problem = troubles.PROHIBITED.text(index=index)
    mps = driver.attribute("MPS_ENABLED", device)
    return CudaReading(
        facts=DeviceFacts("cuda", index, name, architecture, total, identity),
        values=values,
        address=address,
        uuid_body=body,
        integrated=driver.attribute("INTEGRATED", device) == 1,
        under_mps=None if mps is None else mps == 1,
        unreported=unreported,
        problem=problem,
    )


def _address(driver: Driver, device: Any) -> str:
    """The PCI address as NVML and sysfs write it, without the function."""
    parts = [driver.attribute(f"PCI_{part}_ID", device) for part in ("DOMAIN", "BUS", "DEVICE")]
    if any(part is None for part in parts):
        return ""
    domain, bus, slot = (part or 0 for part in parts)
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _uuid_body(driver: Driver, device: Any) -> str:
    """The UUID without prefix, a slice's own where the device is one; empty where the driver does not tell."""
    try:
        return str(uuid_module.UUID(bytes=bytes(driver.call("cuDeviceGetUuid", device).bytes)))
    except (DriverCallError, ValueError) as error:
        logger.debug("the device's identity is its PCI address: %s", error)
        return ""
