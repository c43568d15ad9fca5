"""The native step against a float64 reference, and its row invariance, bit for bit."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dragoman_kernels.cpu.llama import LlamaShape
from dragoman_kernels.cpu.reference import llama_reference
from dragoman_kernels.tensor import QuantTensor

Make = Callable[..., Any]

SHAPES = {
    "gqa1-dim64-page16": ({"num_heads": 2, "num_kv_heads": 2}, 16),
    "gqa3-dim64-page64": ({"num_heads": 9, "num_kv_heads": 3, "vocab_size": 77}, 64),
    "gqa4-dim128-page128": ({"num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "hidden_size": 72}, 128),
    "gqa8-dim16": ({"num_heads": 8, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 50}, 16),
    "dim80-bias": ({"num_heads": 4, "num_kv_heads": 4, "head_dim": 80, "bias": True}, 16),
    "qk-norm-untied": ({"num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "tied": False}, 16),
    "odd-hidden": ({"hidden_size": 45, "intermediate_size": 37, "vocab_size": 1}, 16),
    "rope-factor": ({"rope_attention_factor": 1.3}, 16),
    "f16": ({"dtype": "F16", "embedding": "F16"}, 16),
    "q8_0": ({"dtype": "Q8_0", "embedding": "Q8_0"}, 16),
    "q4_1": ({"dtype": "Q4_1", "embedding": "Q8_0", "bias": True}, 64),
    "q4_0": ({"dtype": "Q4_0", "embedding": "Q4_1"}, 16),
}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", SHAPES)
def test_float32_equals_the_float64_reference(name: str, random_model: Make, load: Make) -> None:
    options, page_size = SHAPES[name]
    model = random_model(**options)
    driver = load(model, page_size=page_size)
    tokens = np.random.default_rng(1).integers(0, model.shape.vocab_size, 150).tolist()
    logits, hidden = llama_reference(model.shape, model.plain, np.array(tokens))
    cut = [100, 101, 133, 150]
    for start, end in zip([0, *cut], cut, strict=False):
        got_logits, got_hidden = driver.run([(0, tokens[start:end])])
        assert relative_error(got_logits[0], logits[end - 1]) < 1e-4
        assert relative_error(got_hidden[0], hidden[end - 1]) < 1e-4


@pytest.mark.parametrize("name", ["q8_0", "q4_1", "q4_0", "dim80-bias"])
def test_int8_is_near_the_reference(name: str, random_model: Make, load: Make) -> None:
    options, page_size = SHAPES[name]
    model = random_model(**options)
    driver = load(model, page_size=page_size, activation="int8")
    tokens = np.random.default_rng(2).integers(0, model.shape.vocab_size, 40).tolist()
    logits, _ = llama_reference(model.shape, model.plain, np.array(tokens))
    got = driver.teacher_forced(0, tokens, prefill=20)
    # 8-bit rounding of activations is 1/254 of a block's largest value; two layers of it stay within a few percent.
    assert relative_error(got, logits[19:]) < 0.05


def solo(load: Make, model: Any, tokens: list[int], **options: Any) -> list[np.ndarray]:
    """Logits after each token from the 8th on: prefill of 8, then one token a step, alone, one thread."""
    return list(load(model, num_threads=1, **options).teacher_forced(0, tokens, prefill=8))


@pytest.mark.parametrize("activation", ["int8", "float32"])
@pytest.mark.parametrize("name", ["gqa3-dim64-page64", "dim80-bias", "q8_0", "q4_1", "f16"])
def test_rows_do_not_depend_on_batch_or_chunks(name: str, activation: str, random_model: Make, load: Make) -> None:
    options, page_size = SHAPES[name]
    model = random_model(**options)
    rng = np.random.default_rng(3)
    lengths = [8, 9, 23, 70, 131]
    sequences = [rng.integers(0, model.shape.vocab_size, n).tolist() for n in lengths]
    settings: dict[str, Any] = {"page_size": page_size, "activation": activation}
    alone = [solo(load, model, tokens, **settings) for tokens in sequences]
    driver = load(model, **settings)
    done = [0] * len(sequences)
    compared = 0
    while any(done[i] < lengths[i] for i in range(len(lengths))):
        work = []
        for i, tokens in enumerate(sequences):
            if done[i] < lengths[i] and (rng.random() < 0.8 or not work):
                count = int(min(rng.choice([1, 1, 2, 3, 7, 8, 17, 40]), lengths[i] - done[i]))
                work.append((i, tokens[done[i] : done[i] + count]))
                done[i] += count
        logits, _ = driver.run(work)
        for row, (i, _) in zip(logits, work, strict=True):
            if done[i] >= 8:
                np.testing.assert_array_equal(row.view(np.int32), alone[i][done[i] - 8].view(np.int32))
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("activation", ["int8", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_row_stays_alone(activation: str, bad: float, random_model: Make, load: Make) -> None:
    model = random_model(dtype="Q4_1")
    poisoned = model.plain["embed_tokens"].copy()
    poisoned[7, 5] = bad
    model.weights["embed_tokens"] = QuantTensor.from_float32(poisoned)
    clean = [3, 4, 5, 6]
    expected = load(model, activation=activation).teacher_forced(0, clean, prefill=4)[0]
    driver = load(model, activation=activation)
    logits, _ = driver.run([(1, [1, 7, 2]), (0, clean), (2, [7] * 32)])  # fills two blocks
    assert np.isnan(logits[0]).all()
    assert np.isnan(logits[2]).all()
    # The tied head has the bad row too: only its own column may differ.
    columns = np.arange(model.shape.vocab_size) != 7
    np.testing.assert_array_equal(logits[1][columns], expected[columns])
    for seq in (1, 2):
        driver.release(seq)
    again, _ = driver.run([(3, clean)])  # in blocks whose stale keys and values are NaN
    np.testing.assert_array_equal(again[0][columns], expected[columns])


def test_a_non_finite_value_is_not_rounded_away(random_model: Make, load: Make) -> None:
    model = random_model(dtype="Q8_0")
    spoiled = model.plain["layers.0.up_proj"].copy()
    spoiled[3, 4] = np.nan  # one NaN among the 32 values that are rounded together
    model.weights["layers.0.up_proj"] = QuantTensor.from_float32(spoiled)
    logits, _ = load(model, activation="int8").run([(0, [1, 2, 3])])
    assert np.isnan(logits[0]).all()


@pytest.mark.parametrize("activation", ["int8", "float32"])
@pytest.mark.parametrize("name", ["gqa3-dim64-page64", "q8_0", "q4_1"])
def test_the_head_over_any_rows_gives_the_logits_of_a_run(
    name: str, activation: str, random_model: Make, load: Make
) -> None:
    options, page_size = SHAPES[name]
    model = random_model(**options)
    tokens = np.random.default_rng(6).integers(0, model.shape.vocab_size, 90).tolist()
    settings: dict[str, Any] = {"page_size": page_size, "activation": activation, "max_num_seqs": 4}
    alone = load(model, **settings).teacher_forced(0, tokens)
    driver = load(model, **settings)
    rows = np.arange(89, -1, -1, dtype=np.int32)
    logits, hidden = driver.step.run(**driver.batch([(0, tokens)]), hidden_rows=rows)
    assert hidden.shape == (1 + 90, model.shape.hidden_size)
    np.testing.assert_array_equal(hidden[0], hidden[1])
    assert driver.step.max_num_head_rows == 64
    got = np.concatenate([driver.step.head(hidden[1:65]), driver.step.head(hidden[65:])])
    np.testing.assert_array_equal(got[::-1], alone)
    np.testing.assert_array_equal(got[0], logits[0])
    with pytest.raises(ValueError, match="at most 64 rows"):
        driver.step.head(hidden)


def broken(driver: Any, array: str, index: Any, value: int) -> dict[str, np.ndarray]:
    driver.run([(0, [1, 2, 3]), (1, [4])])
    arrays = {**driver.batch([(0, [5, 6]), (1, [7])]), "hidden_rows": np.zeros(1, np.int32)}
    arrays[array][index] = value
    return arrays


@pytest.mark.parametrize(
    ("array", "index", "value", "message"),
    [
        ("token_ids", 1, 101, r"token_ids\[1\] is 101"),
        ("token_ids", 0, -1, r"token_ids\[0\] is -1"),
        ("positions", 2, 5, r"positions\[2\] is 5 .* at 1"),
        ("slot_mapping", 1, 10**6, r"slot_mapping\[1\] is 1000000"),
        ("slot_mapping", 0, -3, r"slot_mapping\[0\] is -3"),
        ("query_starts", 1, 9, r"query_starts\[1\] is 9"),
        ("query_starts", 1, 0, r"query_starts\[1\] is 0"),
        ("query_starts", 0, 1, r"query_starts\[0\] is 1"),
        ("query_starts", 2, 2, r"query_starts\[2\] is 2"),
        ("context_lens", 0, 1, r"context_lens\[0\] is 1"),
        ("context_lens", 1, 2000, r"context_lens\[1\] is 2000"),
        ("block_tables", (0, 0), 64, r"block_tables\[0, 0\] is 64"),
        ("block_tables", (1, 0), 0, r"block_tables\[1, 0\] is 0"),
        ("logit_seqs", 1, 2, r"logit_seqs\[1\] is 2"),
        ("hidden_seqs", 0, -1, r"hidden_seqs\[0\] is -1"),
        ("hidden_rows", 0, 3, r"hidden_rows\[0\] is 3"),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_written(
    array: str, index: Any, value: int, message: str, random_model: Make, load: Make
) -> None:
    model = random_model(num_layers=1)
    driver = load(model)
    arrays = broken(driver, array, index, value)
    with pytest.raises(ValueError, match=message):
        driver.step.run(**arrays)
    expected = load(model).teacher_forced(0, [1, 2, 3, 8, 9], prefill=5)[0]
    driver.lengths = {0: 3, 1: 1}
    np.testing.assert_array_equal(driver.run([(0, [8, 9])])[0][0], expected)


@pytest.mark.parametrize("activation", ["int8", "float32"])
def test_a_prefix_block_may_be_read_in_the_step_that_fills_it(activation: str, random_model: Make, load: Make) -> None:
    model = random_model(dtype="Q4_1", num_heads=6, num_kv_heads=2)
    tokens = list(range(1, 18))
    expected = load(model, activation=activation, num_threads=1).teacher_forced(0, tokens, prefill=16)
    driver = load(model, activation=activation)
    driver.run([(0, tokens[:15])])
    # Sequence 0 writes slot 15 of its block; sequence 1 has that block as its prefix and adds token 16.
    driver.tables[1], driver.lengths[1] = list(driver.tables[0]), 16
    logits, _ = driver.run([(1, tokens[16:]), (0, tokens[15:16])])
    np.testing.assert_array_equal(logits[0], expected[1])
    np.testing.assert_array_equal(logits[1], expected[0])


def test_two_sequences_cannot_write_one_block(random_model: Make, load: Make) -> None:
    driver = load(random_model(num_layers=1))
    arrays = driver.batch([(0, [1]), (1, [2])])
    arrays["block_tables"][1] = arrays["block_tables"][0]
    arrays["slot_mapping"][1] = arrays["slot_mapping"][0]
    with pytest.raises(ValueError, match=r"slot_mapping\[1\].*also writes"):
        driver.step.run(**arrays)


def test_wrong_sizes_types_and_a_closed_step_are_refused(random_model: Make, load: Make) -> None:
    driver = load(random_model(num_layers=1), max_batch_tokens=4, max_num_seqs=2)
    with pytest.raises(ValueError, match="max_batch_tokens"):
        driver.run([(0, [1] * 5)])
    with pytest.raises(ValueError, match="max_num_seqs"):
        driver.run([(1, [1]), (2, [1]), (3, [1])])
    arrays = driver.batch([(4, [1])])
    with pytest.raises(ValueError, match="positions has 2 rows"):
        driver.step.run(**(arrays | {"positions": np.array([0, 1])}))
    with pytest.raises(ValueError, match="token_ids must be an int32 array"):
        driver.step.run(**(arrays | {"token_ids": np.array([1.5])}))
    with pytest.raises(ValueError, match="does not fit 32 bits"):
        driver.step.run(**(arrays | {"token_ids": np.array([2**40])}))
    driver.step.close()
    driver.step.close()
    with pytest.raises(ValueError, match="closed"):
        driver.step.run(**arrays)


def test_wrong_weights_and_settings_are_refused(random_model: Make, load: Make) -> None:
    model = random_model(num_layers=1)
    for name, change, message in [
        ("layers.0.q_proj", None, "weight layers.0.q_proj is missing"),
        ("norm", np.ones(3, np.float32), r"weight norm has shape \(3,\)"),
        ("layers.1.q_proj", model.weights["norm"], "weight layers.1.q_proj is not one"),
        (
            "embed_tokens",
            QuantTensor("Q4_1", (101, 64), np.zeros((101, 36), np.uint8)),
            "weight embed_tokens: Q4_1 data",
        ),
        ("embed_tokens", QuantTensor("Q3_K", (101, 64), np.zeros((101, 1), np.uint8)), "Q3_K, which has no CPU kernel"),
    ]:
        weights = dict(model.weights)
        weights.pop(name, None)
        if change is not None:
            weights[name] = change
        with pytest.raises(ValueError, match=message):
            load(type(model)(model.shape, weights, model.plain))
    for option, value in [("page_size", 24), ("num_threads", 0), ("num_blocks", 1), ("activation", "int4")]:
        with pytest.raises(ValueError, match=option):
            load(model, **{option: value})
    with pytest.raises(ValueError, match="head_dim"):
        LlamaShape(1, 8, 8, 1, 1, 24, 8, 8, 1e-5, np.ones(12, np.float32))


@pytest.mark.parametrize("march", ["", "x86-64-v3"])
@pytest.mark.parametrize("activation", ["int8", "float32"])
def test_other_instruction_sets(march: str, activation: str, random_model: Make, load: Make) -> None:
    """The plain C++ and AVX2 lanes keep the same promises as the native ones."""
    if march and platform.machine() != "x86_64":
        pytest.skip("avx2: needs an x86-64 CPU")
    bar = 1e-4 if activation == "float32" else 0.05
    for dtype, embedding in [("Q4_1", "Q8_0"), ("Q8_0", "F16")]:
        model = random_model(dtype=dtype, embedding=embedding, qk_norm=True)
        settings = {"march": march, "activation": activation}
        tokens = np.random.default_rng(5).integers(0, model.shape.vocab_size, 90).tolist()
        logits, _ = llama_reference(model.shape, model.plain, np.array(tokens))
        alone = load(model, num_threads=1, **settings)
        assert alone.step.instruction_set.startswith("avx2" if march else "generic")
        expected = alone.teacher_forced(0, tokens, prefill=70)
        assert relative_error(expected, logits[69:]) < bar
        driver = load(model, **settings)
        driver.run([(0, tokens[:33]), (1, tokens[:5])])
        driver.run([(1, tokens[5:7]), (0, tokens[33:80])])
        together, _ = driver.run([(0, tokens[80:]), (1, tokens[7:80])])
        np.testing.assert_array_equal(together[0], expected[-1])
        np.testing.assert_array_equal(together[1], expected[10])
