"""What a GPU leaves for after its load: who asks meanwhile gets the same tokens, and in the end everything is there."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.agent.device.apart import printed_by

from dragoman_agent.device.torch_runtime import TorchRuntime


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """In a process of its own: Triton's interpreter is chosen when its kernels are imported."""
    found: dict[str, Any] = json.loads(printed_by("left_for_later", OMP_NUM_THREADS="1"))
    return found


def test_requests_before_between_and_after_the_parts_get_the_same_tokens(shown: dict[str, Any]) -> None:
    whole, later = shown["whole"], shown["later"]
    assert len(whole["tokens"]) == 6 and all(len(ids) == 3 for ids in whole["tokens"].values())
    assert later["tokens"] == whole["tokens"]
    assert whole["parts"] == 0 and later["parts"] >= 4
    assert later["written"] == 0, "a part wrote to blocks that may be somebody's"


def test_the_load_leaves_what_first_steps_can_do_without(shown: dict[str, Any]) -> None:
    assert shown["at_load"] == {"graph_batch_sizes": [1, 4], "mixed_graph_tokens": [], "decode_steps": []}
    assert shown["told"] == [2 + 5, 2 + 2], "progress ends at what is done"
    whole, later = shown["info"]
    for info in (whole, later):
        assert info["graph_batch_sizes"] == [1, 2, 4] and info["mixed_graph_tokens"] == [4, 12]
        assert [step[:2] for step in info["decode_steps"]] == [[4, 40]] and info["decode_steps"][0][2] > 0
        assert info["mixed_step_seconds"] > 0


def test_a_part_that_cannot_be_done_says_so_and_steps_run_on(shown: dict[str, Any]) -> None:
    waiting, memory, *rest = shown["refused"]
    assert waiting == "Nothing can be prepared while a step waits for its sampling."
    assert memory.startswith("the GPU has no memory left for 1 graphs of decode and 2 of steps with prompts, so such")
    assert "--memory-utilization" in memory and memory.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert rest == ["taken: True", "same: True", "more: False"]


@pytest.mark.parametrize(("kind", "mode"), [("cuda", {"capture_error_mode": "thread_local"}), ("xpu", {})])
def test_a_capture_bears_other_threads_and_collects_no_garbage(kind: str, mode: dict[str, str]) -> None:
    seen: list[Any] = []
    graph = SimpleNamespace(
        capture_begin=lambda **options: seen.append(options), capture_end=lambda: seen.append("end")
    )
    namespace = SimpleNamespace(stream=nullcontext)
    runtime = TorchRuntime(kind, torch.device("cpu"), namespace, lambda: graph, ())

    def fail() -> None:
        raise RuntimeError("broken off")

    stream: Any = None
    assert runtime.capture(stream, gc.isenabled, "pool")[1] is False and gc.isenabled()
    with pytest.raises(RuntimeError, match="broken off"):
        runtime.capture(stream, fail, None)
    assert gc.isenabled() and seen == [{"pool": "pool", **mode}, "end", mode, "end"]
