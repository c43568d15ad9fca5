"""The plan: everything the engine and the device take from the measured profile. Frozen; a change makes a new one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from dragoman.step_model import StepModel

_NOT_IN_DIGEST = ("memory", "step_model", "num_blocks", "max_num_waiting", "device_index")


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One line of the memory budget."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run and how. Counts are tokens, sequences or blocks; sizes say their unit."""

    device_kind: str
    model_name: str
    page_size: int  # tokens in a KV block
    num_blocks: int  # KV blocks in the arena, the null block 0 included
    max_context_tokens: int  # longest prompt + output of one sequence
    max_batch_tokens: int  # tokens a step may compute (prefill and decode together)
    max_num_seqs: int  # sequences that run at once
    max_num_waiting: int  # requests that wait at the agent; beyond it they are refused
    num_threads: int
    road: str  # how the model is computed, such as "native-int8", "native-float32", "torch-float32", "null"
    kv_dtype: str
    memory: tuple[MemoryLine, ...]
    step_model: StepModel
    graph_batch_sizes: tuple[int, ...] = ()  # decode batches with a captured graph; empty where a device has none
    device_index: int = 0  # among devices of its kind

    def digest(self) -> bytes:
        """SHA-256 over the choices that decide which tokens come out; equal digests mean equal choices."""
        chosen = {name: value for name, value in asdict(self).items() if name not in _NOT_IN_DIGEST}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).digest()
