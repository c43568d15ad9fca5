"""Texts made in the rpc process: random workloads through engine and client, against an independent decoding of all ids."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan
from dragoman_agent.engine.frames import FrameDecoder, encode
from dragoman_agent.engine.local import build_core
from dragoman_agent.engine.messages import Delta, Failed, Finished, Sampling, Start, Step, Stop
from dragoman_agent.rpc import text_streams
from dragoman_agent.rpc.engine_client import EngineClient, Event
from dragoman_agent.rpc.text_streams import TextStreams
from dragoman_text import TextTokenizer

EOS = 258
VOCAB_SIZE = 262  # the model's logits are wider than the tokenizer's 259 ids
SPECIAL = {256: "<|bos|>", 257: "<|im_start|>", 258: "<|im_end|>"}
MODEL = NullModel()
MODEL.config = dataclasses.replace(MODEL.config, vocab_size=VOCAB_SIZE)
TOKENIZER = TextTokenizer.from_files(MODEL.tokenizer)


class Answer:
    """What one request got; asserts that cursors have no gap."""

    def __init__(self, start: Start) -> None:
        self.start = start
        given = start.delivered or [[] for _ in range(start.num_choices)]
        self.ids = [list(ids) for ids in given]
        self.pieces: list[list[str]] = [[] for _ in range(start.num_choices)]
        self.last: list[Delta | None] = [None] * start.num_choices
        self.end: Event | None = None

    def deliver(self, event: Event) -> None:
        assert self.end is None, "an event after the terminal one"
        if isinstance(event, Delta):
            assert event.cursor == len(self.ids[event.choice]), "cursors must be contiguous"
            self.ids[event.choice].extend(event.token_ids)
            self.pieces[event.choice].append(event.text)
            self.last[event.choice] = event if event.finish else self.last[event.choice]
        else:
            self.end = event

    def text(self, choice: int) -> str:
        return "".join(self.pieces[choice])


class Pair:
    """Client and engine in one thread, with frames encoded between them as the sockets carry them."""

    def __init__(self, **plan: Any) -> None:
        made = default_null_plan(MODEL, **{"num_blocks": 64, "max_num_seqs": 8, "max_batch_tokens": 128, **plan})
        device = NullDevice("hash")
        device.load(MODEL, made, lambda progress: None)
        self.core = build_core(device, MODEL, made)
        self.client = EngineClient(self, self, TOKENIZER)  # type: ignore[arg-type]
        self.client._connection_made(self)  # type: ignore[arg-type]
        self._decoder = FrameDecoder()
        self.num_columns = 0

    def forget_socket(self) -> None:
        """See EngineProcess."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        for command in self._decoder.feed(data):
            self.core.receive(command)  # type: ignore[arg-type]

    def submit(self, start: Start) -> Answer:
        answer = Answer(start)
        self.client.submit(start, answer, lambda event, count: None)
        return answer

    async def turn(self) -> None:
        await asyncio.sleep(0)  # commands leave at the end of the loop's turn
        self.core.turn(self._send)

    def _send(self, step: Step) -> None:
        self.num_columns += len(step.keys) // 4
        self.client._data_received(encode(step))

    async def run(self) -> None:
        while self.client.live:
            await self.turn()
        assert not self.client._table._texts.by_key, "a stream outlived its request"


def independent_text(ids: list[int], *, skip_special: bool) -> str:
    """All ids decoded at once, by rules written down here."""
    data = b""
    for token_id in ids:
        if token_id < 256:
            data += bytes([token_id])
        elif token_id in SPECIAL and not skip_special:
            data += TOKENIZER.token_bytes(token_id)
    return data.decode("utf-8", "replace")


def workload(rng: random.Random, count: int) -> list[Start]:
    starts = []
    for index in range(count):
        stop = Stop(
            max_output_tokens=rng.randrange(1, 60),
            min_output_tokens=rng.choice([0, 0, 3]),
            strings=rng.choice([[], [], [], ["e", "th"]]),
            stop_token_ids=rng.choice([[], [ord("q"), 200]]),
            eos_token_ids=rng.choice([[], [EOS]]),
        )
        sampling = Sampling(
            temperature=1.0, seed=rng.randrange(1 << 60), num_logprobs=rng.choice([-1, -1, -1, 0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            allowed_token_ids=rng.choice([[], [*b"\xc3\xa9\xf0\x9f\x99\x82", 257, 260, EOS]]),
        )  # fmt: skip
        starts.append(
            Start(
                f"r{index}", [rng.randrange(256) for _ in range(rng.randrange(1, 40))], sampling, stop,
                num_choices=rng.choice([1, 1, 2, 3]), credit=rng.choice([5, 1 << 20]),
                skip_special_tokens=rng.choice([True, False]),
            )
        )  # fmt: skip
    return starts


async def play(starts: list[Start], seed: int) -> tuple[Pair, list[Answer], set[str]]:
    """Run it with late grants and random cancels; the answers and who was cancelled."""
    rng = random.Random(seed)
    pair = Pair()
    answers = [pair.submit(dataclasses.replace(start)) for start in starts[: len(starts) // 2]]
    pending = starts[len(starts) // 2 :]
    cancelled: set[str] = set()
    while pair.client.live or pending:
        if pending and rng.random() < 0.3:
            answers.append(pair.submit(dataclasses.replace(pending.pop(0))))
        for answer in answers:
            request_id = answer.start.request_id
            if answer.end is not None:
                continue
            if answer.start.credit == 5 and rng.random() < 0.2:
                pair.client.grant(request_id, min(map(len, answer.ids)) + 20)
            if int(request_id[1:]) % 4 == 0 and rng.random() < 0.03:
                pair.client.cancel(request_id)
                cancelled.add(request_id)
        await pair.turn()
    await pair.run()
    return pair, answers, cancelled


def check(answer: Answer) -> None:
    """The whole text is that of all ids, without a stop token's and from the stop string on."""
    start = answer.start
    assert isinstance(answer.end, Finished)
    assert answer.end.output_tokens == sum(map(len, answer.ids))
    for choice in range(start.num_choices):
        last, ids = answer.last[choice], answer.ids[choice]
        if last is None:
            continue  # finished before a resume
        shown = ids[:-1] if last.stop_token_id is not None else ids
        text = independent_text(shown, skip_special=start.skip_special_tokens)
        if last.stop_string is not None:
            text = text[: text.index(last.stop_string)]
        done = len(start.delivered[choice]) if start.delivered else 0
        if not done:
            assert answer.text(choice) == text, (start.request_id, choice, last.finish)
        else:
            assert text.endswith(answer.text(choice))
        if last.finish == "length":
            assert len(ids) == start.stop.max_output_tokens


@pytest.mark.parametrize("seed", range(6))
async def test_texts_are_those_of_all_ids_and_of_the_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = workload(random.Random(seed), 16)
    pair, answers, cancelled = await play(starts, seed)
    assert pair.num_columns > 0
    for answer in answers:
        check(answer)
    monkeypatch.setattr(Start, "is_plain", property(lambda self: False))
    other, expected, others_cancelled = await play(starts, seed)
    assert other.num_columns == 0
    for got, want in zip(answers, expected, strict=True):
        assert got.start.request_id == want.start.request_id
        if got.start.request_id in cancelled | others_cancelled:
            continue
        assert (got.ids, got.pieces) == (want.ids, want.pieces)
        assert [(d.finish, d.stop_string, d.stop_token_id) for d in got.last if d] == [
            (d.finish, d.stop_string, d.stop_token_id) for d in want.last if d
        ]


@pytest.mark.parametrize("seed", range(3))
async def test_a_resumed_stream_goes_on_with_the_same_pieces(seed: int) -> None:
    """Cut after any number of tokens, in the middle of a character too."""
    sampling = Sampling(temperature=1.0, seed=seed, allowed_token_ids=[*b"\xc3\xa9\xf0\x9f\x99\x82", 257, 260])
    whole = Start("w", [1, 2, 3], sampling, Stop(max_output_tokens=24), num_choices=2, credit=1 << 20)
    pair = Pair()
    first = pair.submit(dataclasses.replace(whole))
    await pair.run()
    check(first)
    for cut in range(25):
        delivered = [first.ids[0][:cut], first.ids[1][: max(0, cut - 3)]]
        rest = pair.submit(dataclasses.replace(whole, request_id=f"c{cut}", delivered=delivered))
        await pair.run()
        assert rest.ids == first.ids
        for choice in range(2):
            done = len(delivered[choice])
            if done < 24:
                assert rest.pieces[choice] == first.pieces[choice][done:], (cut, choice)
            else:
                assert rest.pieces[choice] == [""], "its end came without a token"


async def test_a_cancelled_stream_shows_what_was_held_back() -> None:
    pair = Pair()
    sampling = Sampling(temperature=1.0, allowed_token_ids=[0xF0])
    answer = pair.submit(Start("r", [1], sampling, Stop(max_output_tokens=50), credit=3))
    for _ in range(8):
        await pair.turn()
    pair.client.cancel("r")
    await pair.run()
    assert answer.last[0] is not None and answer.last[0].finish == "cancelled"
    assert (answer.ids[0], answer.text(0)) == ([0xF0] * 3, "\ufffd" * 3)


async def test_a_failed_request_leaves_no_stream() -> None:
    pair = Pair()
    answers = [
        pair.submit(Start(f"r{i}", [1] * 9000 * i or [1], Sampling(), Stop(1000), num_choices=2)) for i in (0, 1)
    ]
    for _ in range(5):
        await pair.turn()
    assert isinstance(answers[1].end, Failed)
    assert len(pair.client._table._texts.by_key) == 2
    pair.client.cancel("r0", detach=True)
    await pair.run()


def test_keys_are_free_ones_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_streams, "_MAX_KEYS", 8)
    streams = TextStreams(TOKENIZER)

    def opened(num_choices: int) -> Start:
        start = Start("r", [1], Sampling(), Stop(), num_choices=num_choices)
        streams.open(start)
        return start

    assert [opened(2).key for _ in range(3)] == [0, 2, 4]
    streams.close(range(2))
    streams.close(range(4, 6))
    assert opened(3).key == 4, "2 and 3 are taken, and 6 + 3 is over the end"
    assert opened(1).key == 7
    assert opened(2).key == 0
