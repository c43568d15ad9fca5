"""Frames: every part survives, whatever was packed before."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest

from dragoman_agent.engine import frames
from dragoman_agent.engine.frames import FrameDecoder, ProtocolError, decode, encode
from dragoman_agent.engine.messages import (
    CachedBlock,
    Delta,
    Embedded,
    Finished,
    GrammarSpec,
    ImportBlocks,
    Load,
    LogprobEntry,
    Sampling,
    Start,
    Step,
    Stop,
)

LOAD = Load(*range(9))
STEP = Step(
    7,
    [
        Delta("a", 1, 4, [5], "x", [LogprobEntry(5, -0.5)], "stop", "x", None),
        Finished("a", 1, 2, 3, 0.1, 0.2, 0.3, True),
        Embedded("e", bytes(range(8))),
    ],
    LOAD,
    0.25,
    0.125,
    [b"12345678"],
    keys=np.array([0, 3, -1], "<i4").tobytes(),
    token_ids=np.array([65, 1 << 20, 0], "<i4").tobytes(),
)
NESTED = Start(
    "a", [1, 2], Sampling(grammar=GrammarSpec("regex", "a+"), logit_bias={3: 0.5}), Stop(5, strings=["x"]), key=9
)


@pytest.mark.parametrize(
    "message", [STEP, NESTED, ImportBlocks("x", [CachedBlock(b"d" * 32, b"", [b"u" * 32], b"data")])]
)
def test_a_message_with_others_in_it_survives(message: Any) -> None:
    assert decode(encode(message)[4:]) == message
    both = encode(message) + encode(STEP)
    decoder = FrameDecoder()
    assert [*decoder.feed(both[:9]), *decoder.feed(both[9:])] == [message, STEP]


def test_what_could_not_be_packed_leaves_nothing_behind() -> None:
    wrong: Any = Step(1, [Delta("a", 0, 0, [object()], "")], LOAD, 0.0, 0.0)  # type: ignore[list-item]
    with pytest.raises(KeyError):
        encode(wrong)
    assert decode(encode(NESTED)[4:]) == NESTED and decode(encode(STEP)[4:]) == STEP


def test_a_large_frame_does_not_keep_its_buffer() -> None:
    large = ImportBlocks("x", [CachedBlock(b"d" * 32, b"", [], bytes(frames._KEPT_BYTES + 1))])
    assert len(encode(large)) > frames._KEPT_BYTES
    assert not frames._PACKERS.by_depth
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(ImportBlocks("x", [CachedBlock(b"", b"", [], bytes(frames.MAX_FRAME_BYTES))]))
    assert decode(encode(STEP)[4:]) == STEP


@pytest.mark.parametrize(
    "body", [7, {}, [], [999], ["Step"], [None], [frames._CODES[Load], 1], [frames._CODES[Step], 1]]
)
def test_what_is_no_message_is_refused(body: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(body))


def test_a_step_is_one_level() -> None:
    """An extension for its load, or for each event, took the engine longer than all else in the frame."""
    plain = dataclasses.replace(STEP, events=STEP.events[1:])
    assert isinstance(msgpack.unpackb(encode(plain)[4:], ext_hook=lambda *_: pytest.fail("an extension")), list)
