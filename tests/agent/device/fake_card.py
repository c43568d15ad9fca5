"""The GPU backend on tensors that say they lie on a card and have no contents: what would wait for the card, or lie elsewhere. Run by
test_fake_card.py.

python -m tests.agent.device.fake_card      JSON: the calls that wait by plan or fault and by step; what is refused by fault

Torch's fake tensors refuse what mixes devices, views that do not lie on their type's size, and every call whose result or size
hangs on contents, such as `nonzero` and `item`. Triton's kernels are not launched; where their tensors lie is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.agent.device.conformance.host_runtime import HostRuntime
from tests.agent.device.conformance.steps import Part, step_of
from tests.agent.device.conformance.subjects import deterministic_plan, gpu_plan
from tests.agent.device.conformance.tiny_model import CONFIG, TinyModel
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from dragoman_agent.device.base import DeviceError, Penalties, StepBatch, StepResult
from dragoman_agent.device.cuda import CudaDevice
from dragoman_agent.device.cuda_fixed import FixedOps
from dragoman_agent.device.torch_runtime import Stream
from dragoman_agent.device.torch_steps import TorchStepHandle
from dragoman_agent.engine import packed_copy
from dragoman_agent.model.llama import LlamaWeights, assemble
from dragoman_agent.model.registry import needed_tensors
from dragoman_agent.pal.plan import DecodeList, Plan, ShortGroups

_TYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.uint8: np.uint8}
_QUESTIONS = (DataDependentOutputException, DynamicOutputShapeException)
_COPIES = ("copy_", "_to_copy", "to")


class Graph:
    """Nothing is computed again."""

    def replay(self) -> None:
        """As it was captured."""

    def pool(self) -> None:
        """Nothing is shared."""


class CardRuntime(HostRuntime):
    """Implements Runtime: a card that is not there."""

    device = torch.device("cuda", 0)

    def capture(self, stream: Stream, work: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        return Graph(), work()

    def pinned(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """With an array beside it, since it has no contents."""
        tensor, array = torch.zeros(size, dtype=dtype), np.zeros(size, _TYPES[dtype])
        tensor.numpy = lambda: array  # type: ignore[method-assign, assignment, misc]
        return tensor


class CardDevice(CudaDevice):
    """The backend with weights that nobody read."""

    def __init__(self) -> None:
        super().__init__(0, CardRuntime())

    def _read_weights(self, *_: Any) -> LlamaWeights:
        shapes = needed_tensors(CONFIG)

        def weight(name: str) -> torch.Tensor | None:
            return torch.empty(shapes[name], dtype=self.dtype, device=self._device) if name in shapes else None

        return assemble(CONFIG, weight)


class Waits(TorchDispatchMode):
    """The copies that the host waits for, and calls that copy a tensor of the host's by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [one for one in tree_leaves((args, kwargs, made)) if isinstance(one, torch.Tensor) and one.dim()]
        if len({one.device.type for one in tensors}) > 1:
            given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            if name not in _COPIES or not (given | (kwargs or {})).get("non_blocking"):
                self.names.append(name)
        return made


def note_launch(kernel: Any, *arguments: Any, **options: Any) -> None:
    """In place of a launch."""
    for one in (*arguments, *options.values()):
        if isinstance(one, torch.Tensor) and one.device.type != "cuda":
            raise AssertionError(f"{kernel.fn.__name__} is given a tensor on {one.device}")


def steps(plan: Plan) -> dict[str, tuple[StepBatch, StepBatch | None]]:
    """Steps by name; with each the step whose sampling follows, if it does."""
    page, ids = plan.page_size, np.array([3, 4], np.int32)
    shapes = {
        "decode": [Part([5], 3, [1]), Part([6], 3, [2])],
        "mixed": [Part([5], 3, [1]), Part(list(range(1, 6)), 0, [3, 4])],
        "long": [Part([5], 3, [1]), Part(list(range(1, 23)), 0, [3, 4])],  # longer than any graph
    }
    edits: dict[str, Any] = {
        "penalties": {0: Penalties(1.3, 0.2, 0.1, ids, ids)}, "logit_bias": {0: (ids, np.ones(2, np.float32))},
        "banned": {1: ids}, "allowed": {1: np.arange(20, dtype=np.int32)},
        "masked_rows": np.array([1], np.int32), "masks": np.full((1, 3), -1, np.int32),
    }  # fmt: skip
    made: dict[str, tuple[StepBatch, StepBatch | None]] = {}
    for name, parts in shapes.items():
        plain, coming = step_of(parts, page), step_of(parts, page, temperatures=0.7)
        coming.token_ids[0] = -1
        drawn = {"temperatures": 0.8, "top_ks": 8, "top_ps": 0.95, "min_ps": 0.01}
        made |= {
            name: (plain, None),
            f"{name} of coming tokens": (coming, None),
            f"{name} with filters": (step_of(parts, page, num_logprobs=2, **drawn), None),
            f"{name} with edits": (step_of(parts, page, **drawn, **edits), None),
            f"{name} sampled late": (replace(plain, sampling_follows=True), step_of(parts, page, **drawn, **edits)),
            f"{name} with top-p alone": (step_of(parts, page, temperatures=0.8, top_ps=0.9), None),
        }
    pooled = [replace(part, sampled=False) for part in shapes["mixed"]]
    scored = step_of(shapes["mixed"], page)
    scored.score_rows, scored.score_targets = np.arange(1, 6, dtype=np.int32), np.ones(5, np.int32)
    scored.num_score_logprobs = 2
    return {**made, "pooled": (step_of(pooled, page, pool=[1]), None), "scored": (scored, None)}


def waits_of(device: CardDevice, step: StepBatch, late: StepBatch | None) -> list[str]:
    """What the host waits for while it hands a step over."""
    with Waits() as waits:
        device.group_rows(3 - device._group_words._wanted)  # one or two: another word in each step that decodes
        handle = device.submit(step)
        if late is not None:
            handle.supply(late.sampling)
    handle.result()
    return waits.names


def copies_of(device: CardDevice) -> list[str]:
    """What the host waits for while KV blocks leave the card and come back."""
    rows, blocks = list(device.new_rows(3)), np.array([1, 5, 2], np.int32)
    with Waits() as waits:
        device.copy_out(blocks, rows)
        device.copy_in(rows, blocks)
    return waits.names


def spoil(device: CardDevice, fault: str) -> None:
    """One of the faults that are to be noticed."""
    head, mixed = device._packed_heads.of, device._mixed_step
    if fault == "pageable":
        copied = torch.zeros(len(device._packed), dtype=torch.int32)
        device._packed_heads.of = lambda num: (device._packed.copy_(copied), head(num))[1]  # type: ignore[method-assign]
    elif fault == "index":
        rows = torch.zeros(1, dtype=torch.int64)
        device._mixed_step = lambda *given: (device._results[:, rows], mixed(*given))[1]  # type: ignore[method-assign]
    elif fault == "item":
        device._mixed_step = lambda *given: (float(device._results.sum()), mixed(*given))[1]  # type: ignore[method-assign]
    elif fault == "elsewhere":
        device._mixed_graphs.sizes.clear()  # graphs have taken their place already
        device._sampled_ids = torch.zeros(4, dtype=torch.int32)


def calls_of(device: CardDevice, step: StepBatch, late: StepBatch | None) -> list[str]:
    """What the host waits for while it hands a step over, the call that ends it where its contents are asked for."""
    try:
        return waits_of(device, step, late)
    except (DeviceError, *_QUESTIONS) as error:
        cause = error.__cause__ or error
        if not isinstance(cause, _QUESTIONS):
            raise
        return [str(cause.func)]


def look_at(plan: Plan, fault: str = "") -> dict[str, list[str]]:
    """The calls that wait, by step of `plan`; those of the first kind of step alone under a fault."""
    device = CardDevice()
    device.load(TinyModel(), plan, lambda _: None)
    with torch.inference_mode():
        spoil(device, fault)
    found = {}
    for name, (step, late) in steps(plan).items():
        if not fault or name in ("decode", "mixed", "mixed of coming tokens"):
            found[name] = calls_of(device, step, late)
    if not fault:
        found["blocks"] = copies_of(device)
    device.close()
    return found


def main() -> None:
    """Every step of five plans, then the faults."""
    plan = gpu_plan("cuda")
    plans = {
        "planned": plan, "dependent": replace(plan, dependent_max_batch=2), "deterministic": deterministic_plan("cuda"),
        "grouped": replace(plan, short_groups=(ShortGroups(2, 4, 2, 20, 2e-6, 1e-6),)),
        "listed": replace(plan, decode_lists=(DecodeList(2, 4, 9, 1),)),
    }  # fmt: skip
    JITFunction.run = note_launch
    FixedOps.check_tiles = lambda *_: None  # type: ignore[method-assign] # there are no bits to compare
    packed_copy.pack = lambda *_: None
    given = (
        torch.from_numpy
    )  # what it makes where nothing is recorded cannot be made a fake one later; the angles are computed with
    torch.from_numpy = lambda array: given(array) if array.dtype == np.float64 else torch.empty_like(given(array))
    # What it reads has no contents.
    TorchStepHandle._read = lambda self: StepResult(  # type: ignore[method-assign]
        np.zeros(self._num_rows, np.int32), np.ones(self._num_rows, np.bool_), seconds=1e-3
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        found: dict[str, Any] = {name: look_at(one) for name, one in plans.items()}
        found |= {fault: look_at(plan, fault) for fault in ("pageable", "index", "item")}
        try:
            found["elsewhere"] = look_at(plan, "elsewhere")
        except AssertionError as error:
            found["elsewhere"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
