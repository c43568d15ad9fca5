"""The GPU backend's code under Triton's interpreter, its decode attention in groups whose size changes between replays. Run by
test_cuda_groups.py.

Prints JSON: the logits of each decode step as bytes, by the rows a program that were asked for, and the words that kernels read.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported

from tests.agent.device.conformance.host_runtime import InterpretedDevice
from tests.agent.device.conformance.steps import Part, step_of
from tests.agent.device.conformance.subjects import TinyModel, interpreted_subject

from dragoman_agent.device import cuda_ops
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.messages import Tune
from dragoman_agent.pal.plan import ShortGroups
from dragoman_text import TextTokenizer
from dragoman_text.tokenizer import byte_tokenizer_files

PLAN = replace(
    interpreted_subject().plan,
    mixed_graph_tokens=(),
    chunk_graph=False,
    short_groups=(ShortGroups(2, 2, 2, 20, 2e-6, 1e-6), ShortGroups(4, 4, 4, 20, 2e-6, 1e-6)),
)
ASKED = (1, 2, 4, 9, 1)
_attend = cuda_ops.paged_decode_attention
_words: list[int | None] = []  # that kernels were launched with


def noting(*arguments: Any, **options: Any) -> Any:
    """In place of the launch; replays of graphs launch again here."""
    word = options.get("group_rows")
    _words.append(None if word is None else int(word[0]))
    return _attend(*arguments, **options)


def opened(groups: bool) -> InterpretedDevice:
    device = InterpretedDevice()
    device.load(TinyModel(), PLAN if groups else replace(PLAN, short_groups=()), lambda _: None)
    return device


def prompts(device: InterpretedDevice) -> None:
    """Four sequences of 3 to 18 tokens, the last over two pages."""
    for row, count in enumerate((3, 7, 12, 18)):
        device.submit(
            step_of([Part(list(range(1, count + 1)), 0, [1 + 2 * row, 2 + 2 * row])], PLAN.page_size)
        ).result()


def decoded(device: InterpretedDevice, num_seqs: int) -> str:
    """The logits of a decode step of the first sequences, always the same one."""
    parts = [Part([5 + row], count, [1 + 2 * row, 2 + 2 * row]) for row, count in enumerate((3, 7, 12, 18)[:num_seqs])]
    device.submit(step_of(parts, PLAN.page_size)).result()
    logits = device.last_logits()[:num_seqs]
    assert bool(logits.isfinite().all())
    return logits.numpy().tobytes().hex()


def main() -> None:
    """A device whose plan has no groups, then one that is asked for several numbers of rows by the engine's own message."""
    cuda_ops.paged_decode_attention = noting
    plain = opened(groups=False)
    prompts(plain)
    found: dict[str, Any] = {
        "plain": {num: decoded(plain, num) for num in (2, 3, 4)},
        "plain_words": sorted({str(one) for one in _words}),
    }
    device = opened(groups=True)
    prompts(device)
    core = EngineCore(device, TextTokenizer.from_files(byte_tokenizer_files()), b"0" * 32, PLAN, vocab_size=96)
    found["grouped"], found["words"] = [], []
    for rows in ASKED:
        core.receive(Tune(24, 4, 23, attention_rows=rows))
        step: dict[int, str] = {}
        words: dict[int, list[int | None]] = {}
        for num in (2, 3, 4):
            _words.clear()
            step[num] = decoded(device, num)
            words[num] = sorted({one for one in _words if one is not None})
        found["grouped"].append(step)
        found["words"].append(words)
    _words.clear()
    device.submit(step_of([Part([5], 3, [1, 2]), Part([6, 7], 7, [3, 4])], PLAN.page_size)).result()
    found["beside prompts"] = [word for word in _words if word is not None]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
