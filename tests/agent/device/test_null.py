"""The null device keeps a device's contracts: what it answers depends on the tables, slots and tokens it was given."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman_agent.device import open_device
from dragoman_agent.device.base import Device, DeviceError, SamplingBatch, StepBatch, StepResult
from dragoman_agent.device.null import NullDevice
from dragoman_agent.device.null_model import NullModel, default_null_plan, default_step_model, open_null_model
from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.source import ModelSource
from dragoman_agent.pal.plan import Plan

MODEL = NullModel()
PAGE = 16
PLAN = default_null_plan(MODEL, page_size=PAGE, num_blocks=64, max_batch_tokens=512, max_num_seqs=8)


def opened(oracle: str = "hash", speed: float = 0.0, plan: Plan = PLAN) -> NullDevice:
    device = NullDevice(oracle, speed)
    device.load(MODEL, plan, lambda progress: None)
    return device


def make_batch(
    chunks: list[tuple[list[int], int, list[int]]], prompt_lens: list[int] | None = None, **sampling: Any
) -> StepBatch:
    """One step of (new tokens, tokens before them, block table) a sequence; every one is sampled."""
    counts = [len(tokens) for tokens, _, _ in chunks]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    lens = np.array([before + len(tokens) for tokens, before, _ in chunks], np.int32)
    tables = np.zeros((len(chunks), max(len(t) for _, _, t in chunks)), np.int32)
    positions, slots = [], []
    for i, (tokens, before, table) in enumerate(chunks):
        tables[i, : len(table)] = table
        for position in range(before, before + len(tokens)):
            positions.append(position)
            slots.append(table[position // PAGE] * PAGE + position % PAGE)
    n = len(chunks)
    arrays = {
        "temperatures": np.zeros(n, np.float32),
        "top_ks": np.zeros(n, np.int32),
        "top_ps": np.ones(n, np.float32),
        "min_ps": np.zeros(n, np.float32),
        "seeds": np.zeros(n, np.uint64),
        "choices": np.zeros(n, np.int32),
        "num_logprobs": np.full(n, -1, np.int32),
    }
    prompts = np.array(prompt_lens or lens, np.int32)
    return StepBatch(
        step=1,
        token_ids=np.array([t for tokens, _, _ in chunks for t in tokens], np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        query_starts=starts,
        context_lens=lens,
        block_tables=tables,
        prompt_lens=prompts,
        sample_seqs=np.arange(n, dtype=np.int32),
        pool_seqs=np.zeros(0, np.int32),
        sampling=SamplingBatch(cursors=(lens - prompts).astype(np.int32), **{**arrays, **sampling}),
    )


def run(device: NullDevice, *chunks: tuple[list[int], int, list[int]], **fields: Any) -> StepResult:
    return device.submit(make_batch(list(chunks), **fields)).result()


def state(device: NullDevice, chunk: tuple[list[int], int, list[int]]) -> int:
    """The hash the device's answer is made of: finer than the one letter that comes of it."""
    batch = make_batch([chunk])
    device.submit(batch)
    return int(device._read_states(batch, batch.sample_seqs, PAGE)[0])


TOKENS = [(7 * i + 3) % 259 for i in range(50)]


def test_it_is_a_device_and_its_model_a_source() -> None:
    assert isinstance(open_device("null"), Device)
    assert isinstance(MODEL, ModelSource)


def test_the_answer_depends_on_neither_chunks_nor_blocks_nor_neighbours() -> None:
    whole = state(opened(), (TOKENS, 0, [1, 2, 3, 4]))
    device = opened()
    state(device, (TOKENS[:20], 0, [9, 30, 5, 7]))
    run(device, (TOKENS[20:40], 20, [9, 30, 5, 7]), ([5] * 30, 0, [11, 12]))
    for i in range(40, 49):
        run(device, ([3], 30, [11, 12]), (TOKENS[i : i + 1], i, [9, 30, 5, 7]))
    assert state(device, (TOKENS[49:], 49, [9, 30, 5, 7])) == whole


@pytest.mark.parametrize("changed", [0, 1, 15, 16, 31, 48, 49])
def test_every_token_of_the_context_counts(changed: int) -> None:
    other = list(TOKENS)
    other[changed] = (other[changed] + 1) % 259
    assert state(opened(), (other, 0, [1, 2, 3, 4])) != state(opened(), (TOKENS, 0, [1, 2, 3, 4]))


@pytest.mark.parametrize("page", range(4))
@pytest.mark.parametrize("kind", ["another sequence's block", "an empty block", "swapped"])
def test_a_wrong_entry_anywhere_in_the_block_table_changes_the_answer(page: int, kind: str) -> None:
    device = opened()
    run(device, (TOKENS, 0, [1, 2, 3, 4]), (TOKENS[::-1], 0, [5, 6, 7, 8]))
    right = state(device, ([65], 50, [1, 2, 3, 4]))
    table = [1, 2, 3, 4]
    if kind == "swapped":
        table[page], table[(page + 1) % 4] = table[(page + 1) % 4], table[page]
    else:
        table[page] = 5 + page if kind.startswith("another") else 20
    assert state(device, ([65], 50, table)) != right


def test_a_slot_written_by_another_changes_the_answer() -> None:
    device = opened()
    run(device, (TOKENS, 0, [1, 2, 3, 4]))
    right = state(device, ([65], 50, [1, 2, 3, 4]))
    run(device, ([9, 9, 9], 0, [2]))
    assert state(device, ([65], 50, [1, 2, 3, 4])) != right


def test_echo_reads_the_prompt_through_the_table() -> None:
    device = opened("echo")
    prompt = list(b"hello world, this is a prompt")
    table = [3, 9, 4]
    out = [int(run(device, (prompt, 0, table)).token_ids[0])]
    for i in range(14):
        step = run(device, (out[-1:], len(prompt) + i, table), prompt_lens=[len(prompt)])
        out.append(int(step.token_ids[0]))
    assert bytes(out) == b"hello world, th"
    wrong = run(device, ([1], len(prompt) + 14, [8, 9, 4]), prompt_lens=[len(prompt)])
    assert int(wrong.token_ids[0]) != ord("t")


def test_alphabet_goes_on_from_the_last_letter() -> None:
    for last, following in [("A", "B"), ("Z", "A"), ("a", "b"), ("z", "a"), ("5", "A")]:
        assert int(run(opened("alphabet"), (list(b"say " + last.encode()), 0, [1])).token_ids[0]) == ord(following)


def test_hash_writes_letters_and_spaces_and_the_seed_counts_only_when_hot() -> None:
    chunks = [([i], 0, [i + 1]) for i in range(8)]
    plan = default_null_plan(MODEL, page_size=PAGE, num_blocks=64, max_num_seqs=8)
    hot, cold = np.ones(8, np.float32), np.zeros(8, np.float32)
    seeds = [np.full(8, s, np.uint64) for s in (1, 2)]
    device = opened(plan=plan)
    greedy = [run(device, *chunks, temperatures=cold, seeds=s).token_ids.tolist() for s in seeds]
    sampled = [run(device, *chunks, temperatures=hot, seeds=s).token_ids.tolist() for s in (*seeds, seeds[0])]
    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1] and sampled[0] == sampled[2]
    assert all(chr(t).isalpha() or chr(t) == " " for row in greedy + sampled for t in row)


@pytest.mark.parametrize(("content", "expected"), [([65, 66], [65, 66, 258, 258]), ("é", [0xC3, 0xA9, 258, 258])])
def test_script_follows_its_file_then_ends(tmp_path: Path, content: Any, expected: list[int]) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(content))
    device = opened(f"script:{path}")
    got = [int(run(device, ([1], 3 + i, [1]), prompt_lens=[4]).token_ids[0]) for i in range(1)]
    got += [int(run(device, ([1], 4 + i, [1]), prompt_lens=[4]).token_ids[0]) for i in range(3)]
    assert got == expected


@pytest.mark.parametrize(
    ("oracle", "content", "words"),
    [
        ("poetry", None, "not known"),
        ("script:", None, "not known"),
        ("script:PATH", None, "cannot be read"),
        ("script:PATH", "[1, 2", "not JSON"),
        ("script:PATH", "[1, 999]", "token ids under 259"),
        ("script:PATH", "[true]", "token ids"),
        ("script:PATH", "{}", "token ids"),
    ],
)
def test_a_bad_oracle_is_refused_with_words(tmp_path: Path, oracle: str, content: str | None, words: str) -> None:
    path = tmp_path / "s.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DeviceError, match=words):
        opened(oracle.replace("PATH", str(path)))


def test_bias_allowed_and_banned_are_honoured() -> None:
    chunk = (TOKENS, 0, [1, 2, 3, 4])
    free = int(run(opened(), chunk).token_ids[0])

    def ids(*values: int) -> Any:
        return np.array(values, np.int32)

    def answer(**sparse: Any) -> int:
        return int(run(opened(), chunk, **sparse).token_ids[0])

    force = np.array([100.0], np.float32)
    assert answer(logit_bias={0: (ids(200), force)}) == 200
    assert answer(logit_bias={0: (ids(free), -force)}) != free
    assert answer(banned={0: ids(free)}) != free
    assert answer(allowed={0: ids(33, 34)}) in (33, 34)
    assert answer(allowed={0: ids(33, 34)}, banned={0: ids(33)}) == 34
    assert answer(allowed={0: ids(33)}, logit_bias={0: (ids(200), force)}) == 33
    assert answer(logit_bias={0: (ids(free), np.array([5.0], np.float32))}) == free


def test_logprobs_are_fixed_finite_and_descend() -> None:
    many = np.array([20], np.int32)
    first, second = (run(opened(), (TOKENS, 0, [1, 2, 3, 4]), num_logprobs=many) for _ in range(2))
    assert first.top_ids is not None and first.top_logprobs is not None and first.logprobs is not None
    assert first.top_ids.shape == first.top_logprobs.shape == (1, 20)
    assert np.isfinite(first.top_logprobs).all() and (np.diff(first.top_logprobs) < 0).all()
    assert first.top_ids[0, 0] == first.token_ids[0] and first.top_logprobs[0, 0] == first.logprobs[0] < 0
    assert len(set(first.top_ids[0].tolist())) == 20
    assert (first.top_logprobs == second.top_logprobs).all()
    assert run(opened(), (TOKENS, 0, [1, 2, 3, 4])).logprobs is None


@pytest.mark.parametrize(
    ("field", "index", "value", "words"),
    [
        ("slot_mapping", 0, 3, "slot_mapping"),
        ("slot_mapping", 0, 64 * PAGE, "slot_mapping"),
        ("positions", 0, -1, "positions"),
        ("block_tables", (0, 1), 0, r"block_tables\[0\]\[1\] is 0"),
        ("block_tables", (0, 3), 64, "block_tables"),
        ("token_ids", 0, 259, "token_ids"),
        ("context_lens", 0, 65, "context_lens"),
        ("query_starts", 1, 49, "query_starts"),
        ("sample_seqs", 0, 1, "sample_seqs"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_writes_nothing(
    field: str, index: Any, value: int, words: str
) -> None:
    device = opened()
    batch = make_batch([(TOKENS, 0, [1, 2, 3, 4])])
    getattr(batch, field)[index] = value
    with pytest.raises(DeviceError, match=words):
        device.submit(batch)
    assert not device._states.any()


def test_steps_take_what_the_step_model_says_times_the_speed() -> None:
    plan = default_null_plan(MODEL, page_size=PAGE, num_blocks=64)
    predicted = plan.step_model.prefill_seconds(50)
    device = opened(speed=20.0, plan=plan)
    begun = time.perf_counter()
    handle = device.submit(make_batch([(TOKENS, 0, [1, 2, 3, 4])]))
    submitted = time.perf_counter() - begun
    result = handle.result()
    assert time.perf_counter() - begun >= 20 * predicted
    assert submitted < 20 * predicted, "submit does not wait"
    assert result.seconds == pytest.approx(20 * predicted)
    mean = plan.step_model.decode_step_seconds(2, 40.0)
    both = run(device, ([1], 49, [1, 2, 3, 4]), ([1], 29, [5, 6]))
    assert both.seconds == pytest.approx(20 * mean)


def test_embeddings_are_unit_vectors_that_depend_on_the_input() -> None:
    def embed(tokens: list[int]) -> Any:
        batch = make_batch([(tokens, 0, [1, 2, 3, 4])])
        batch.pool_seqs, batch.sample_seqs = batch.sample_seqs, batch.pool_seqs
        return opened().submit(batch).result().embeddings

    first, other = embed(TOKENS), embed(TOKENS[:-1])
    assert first.shape == (1, MODEL.config.hidden_size)
    assert np.linalg.norm(first) == pytest.approx(1.0, abs=1e-5)
    assert abs(float((first * other).sum())) < 0.6


def test_the_default_step_model_grows_with_batch_and_context() -> None:
    model = default_step_model()
    assert model.decode_step_seconds(1, 0) < model.decode_step_seconds(64, 0) < model.decode_step_seconds(256, 0)
    assert model.decode_step_seconds(64, 100) < model.decode_step_seconds(64, 30000)


def test_specs_of_the_null_model() -> None:
    assert open_null_model("null").name == "null"
    assert open_null_model("null:llama-8b").name == "llama-8b"
    assert open_null_model("null:a").digest != open_null_model("null:b").digest
    for spec in ("null:", "llama", "nullify"):
        with pytest.raises(ModelFileError, match="null"):
            open_null_model(spec)
    with pytest.raises(ModelFileError, match="no tensor"):
        MODEL.tensor("x")


def test_an_unknown_device_and_a_missing_model_are_refused() -> None:
    with pytest.raises(DeviceError, match="not one of cpu, cuda, hip, xpu, null"):
        open_device("tpu")
    with pytest.raises(DeviceError, match="No model"):
        NullDevice().submit(make_batch([([1], 0, [1])]))


def test_torch_is_never_imported() -> None:
    code = (
        "import sys; from dragoman_agent.device.null_model import *; from dragoman_agent.device import open_device;"
        "from dragoman_agent.engine.local import *; from dragoman_agent.engine.messages import *;"
        "import dragoman_agent.engine.serving;"
        "m = NullModel(); p = default_null_plan(m); d = open_device('null'); d.load(m, p, lambda x: None);"
        "warm_up(build_core(d, m, p), [0]);"
        "bad = [n for n in sys.modules if n.split('.')[0] in ('torch', 'triton')]; print(bad); sys.exit(len(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
