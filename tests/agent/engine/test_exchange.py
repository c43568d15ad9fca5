"""Cached blocks that pass between two engines: same tokens as if computed there, same hashes, nothing leaked."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest

from dragoman.prefix_hash import prefix_hashes, root_hash
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine.exchange import BlockExchange
from dragoman_agent.engine.frames import decode, encode
from dragoman_agent.engine.messages import (
    BlocksExported,
    BlocksImported,
    BlocksUsed,
    CachedBlock,
    ExportBlocks,
    Finished,
    ImportBlocks,
    Sampling,
    Start,
    Stop,
)

PROMPT = [1 + index % 250 for index in range(200)]  # 3 units, 12 pages of 16 and a rest
UNITS = [unit[:8] for unit in prefix_hashes(root_hash(bytes.fromhex(NullModel().digest)), PROMPT)]


@pytest.fixture
def lab_of(lab: Any) -> Any:
    """Builds engines with pages of 16 tokens, four of which make a unit."""
    return lambda **plan: lab(**{"page_size": 16, **plan})


def start(request_id: str, prompt: list[int] | None = None) -> Start:
    return Start(
        request_id,
        PROMPT if prompt is None else prompt,
        Sampling(temperature=0),
        Stop(max_output_tokens=8),
        credit=1000,
    )


def exchange(lab: Any) -> BlockExchange:
    made = lab.core.exchange
    assert isinstance(made, BlockExchange)
    return made


def answers(lab: Any, *commands: ExportBlocks | ImportBlocks) -> list[Any]:
    for command in commands:
        exchange(lab).receive(command)
    taken, exchange(lab).answers = exchange(lab).answers, []
    return taken


def exported(lab: Any, units: list[bytes] = UNITS, max_num_blocks: int = 100, first: int = 0) -> BlocksExported:
    (answer,) = answers(lab, ExportBlocks("x", units, first=first, max_num_blocks=max_num_blocks))
    assert isinstance(answer, BlocksExported)
    return answer


def outcome(lab: Any, command: Start) -> tuple[list[int], int]:
    events = lab.run(command)
    (finished,) = [event for event in events if isinstance(event, Finished)]
    tokens = [token for event in events if hasattr(event, "token_ids") for token in event.token_ids]
    return tokens, finished.cached_tokens


def test_a_prefix_from_another_engine_gives_the_same_tokens(lab_of: Any) -> None:
    source, target = lab_of(), lab_of()
    expected, _ = outcome(source, start("a"))
    blocks = exported(source).blocks
    assert len(blocks) == 12 and [unit[:8] for block in blocks for unit in block.units] == UNITS
    assert blocks[0].parent == b"" and all(b.parent == a.digest for a, b in itertools.pairwise(blocks))
    before = target.core.scheduler.pool.num_free
    assert answers(target, ImportBlocks("x", blocks)) == [BlocksImported("x", 12, 0)]
    assert target.core.scheduler.pool.num_free == before, "what came in is cached and idle, not taken"
    stored = [unit for step in [target.core.tick()] for unit in step.stored_hashes]
    assert sorted(stored) == sorted(UNITS)
    got, cached = outcome(target, start("b"))
    assert got == expected and cached == 192
    assert answers(target) == [BlocksUsed("x")]
    assert outcome(target, start("c"))[0] == expected and answers(target) == [], "said once"
    target.assert_idle()


@pytest.mark.parametrize("page_size", [64, 128])
def test_pages_of_a_unit_and_more(lab: Any, page_size: int) -> None:
    source, target = lab(page_size=page_size), lab(page_size=page_size)
    expected, _ = outcome(source, start("a"))
    answers(target, ImportBlocks("x", exported(source).blocks))
    assert outcome(target, start("b")) == (expected, 192 // page_size * page_size)


def test_a_block_with_other_contents_shows(lab_of: Any) -> None:
    """The null device's tokens depend on every block, so that the test above proves something."""
    source, target = lab_of(), lab_of()
    expected, _ = outcome(source, start("a"))
    blocks = exported(source).blocks
    blocks[5].data = bytes(len(blocks[5].data))
    answers(target, ImportBlocks("x", blocks))
    assert outcome(target, start("b"))[0] != expected


def test_parts_are_read_one_by_one(lab_of: Any) -> None:
    lab = lab_of()
    outcome(lab, start("a"))
    whole = exported(lab)
    parts = [exported(lab, max_num_blocks=5, first=first) for first in (0, 5, 10, 15)]
    assert [len(part.blocks) for part in parts] == [5, 5, 2, 0] and {part.num_cached for part in parts} == {12}
    assert [block for part in parts for block in part.blocks] == whole.blocks
    by_digest = answers(lab, ExportBlocks("y", digests=[b.digest for b in whole.blocks[:3]], max_num_blocks=9))
    assert by_digest == [BlocksExported("y", whole.blocks[:3], 3)]


def test_what_is_not_cached_is_not_sent(lab_of: Any) -> None:
    lab = lab_of()
    outcome(lab, start("a", PROMPT[:130]))  # two units
    assert len(exported(lab).blocks) == 8
    assert exported(lab, [b"nothing!"]) == BlocksExported("x", [], 0)
    lab.core.scheduler.pool.evict(1000)
    assert exported(lab) == BlocksExported("x", [], 0)


def test_blocks_that_do_not_continue_what_is_cached_are_not_taken(lab_of: Any) -> None:
    source, target = lab_of(), lab_of()
    outcome(source, start("a"))
    blocks = exported(source).blocks
    assert answers(target, ImportBlocks("x", blocks[3:])) == [BlocksImported("x", 0, 0)]
    assert answers(target, ImportBlocks("x", blocks[:2])) == [BlocksImported("x", 2, 0)]
    assert answers(target, ImportBlocks("x", blocks[:4])) == [BlocksImported("x", 2, 2)]
    short = CachedBlock(blocks[4].digest, blocks[4].parent, [], b"short")
    assert answers(target, ImportBlocks("x", [short, *blocks[5:]])) == [BlocksImported("x", 0, 0)]
    assert target.core.scheduler.pool.num_cached == 4
    target.assert_idle()


def test_the_sequences_keep_their_room(lab_of: Any) -> None:
    source, target = lab_of(), lab_of(num_blocks=12, max_num_seqs=4)  # 11 blocks, of which 4 are reserved
    outcome(source, start("a"))
    (answer,) = answers(target, ImportBlocks("x", exported(source).blocks))
    assert answer == BlocksImported("x", 7, 0)
    assert outcome(target, start("b", PROMPT[:100]))[1] == 96
    target.assert_idle()


def test_what_was_evicted_before_its_use_is_not_counted_as_used(lab_of: Any) -> None:
    source, target = lab_of(), lab_of()
    outcome(source, start("a"))
    answers(target, ImportBlocks("x", exported(source).blocks))
    target.core.scheduler.pool.evict(1000)
    outcome(target, start("b"))
    outcome(target, start("c"))
    assert answers(target) == []


@pytest.mark.parametrize(
    "message",
    [
        ExportBlocks("x", [b"12345678"], [b"d" * 32], 3, 4),
        ImportBlocks("x", [CachedBlock(b"d" * 32, b"", [b"u" * 32], struct.pack("<Q", 7))]),
        BlocksExported("x", [CachedBlock(b"d" * 32, b"p" * 32, [], b"")], 9),
        BlocksImported("x", 1, 2),
        BlocksUsed("x"),
    ],
)
def test_frames_survive_the_socket(message: Any) -> None:
    assert decode(encode(message)[4:]) == message
