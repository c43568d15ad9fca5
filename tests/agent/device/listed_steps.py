"""The GPU backend's code under Triton's interpreter, its decode steps cut by work lists. Run by test_cuda_lists.py.

Prints JSON: of each step the lists that were made and read, with how many layers read each, and how far its logits are from those
of a plan without lists.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

from tests.agent.device.conformance import tiny_model
from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.steps import Part, step_of
from tests.agent.device.conformance.subjects import TinyModel, interpreted_listed_subject

from dragoman_agent.device import cuda_ops
from dragoman_kernels.triton.attention_list import DecodeItems

tiny_model.CONFIG = replace(tiny_model.CONFIG, num_layers=2)  # one list serves both
PLAN = replace(interpreted_listed_subject().plan, chunk_graph=False)  # so that long prompts are in no graph
LENS = (3, 40, 12, 18)
_attend = cuda_ops.listed_decode_attention
_made: list[int] = []  # lists, by the number of sequences
_read: list[list[list[int]]] = []  # what attention was launched with


class Counting(DecodeItems):
    """Notes each list that is made."""

    def make(self, context_lens: Any, cut: Any, **options: Any) -> None:
        """See DecodeItems."""
        _made.append(len(context_lens))
        super().make(context_lens, cut, **options)


def noting(*arguments: Any, **options: Any) -> Any:
    """In place of the launch; replays of graphs launch again here."""
    items, cut = arguments[5], arguments[6]
    out = _attend(*arguments, **options)
    assert not items.arrived.any(), "the next layer would merge too early"
    _read.append([row[:6] for row in items.rows[: cut.num_items].tolist() if row[0] >= 0])
    return out


def opened(listed: bool) -> InterpretedDevice:
    device = InterpretedDevice()
    device.load(TinyModel(), PLAN if listed else replace(PLAN, decode_lists=()), lambda _: None)
    for row, count in enumerate(LENS):
        for start in range(0, count, 16):
            tokens = list(range(start + 1, min(start + 16, count) + 1))
            device.submit(step_of([Part(tokens, start, pages(row))], PLAN.page_size)).result()
    return device


def pages(row: int) -> list[int]:
    return [1 + 3 * row + nth for nth in range(3)]


def steps() -> dict[str, list[Part]]:
    """Decode of two, of three in the graph of four, of four with other lengths; a sequence beside a prompt, in a graph and not."""
    decode = [Part([5 + row], LENS[row], pages(row)) for row in range(4)]
    return {
        "two": decode[:2],
        "three": decode[:3],
        "four": [Part([9], 10, pages(1)), Part([9], 11, pages(2)), Part([9], 17, pages(3)), Part([9], 2, pages(0))],
        "beside a short prompt": [decode[1], Part([6, 7], 0, [14, 15])],
        "beside a long prompt": [decode[1], Part(list(range(1, 21)), 0, [14, 15])],
    }


def main() -> None:
    """The same steps by both."""
    cuda_ops.listed_decode_attention = noting
    from dragoman_agent.device import cuda_make

    cuda_make.DecodeItems = Counting  # type: ignore[misc]
    plain, device = opened(listed=False), opened(listed=True)
    found: dict[str, Any] = {"num_layers": TinyModel().config.num_layers}
    for name, parts in steps().items():
        _made.clear()
        _read.clear()
        logits = []
        for one in (plain, device):
            one.submit(step_of(parts, PLAN.page_size)).result()
            logits.append(one.last_logits()[: len(parts)].clone())
        assert bool(logits[0].isfinite().all())
        found[name] = {
            "made": list(_made), "reads": len(_read), "rows": _read[0] if _read else [],
            "same": all(rows == _read[0] for rows in _read), "off": float((logits[0] - logits[1]).abs().max()),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
