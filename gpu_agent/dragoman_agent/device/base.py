"""The contract between the engine and a device: what goes in each step, what comes out.

Host arrays are numpy so that a device without torch keeps the contract; a device copies them to where it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dragoman_agent.model.config import ModelConfig
    from dragoman_agent.model.source import ModelSource
    from dragoman_agent.pal.plan import Plan

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


class DeviceError(Exception):
    """A device could not be opened or a step failed on it. `message` says what, why and what to do."""


class DeviceMemoryError(DeviceError):
    """The device has no memory for this step or copy now. Nothing of it counts; a smaller one may fit.

    A step raises it from `submit`, `supply` or `result`. After `result`, what was submitted behind it counts as little.
    """


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One report while a model loads."""

    phase: str  # "open", "weights", "kv", "warmup"
    done: int
    total: int
    unit: str  # "bytes" or "steps"


ProgressFn = Callable[[LoadProgress], None]


def no_ids() -> Int32Array:
    """An empty index array."""
    return np.zeros(0, dtype=np.int32)


def no_masks() -> Int32Array:
    """No mask rows."""
    return np.zeros((0, 0), dtype=np.int32)


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters, one row a sampled sequence.

    Random numbers come from Philox4x32-10 keyed by `seeds` and counted by (`choices`, `cursors`), so a row's
    numbers depend on nothing but its own request. Temperature 0 is greedy.
    """

    temperatures: Float32Array  # [num_samples]
    top_ks: Int32Array  # [num_samples], 0 is off
    top_ps: Float32Array  # [num_samples], 1 is off
    min_ps: Float32Array  # [num_samples], 0 is off
    seeds: npt.NDArray[np.uint64]  # [num_samples]
    choices: Int32Array  # [num_samples]
    cursors: Int32Array  # [num_samples] index of the output token being sampled
    num_logprobs: Int32Array  # [num_samples], -1 is none, 0 is the sampled token's own only
    # Sparse parts, keyed by row; absent rows have none.
    penalties: dict[int, Penalties] = field(default_factory=dict)
    logit_bias: dict[int, tuple[Int32Array, Float32Array]] = field(default_factory=dict)  # (token ids, added values)
    banned: dict[int, Int32Array] = field(default_factory=dict)  # token ids whose logit becomes -inf
    allowed: dict[int, Int32Array] = field(default_factory=dict)  # only these token ids may be sampled
    # Grammar masks: bit i % 32 of word i // 32 is set where token i may be sampled.
    masked_rows: Int32Array = field(default_factory=no_ids)  # [num_masked] rows that have a mask
    masks: Int32Array = field(default_factory=no_masks)  # [num_masked, ceil(vocab_size / 32)]


@dataclass(slots=True)
class Penalties:
    """Penalties of one row and the tokens they look at."""

    repetition: (
        float  # 1 is off; divides positive and multiplies negative logits of seen tokens (CTRL, arXiv 1909.05858)
    )
    presence: float  # subtracted once for a token in the output
    frequency: float  # subtracted once a count in the output
    prompt_ids: Int32Array
    output_ids: Int32Array


@dataclass(slots=True)
class StepBatch:
    """One step: prefill chunks and decode tokens of several sequences, concatenated.

    Sequence i owns the query tokens query_starts[i] : query_starts[i + 1]; they sit at the end of its context.
    """

    step: int
    token_ids: Int32Array  # [num_tokens]; -1 - r is the token that row r of the step before sampled
    positions: Int32Array  # [num_tokens]
    slot_mapping: Int32Array  # [num_tokens] block_id * page_size + offset where this token's K and V go
    query_starts: Int32Array  # [num_seqs + 1]
    context_lens: Int32Array  # [num_seqs] tokens in the KV cache once this step has written its own
    block_tables: Int32Array  # [num_seqs, max_num_blocks] padded with 0, the null block
    prompt_lens: Int32Array  # [num_seqs] length of the original prompt
    sample_seqs: Int32Array  # [num_samples] sequences whose last query token's logits are sampled
    pool_seqs: Int32Array  # [num_pooled] sequences whose last hidden state is returned (embedding)
    sampling: SamplingBatch
    # Log-probabilities of given tokens (of a prompt): after query token score_rows[i], how likely was score_targets[i].
    score_rows: Int32Array = field(default_factory=no_ids)  # [num_scores] rows of token_ids
    score_targets: Int32Array = field(default_factory=no_ids)  # [num_scores]
    num_score_logprobs: int = 0  # best alternatives wanted with each
    sampling_follows: bool = (
        False  # the sparse parts of `sampling` hang on the step before and come later, see LateStep
    )


@dataclass(slots=True)
class StepResult:
    """What a step produced, in the order of `sample_seqs` and `pool_seqs`."""

    token_ids: Int32Array  # [num_samples]
    finite: npt.NDArray[np.bool_]  # [num_samples] False where a logit was NaN or +inf: fail that request only
    logprobs: Float32Array | None = None  # [num_samples] of the sampled token; None when no row asked
    top_ids: Int32Array | None = None  # [num_samples, k] best first
    top_logprobs: Float32Array | None = None  # [num_samples, k]
    embeddings: Float32Array | None = None  # [num_pooled, hidden_size] after the final norm, unnormalised
    score_logprobs: Float32Array | None = None  # [num_scores]; NaN where a logit was not finite
    score_top_ids: Int32Array | None = None  # [num_scores, k] best first, ties by lowest id; None when k is 0
    score_top_logprobs: Float32Array | None = None  # [num_scores, k]
    seconds: float = 0.0  # time of the step on the device


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Block until the step is done. Raises DeviceError when it failed on the device."""


@runtime_checkable
class LateStep(Protocol):
    """The handle of a step that was submitted without what hangs on the tokens of the step before it.

    A device whose handles are such says so by an attribute `samples_late`: it runs the model meanwhile.
    """

    def supply(self, sampling: SamplingBatch) -> None:
        """The whole sampling of the step, so that its tokens can be drawn; once, before the next step is submitted and before
        the result is asked for. Raises DeviceError, DeviceMemoryError as `Device.submit` does.
        """


@runtime_checkable
class Device(Protocol):
    """A backend. One model is loaded once; steps run in submission order.

    What the device under it provides (memory, synchronisation, atomics, launches) is data: `capabilities_of` in
    capabilities.py. What cannot work is refused when the device is opened or the model loaded, by DeviceError. A device
    that computes inside `submit` says so by an attribute `computes_in_submit`: that time is then not the host's.
    """

    kind: str  # one of DEVICE_KINDS: what plans are made for

    def load(self, model: ModelSource, plan: Plan, progress: ProgressFn) -> None:
        """Take the memory the plan gives, read the weights, run a first step. Raises DeviceError, changing nothing, when
        it cannot, when a model is loaded already, when the plan is another kind's, or after `close`.
        """

    def submit(self, batch: StepBatch) -> StepHandle:
        """Queue one step. Nobody writes to the arrays of a batch, neither the caller nor the device: what is the same in
        two steps may be one array.

        Raises DeviceError without a model. A batch that does not fit raises it here or from `result`, writes nothing,
        and the next step runs. Results may be taken late and in any order.
        """

    def close(self) -> None:
        """Free everything. Safe to call twice; nothing works afterwards."""


@runtime_checkable
class PreparingDevice(Protocol):
    """A device that can serve before all is there that makes its steps quick."""

    # What the first steps can do without is left to `prepare`: set at the latest when `load` reports the phase of its first step.
    prepares_later: bool
    info: dict[str, Any]  # facts for display, which a part may change

    def prepare(self) -> bool:
        """Do one part of what `load` left, some milliseconds; True while more is left. No step may be under way: a part uses the
        buffers of the steps, and the newest step's tokens are lost to the next, so whoever refers to them must have them.

        Raises DeviceMemoryError when there is no memory for it: then no more is done, and steps run as before. Raises DeviceError.
        """


@runtime_checkable
class GroupingDevice(Protocol):
    """A device whose decode attention can let short sequences share the work of one program, where its plan has `short_groups`."""

    def group_rows(self, rows: int) -> None:
        """So many sequences a program in the decode steps submitted from now on, 1 for none that share; never more than the plan has
        for a batch. Changes no result. Waits for nothing, also with steps under way.
        """


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a device keeps one KV block; blocks pass only between devices of equal format and model."""

    kv_type: str  # "float16", "bfloat16", "float32"
    layout: str
    block_bytes: int


class BlockCopy(Protocol):
    """Blocks on their way between the device and rows of host memory."""

    @property
    def seconds(self) -> float:
        """What it took, once done."""

    def is_done(self) -> bool:
        """Whether it has ended; does not wait. Raises DeviceError when it failed."""


@runtime_checkable
class BlockDevice(Protocol):
    """A device that hands out and takes in KV blocks. Reads and writes come after every step submitted before them."""

    @property
    def block_format(self) -> BlockFormat:
        """The format, once a model is loaded."""

    def read_blocks(self, blocks: Int32Array) -> UInt8Array:
        """Contents of blocks, [num_blocks, block_bytes]. Raises DeviceError."""

    def write_blocks(self, blocks: Int32Array, data: UInt8Array) -> None:
        """Contents of blocks that no sequence uses, [num_blocks, block_bytes]. Raises DeviceError."""

    @property
    def max_num_copied_blocks(self) -> int:
        """The most that one `copy_out` or `copy_in` takes."""

    def new_rows(self, num_blocks: int) -> UInt8Array:
        """Host memory for blocks, [num_blocks, block_bytes], which the device copies from and to beside its steps.

        Raises DeviceError when there is not so much. May be called from another thread.
        """

    def copy_out(self, blocks: Int32Array, rows: Sequence[UInt8Array]) -> BlockCopy:
        """Copy blocks, as the steps submitted so far leave them, to rows of `new_rows`; nothing may write to them until it is done.

        One at a time: the one before must be done. Raises DeviceError.
        """

    def copy_in(self, rows: Sequence[UInt8Array], blocks: Int32Array) -> BlockCopy:
        """Copy rows of `new_rows` to blocks that no sequence uses; a step may use them once this is done.

        Several may be under way. Raises DeviceError.
        """


__all__ = [
    "BlockCopy",
    "BlockDevice",
    "BlockFormat",
    "Device",
    "DeviceError",
    "Float32Array",
    "GroupingDevice",
    "Int32Array",
    "LoadProgress",
    "ModelConfig",
    "Penalties",
    "PreparingDevice",
    "ProgressFn",
    "SamplingBatch",
    "StepBatch",
    "StepHandle",
    "StepResult",
    "UInt8Array",
    "no_ids",
    "no_masks",
]
