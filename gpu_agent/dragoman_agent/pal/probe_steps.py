"""The steps of a GPU probe by name, in the order they run. Needs no CUDA."""

from __future__ import annotations

# What a plan needs; under three seconds together. Products last: their library is loaded meanwhile.
QUICK_STEPS = (
    "memory.read",
    "memory.copy",
    "scheduling.graph_node",
    "scheduling.grid_barrier",
    "scheduling.phase",
    "link.pinned",
    "compute.bfloat16",
)
FULL_STEPS = (
    *QUICK_STEPS[:-2],
    "memory.by_size",
    "memory.l2",
    "scheduling.block_size",
    "scheduling.stream_launch",
    "scheduling.events",
    "scheduling.atomics",
    "memory.latency",
    "memory.latency_by_region",
    "link.pinned",
    "link.pageable",
    "compute.bfloat16",
    "compute.float16",
    "compute.float8",
    "compute.int8",
)
# What torch and Triton alone can measure, of a card that is not NVIDIA's.
TORCH_STEPS = ("memory.read", "memory.copy", "scheduling.graph_node", "link.pinned", "compute.bfloat16")

# What no plan can be made without, and the step that measures it.
NEEDED = {
    "memory.read_bandwidth": "memory.read",
    "compute.matmul_bfloat16": "compute.bfloat16",
    "scheduling.graph_node": "scheduling.graph_node",
}
