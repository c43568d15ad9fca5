"""Lists and measures devices through torch and Triton alone: what there is for cards that CUDA's own probe cannot reach.

python -m dragoman_agent.device.torch_probe KIND --list            one line of JSON: every device
python -m dragoman_agent.device.torch_probe KIND INDEX [--steps A,B]   a line of JSON a step, see probe_answers.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch

from dragoman_agent.device.base import DeviceError
from dragoman_agent.device.error_text import first_line
from dragoman_agent.device.probe_answers import answer, own_stdout, say
from dragoman_agent.device.torch_runtime import TorchRuntime, open_runtime
from dragoman_agent.pal.analysis import measured, measured_rate
from dragoman_agent.pal.probe_steps import TORCH_STEPS
from dragoman_agent.pal.profile import Value

_REPEATS = 5
_STREAM_BYTES = 1 << 30  # several times any last-level cache
_PRODUCT = 4096  # rows and columns of the matrix product
_NODES = (200, 1000)  # of the two graphs whose difference is the cost of a node
_PINNED_BYTES = 128 << 20

# Profile value -> (torch's property, unit, factor). A property that torch does not have gives no value.
_PROPERTIES = {
    "compute.multiprocessors": (("multi_processor_count", "gpu_subslice_count"), "", 1),
    "compute.warp_size": (("warp_size",), "", 1),
    "compute.max_threads_per_block": (("max_threads_per_block", "max_work_group_size"), "", 1),
    "compute.max_threads_per_multiprocessor": (("max_threads_per_multi_processor",), "", 1),
    "compute.registers_per_multiprocessor": (("regs_per_multiprocessor",), "", 1),
    "compute.max_clock": (("clock_rate",), "Hz", 1000),
    "memory.total": (("total_memory",), "bytes", 1),
    "memory.l2_size": (("L2_cache_size",), "bytes", 1),
    "memory.shared_per_block": (("shared_memory_per_block_optin", "shared_memory_per_block", "local_mem_size"), "bytes", 1),
    "memory.shared_per_multiprocessor": (("shared_memory_per_multiprocessor",), "bytes", 1),
    "memory.max_clock": (("memory_clock_rate",), "Hz", 1000),
    "memory.bus_width": (("memory_bus_width",), "bits", 1),
}  # fmt: skip
_SUB_GROUP = 32  # threads in step that Triton asks of an Intel card where it has them


@dataclass(frozen=True, slots=True)
class Bench:
    """A device being measured."""

    runtime: TorchRuntime
    num_programs: int  # enough to fill it

    def seconds(self, work: Callable[[], object], repeats: int = _REPEATS, calls: int = 4) -> list[float]:
        """Time of one call of `work` on the device, `repeats` times, each over several calls in a row."""
        begin, end = self.runtime.new_event(), self.runtime.new_event()
        work()
        times = []
        for _ in range(repeats):
            self.runtime.synchronize()
            begin.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / calls)
        return times


def list_devices(kind: str) -> list[dict[str, Any]]:
    """Every device of `kind` with what torch says of it. Raises DeviceError where there is none."""
    first = open_runtime(kind, 0)
    return [_entry(open_runtime(kind, index)) for index in range(first.namespace.device_count())]


def _entry(runtime: TorchRuntime) -> dict[str, Any]:
    properties = runtime.namespace.get_device_properties(runtime.device)
    values = reported_values(properties)
    free, _ = runtime.namespace.mem_get_info(runtime.device)
    values["memory.free"] = Value(int(free), "bytes", "reported")
    architecture = getattr(properties, "gcnArchName", "") or str(getattr(properties, "architecture", "unknown"))
    return {
        "index": runtime.device.index,
        "name": str(properties.name),
        "architecture": architecture.partition(":")[0],  # gfx942:sramecc+:xnack-
        "memory_bytes": int(properties.total_memory),
        "uuid": str(getattr(properties, "uuid", "")),
        "address": address_of(properties),
        "integrated": bool(getattr(properties, "is_integrated", 0)),
        "values": {name: asdict(value) for name, value in values.items()},
    }


def reported_values(properties: Any) -> dict[str, Value]:
    """Profile values of torch's device properties; what torch does not say, or says 0 of, is left out."""
    values = {}
    for name, (sources, unit, factor) in _PROPERTIES.items():
        number = next((int(getattr(properties, source)) for source in sources if getattr(properties, source, 0)), 0)
        if number > 0:
            values[name] = Value(number * factor, unit, "reported")
    groups = [int(size) for size in getattr(properties, "sub_group_sizes", ())]
    if groups and "compute.warp_size" not in values:
        size = _SUB_GROUP if _SUB_GROUP in groups else max(groups)
        values["compute.warp_size"] = Value(size, "", "reported", note="of the sub-group sizes the one Triton asks for")
    if {"memory.max_clock", "memory.bus_width"} <= values.keys():
        clock, width = (float(str(values[f"memory.{name}"].value)) for name in ("max_clock", "bus_width"))
        note = "2 x clock x width, never reached"
        values["memory.bus_bandwidth"] = Value(2 * clock * width / 8, "bytes/s", "derived", note=note)
    return values


def address_of(properties: Any) -> str:
    """On the PCI bus, such as "0000:c1:00.0"; empty where torch does not say."""
    domain, bus, device = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return "" if None in (domain, bus, device) else f"{domain or 0:04x}:{bus or 0:02x}:{device or 0:02x}.0"


def read(bench: Bench) -> dict[str, Value]:
    """A read-only stream, by our Triton kernel."""
    from dragoman_kernels.triton.stream_read import stream_read

    block = 4096
    items = _STREAM_BYTES // 4 // (bench.num_programs * block) * bench.num_programs * block
    source = torch.ones(items, dtype=torch.float32, device=bench.runtime.device)
    sums = torch.zeros(bench.num_programs, dtype=torch.float32, device=bench.runtime.device)
    times = bench.seconds(lambda: stream_read(source, sums, block))
    if int(sums.double().sum()) != items:
        raise ValueError(f"the sum of what was read is {float(sums.sum())}, {items} was written")
    return {"memory.read_bandwidth": measured_rate(4 * items, times, "bytes/s", f"{4 * items >> 20} MiB, Triton")}


def copy(bench: Bench) -> dict[str, Value]:
    """torch's copy from device memory to device memory."""
    source = torch.ones(_STREAM_BYTES, dtype=torch.uint8, device=bench.runtime.device)
    target = torch.empty_like(source)
    times = bench.seconds(lambda: target.copy_(source))
    return {"memory.copy_bandwidth": measured_rate(2 * _STREAM_BYTES, times, "bytes/s", "bytes read and written")}


def graph_node(bench: Bench) -> dict[str, Value]:
    """One more dependent node in a graph: a long graph's time less a short one's."""
    word = torch.zeros(1, device=bench.runtime.device)

    def graph_of(count: int) -> Any:
        def work() -> None:
            for _ in range(count):
                word.add_(1)

        stream = bench.runtime.new_stream()
        with bench.runtime.on(stream):
            work()
        bench.runtime.synchronize()
        return bench.runtime.capture(stream, work, None)[0]

    short, long = (bench.seconds(graph_of(count).replay, calls=1) for count in _NODES)
    count = _NODES[1] - _NODES[0]
    nodes = [(one - other) / count for one, other in zip(long, short, strict=True)]
    return {"scheduling.graph_node": measured(nodes, "s", f"an addition of one word, {count} nodes")}


def pinned(bench: Bench) -> dict[str, Value]:
    """Copies between pinned host memory and the device."""
    host = bench.runtime.pinned((_PINNED_BYTES,), torch.uint8)
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=bench.runtime.device)
    note = f"{_PINNED_BYTES >> 20} MiB"
    down = bench.seconds(lambda: there.copy_(host, non_blocking=True))
    up = bench.seconds(lambda: host.copy_(there, non_blocking=True))
    return {
        "link.h2d_pinned": measured_rate(_PINNED_BYTES, down, "bytes/s", note),
        "link.d2h_pinned": measured_rate(_PINNED_BYTES, up, "bytes/s", note),
    }


def bfloat16(bench: Bench) -> dict[str, Value]:
    """torch's matrix product on random data."""
    left, right = (
        torch.randn(_PRODUCT, _PRODUCT, device=bench.runtime.device).to(torch.bfloat16) for _ in range(2)
    )  # fmt: skip
    times = bench.seconds(lambda: left @ right)
    note = f"{_PRODUCT}^3, random data"
    return {"compute.matmul_bfloat16": measured_rate(2 * _PRODUCT**3, times, "flop/s", note)}


STEPS: dict[str, Callable[[Bench], dict[str, Value]]] = {
    "memory.read": read,
    "memory.copy": copy,
    "scheduling.graph_node": graph_node,
    "link.pinned": pinned,
    "compute.bfloat16": bfloat16,
}


def main(argv: Sequence[str] | None = None) -> int:
    """List or measure; 0 when every step was tried, 1 when there is no such device, 3 when a failed step broke it."""
    parser = argparse.ArgumentParser(prog="python -m dragoman_agent.device.torch_probe", description=__doc__)
    parser.add_argument("kind", choices=("cuda", "hip", "xpu"))
    parser.add_argument("index", type=int, nargs="?", default=0)
    parser.add_argument("--list", action="store_true", help="list the devices instead")
    parser.add_argument("--steps", default="", help="only these, separated by commas")
    arguments = parser.parse_args(argv)
    names = [name for name in arguments.steps.split(",") if name] or list(TORCH_STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    with own_stdout() as answers:
        try:
            if arguments.list:
                answers.write(json.dumps(list_devices(arguments.kind)) + "\n")
                return 0
            runtime = open_runtime(arguments.kind, arguments.index)
            runtime.activate()
            bench = _bench(runtime)
        except (DeviceError, RuntimeError) as error:
            say(first_line(error))
            return 1
        return _measure(bench, names, answers)


def _bench(runtime: TorchRuntime) -> Bench:
    count = reported_values(runtime.namespace.get_device_properties(runtime.device)).get("compute.multiprocessors")
    return Bench(runtime, 8 * int(str(count.value)) if count else 256)


def _measure(bench: Bench, names: Sequence[str], answers: TextIO) -> int:
    for name in names:
        say(f"step {name}")
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                values = STEPS[name](bench)
        except (ValueError, RuntimeError) as error:
            answer(answers, name, time.perf_counter() - start, error=first_line(error))
            try:
                bench.runtime.synchronize()
            except RuntimeError as broken:
                say(f"the device answers {first_line(broken)} after step {name}")
                return 3
        else:
            answer(answers, name, time.perf_counter() - start, values=values)
        bench.runtime.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
