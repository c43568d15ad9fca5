"""Both samplers against plain float64 definitions: filters, penalties, logprobs, independence of rows, odd values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.agent.engine.sampling_cases import make_batch, packed, random_logits

from dragoman_agent.device.base import Penalties, SamplingBatch
from dragoman_agent.engine import host_sampler, sampler
from dragoman_agent.engine.host_sampler import HostSampled, HostSampler
from dragoman_agent.engine.sampling_terms import MIN_LOGPROB, is_plain_greedy

Draw = Callable[[torch.Tensor, SamplingBatch], HostSampled]


def sample_torch(logits: torch.Tensor, batch: SamplingBatch) -> HostSampled:
    result = sampler.sample(logits, batch)
    parts = (result.token_ids, result.finite, result.logprobs, result.top_ids, result.top_logprobs)
    return HostSampled(*(None if part is None else part.numpy() for part in parts))  # type: ignore[arg-type]


def sample_host(logits: torch.Tensor, batch: SamplingBatch) -> HostSampled:
    return HostSampler(logits.shape[1]).sample(logits.numpy(), batch)


@pytest.fixture(params=[sample_torch, sample_host], ids=["torch", "host"])
def sample(request: pytest.FixtureRequest) -> Draw:
    draw: Draw = request.param
    return draw


def reference(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Exact probabilities in float64: temperature, min-p, top-k, top-p, written as in their definitions."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    if top_k:
        probs[probs < np.sort(probs)[::-1][min(top_k, len(probs)) - 1]] = 0
    probs /= probs.sum()
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass_before = np.cumsum(probs[order]) - probs[order]
        probs[order[mass_before >= top_p]] = 0
    return probs / probs.sum()


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.85, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_follow_the_exact_distribution(sample: Draw, filters: dict[str, Any]) -> None:
    count, vocab_size = 6_000, 60
    logits = random_logits(1, vocab_size, seed=5, scale=1.5)
    expected = reference(logits[0].numpy(), **filters) * count
    ids = sample(logits.expand(count, -1), make_batch(count, seed=3, cursor=np.arange(count), **filters)).token_ids
    observed = np.bincount(ids, minlength=vocab_size)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    cells = np.append(expected[common], expected[~common].sum())
    counts = np.append(observed[common], observed[~common].sum())
    cells, counts = cells[cells > 0], counts[cells > 0]
    degrees = len(cells) - 1
    chi_square = ((counts - cells) ** 2 / cells).sum()
    assert chi_square <= degrees + 4 * np.sqrt(2 * max(degrees, 1))


def kept_torch(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    scaled = (logits - logits.max()).unsqueeze(0)
    k = np.full(1, top_k or logits.shape[0], np.int64)
    kept = sampler._filter(scaled, sampler._weights(scaled), np.minimum(k, logits.shape[0]), np.full(1, top_p))
    return torch.nonzero(kept[0]).squeeze(1).tolist()


def kept_host(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    draws = HostSampler(logits.shape[0])
    weights = draws._weigh(logits.numpy(), 1.0)
    return host_sampler._nucleus(draws._scaled, weights, top_k if top_k < logits.shape[0] else 0, top_p).tolist()


@pytest.mark.parametrize("kept", [kept_torch, kept_host])
@pytest.mark.parametrize("scale", [0.5, 6.0])
@pytest.mark.parametrize("vocab_size", [5, 511, 49152])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.999), (3000, 1.0), (2000, 0.95), (40, 0.5), (600, 0.9999), (1, 0.1)]
)
def test_kept_set_is_exact(kept: Any, vocab_size: int, top_k: int, top_p: float, scale: float) -> None:
    """Flat distributions keep more tokens than the quick ways look at, which takes the search over all."""
    logits = random_logits(1, vocab_size, seed=3, scale=scale)[0]
    found = kept(logits, top_k, top_p)
    expected = np.flatnonzero(reference(logits.numpy(), top_k=top_k, top_p=top_p))
    assert found == sorted(found)
    # fp32 exponentials may move the last token of top-p in or out, and weights under 2**-40 are zero; nothing else.
    missing = set(expected) ^ set(found)
    probs = reference(logits.numpy())
    assert len([token for token in missing if probs[token] > 1e-11]) <= (1 if top_p < 1 else 0)


def test_both_samplers_draw_the_same_tokens() -> None:
    rows = 300
    logits = random_logits(rows, 4001, seed=9)
    rng = np.random.default_rng(2)
    batch = make_batch(
        rows,
        temperature=rng.choice([0.0, 0.5, 1.0, 3.0], rows),
        top_k=rng.choice([0, 1, 40, 700], rows),
        top_p=rng.choice([1.0, 0.9, 0.2], rows),
        min_p=rng.choice([0.0, 0.05], rows),
        seed=rng.integers(0, 2**63, rows),
        num_logprobs=rng.choice([-1, 0, 5], rows),
        penalties={5: Penalties(1.2, 0.1, 0.3, np.array([1, 2, 3], np.int32), np.array([3, 3], np.int32))},
        allowed={8: np.array([5, 6, 7], np.int32)},
    )
    one, other = sample_torch(logits, batch), sample_host(logits, batch)
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert np.array_equal(one.top_ids, other.top_ids)  # type: ignore[arg-type]
    for mine, theirs in ((one.logprobs, other.logprobs), (one.top_logprobs, other.top_logprobs)):
        assert mine is not None
        assert theirs is not None
        assert np.allclose(mine, theirs, atol=1e-5)


def test_ties_at_the_threshold_are_all_kept(sample: Draw) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    count = 400
    batch = make_batch(count, top_k=2, cursor=np.arange(count))
    assert set(sample(logits.expand(count, -1), batch).token_ids.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_lowest_id_of_a_tie(sample: Draw) -> None:
    logits = torch.zeros(3, 1000)
    logits[:, [700, 300, 900]] = 4.0
    assert sample(logits, make_batch(3, temperature=0.0)).token_ids.tolist() == [300] * 3
    assert sample(logits, make_batch(3, temperature=0.0, num_logprobs=2)).token_ids.tolist() == [300] * 3


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-30, 1e-6])
def test_tiny_temperatures_are_greedy(sample: Draw, temperature: float) -> None:
    logits = random_logits(4, 500) * 1e4
    result = sample(logits, make_batch(4, temperature=temperature, top_p=0.5, num_logprobs=0))
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()
    assert result.finite.all()
    assert result.logprobs is not None
    assert np.isfinite(result.logprobs).all()


def test_smallest_random_temperature_overflows_nothing(sample: Draw) -> None:
    logits = random_logits(4, 500) * 1e30
    result = sample(logits, make_batch(4, temperature=1.1e-5))
    assert result.token_ids.tolist() == logits.argmax(-1).tolist()
    assert result.finite.all()


def test_a_row_draws_the_same_token_alone_and_among_64(sample: Draw) -> None:
    rows, vocab_size = 64, 3001
    logits = random_logits(rows, vocab_size)
    rng = np.random.default_rng(1)
    columns = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7], rows),
        "top_k": rng.choice([0, 1, 40, 700], rows),
        "top_p": rng.choice([1.0, 0.9, 0.2], rows),
        "min_p": rng.choice([0.0, 0.05], rows),
        "seed": rng.integers(0, 2**63, rows),
        "choice": rng.integers(0, 4, rows),
        "cursor": rng.integers(0, 9000, rows),
        "num_logprobs": rng.choice([-1, 0, 5], rows),
    }
    together = sample(logits, make_batch(rows, **columns))
    assert together.logprobs is not None
    assert len(set(together.token_ids.tolist())) > 20
    for row in range(rows):
        alone = sample(logits[row : row + 1], make_batch(1, **{k: v[row] for k, v in columns.items()}))
        assert alone.token_ids[0] == together.token_ids[row]
        if alone.logprobs is not None:
            assert alone.logprobs[0] == together.logprobs[row]


def test_order_of_rows_does_not_matter(sample: Draw) -> None:
    logits = random_logits(32, 2000)
    forward = sample(logits, make_batch(32, seed=np.arange(32), top_p=0.95)).token_ids
    backward = sample(logits.flip(0), make_batch(32, seed=np.arange(32)[::-1], top_p=0.95)).token_ids
    assert forward.tolist() == backward[::-1].tolist()


def test_seed_choice_and_cursor_change_the_draw(sample: Draw) -> None:
    logits = random_logits(1, 5000, scale=0.1).expand(4, -1)
    batch = make_batch(4, seed=[1, 2, 1, 1], choice=[0, 0, 1, 0], cursor=[0, 0, 0, 1])
    assert len(set(sample(logits, batch).token_ids.tolist())) == 4


def test_input_logits_are_not_changed(sample: Draw) -> None:
    logits = random_logits(2, 100)
    before = logits.clone()
    banned = {0: np.array([1], np.int32)}
    sample(logits, make_batch(2, banned=banned, logit_bias={1: (np.array([3], np.int32), np.array([5.0], np.float32))}))
    assert torch.equal(logits, before)


def test_penalties_match_their_definitions() -> None:
    logits = random_logits(3, 50)
    prompt, output = np.array([4, 5, 5, 6], np.int32), np.array([7, 7, 7, 4], np.int32)
    penalties = {1: Penalties(1.3, 0.4, 0.25, prompt, output)}
    batch = make_batch(3, penalties=penalties)
    expected = logits.numpy().astype(np.float64).copy()
    for token in (4, 5, 6, 7):
        value = expected[1, token]
        expected[1, token] = value / 1.3 if value > 0 else value * 1.3
    for token, count in ((7, 3), (4, 1)):
        expected[1, token] -= 0.25 * count + 0.4
    for edited in (sampler._edit(logits, batch).numpy(), host_sampler._edit(logits.numpy(), batch)):
        assert np.allclose(edited, expected, atol=1e-5)


def test_penalties_with_nothing_seen_change_nothing() -> None:
    none = np.array([], np.int32)
    logits = random_logits(1, 50)
    batch = make_batch(1, penalties={0: Penalties(1.3, 1.0, 1.0, none, none)})
    assert torch.equal(sampler._edit(logits, batch), logits)
    assert np.array_equal(host_sampler._edit(logits.numpy(), batch), logits.numpy())


def test_bias_ban_and_allowed(sample: Draw) -> None:
    logits = torch.zeros(4, 20)
    logits[:, 3] = 5.0
    batch = make_batch(
        4,
        temperature=[0.0, 0.0, 0.0, 1.0],
        logit_bias={0: (np.array([9], np.int32), np.array([6.0], np.float32))},
        banned={1: np.array([3, 0], np.int32)},
        allowed={2: np.array([17, 11], np.int32), 3: np.array([12], np.int32)},
    )
    assert not is_plain_greedy(batch)
    result = sample(logits, batch)
    assert result.token_ids.tolist() == [9, 1, 11, 12]
    assert result.finite.all()


def test_a_row_with_every_token_banned_fails_alone(sample: Draw) -> None:
    logits = random_logits(2, 10)
    for temperature in (0.0, 1.0):
        result = sample(logits, make_batch(2, temperature=temperature, banned={0: np.arange(10, dtype=np.int32)}))
        assert result.finite.tolist() == [False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_rows_are_marked_and_leave_the_others_alone(sample: Draw, bad: float, temperature: float) -> None:
    logits = random_logits(5, 300)
    columns = {"temperature": temperature, "seed": np.arange(5)}
    clean = sample(logits, make_batch(5, **columns)).token_ids
    logits[2, 123] = bad
    for more in ({}, {"num_logprobs": 3, "top_p": 0.9} if temperature == 0 else {"num_logprobs": 3}):
        result = sample(logits, make_batch(5, **columns, **more))
        assert result.finite.tolist() == [True, True, False, True, True]
        assert result.token_ids[[0, 1, 3, 4]].tolist() == clean[[0, 1, 3, 4]].tolist()
        assert 0 <= result.token_ids[2] < 300


def test_banning_a_nan_logit_does_not_hide_it(sample: Draw) -> None:
    logits = random_logits(1, 30)
    logits[0, 4] = float("nan")
    assert not sample(logits, make_batch(1, banned={0: np.array([4], np.int32)})).finite[0]


def test_minus_infinity_logits_are_never_drawn(sample: Draw) -> None:
    logits = torch.full((200, 40), -torch.inf)
    logits[:, [5, 6]] = 0.0
    result = sample(logits, make_batch(200, cursor=np.arange(200), num_logprobs=4))
    assert result.finite.all()
    assert set(result.token_ids.tolist()) == {5, 6}
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.top_ids[0].tolist() == [5, 6, 0, 1]
    assert result.top_logprobs[0].tolist() == pytest.approx([np.log(0.5), np.log(0.5), MIN_LOGPROB, MIN_LOGPROB])


def test_logprobs_are_the_log_softmax_of_the_raw_logits(sample: Draw) -> None:
    logits = random_logits(3, 1000)
    batch = make_batch(
        3, temperature=[0.0, 0.3, 2.0], top_k=4, num_logprobs=[5, -1, 2], banned={0: np.array([0], np.int32)}
    )
    result = sample(logits, batch)
    expected = torch.log_softmax(logits.double(), -1)
    assert result.logprobs is not None
    assert result.top_ids is not None
    assert result.top_logprobs is not None
    assert result.top_ids.shape == (3, 5)
    assert result.top_ids[1].tolist() == [-1] * 5
    for row in (0, 2):
        assert result.logprobs[row] == pytest.approx(expected[row, int(result.token_ids[row])].item(), abs=1e-5)
        values, ids = expected[row].topk(5)
        assert result.top_ids[row].tolist() == ids.tolist()
        assert result.top_logprobs[row].tolist() == pytest.approx(values.tolist(), abs=1e-5)


def test_a_token_outside_the_vocabulary_is_refused(sample: Draw) -> None:
    cases: list[Callable[[np.ndarray], dict[str, Any]]] = [
        lambda ids: {"banned": {0: ids}},
        lambda ids: {"allowed": {0: ids}},
        lambda ids: {"logit_bias": {0: (ids, np.ones(1, np.float32))}},
        lambda ids: {"penalties": {0: Penalties(1.1, 0, 0, ids, ids)}},
    ]
    for case in cases:
        for token in (-1, 10):
            with pytest.raises(ValueError, match=f"token {token}, but the vocabulary has 10"):
                sample(random_logits(1, 10), make_batch(1, **case(np.array([token], np.int32))))


@pytest.mark.parametrize("vocab_size", [31, 32, 100, 259])
def test_a_mask_leaves_what_it_allows(sample: Draw, vocab_size: int) -> None:
    rng = np.random.default_rng(3)
    may = rng.random((90, vocab_size)) < 0.2
    may[:, -1] |= ~may.any(axis=1)
    rows = np.arange(0, 180, 2)
    logits = random_logits(180, vocab_size)
    batch = make_batch(
        180, seed=np.arange(180), temperature=np.repeat([0.0, 1.0], 90), num_logprobs=0,
        masked_rows=rows.astype(np.int32), masks=packed(may),
    )  # fmt: skip
    free = make_batch(180, seed=np.arange(180), temperature=np.repeat([0.0, 1.0], 90), num_logprobs=0)
    drawn, unmasked = sample(logits, batch), sample(logits, free)
    assert may[np.arange(90), drawn.token_ids[rows]].all() and drawn.finite.all()
    assert (drawn.token_ids[1::2] == unmasked.token_ids[1::2]).all(), "other rows are as they were"
    greedy = np.where(may, logits[rows].numpy(), -np.inf).argmax(axis=1)[:45]
    assert (drawn.token_ids[rows][:45] == greedy).all()


def test_a_mask_follows_the_exact_distribution(sample: Draw) -> None:
    count, vocab_size = 6_000, 60
    logits = random_logits(1, vocab_size, seed=6, scale=1.5)
    may = np.arange(vocab_size) % 3 == 0
    masks = np.repeat(packed(may[None]), count, axis=0)
    batch = make_batch(
        count, seed=3, cursor=np.arange(count), masked_rows=np.arange(count, dtype=np.int32), masks=masks
    )
    observed = np.bincount(sample(logits.expand(count, -1), batch).token_ids, minlength=vocab_size)
    expected = reference(np.where(may, logits[0].numpy(), -np.inf)) * count
    assert observed[~may].sum() == 0
    common = expected >= 5
    chi_square = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
    assert chi_square <= common.sum() + 4 * np.sqrt(2 * common.sum())


def test_a_mask_that_allows_nothing_or_is_too_narrow(sample: Draw) -> None:
    logits = random_logits(2, 64)
    rows = np.array([1], np.int32)
    batch = make_batch(2, masked_rows=rows, masks=np.zeros((1, 2), np.int32))
    assert sample(logits, batch).finite.tolist() == [True, False]
    with pytest.raises(ValueError, match="32 bits a row, but the vocabulary has 64"):
        sample(logits, make_batch(2, masked_rows=rows, masks=np.zeros((1, 1), np.int32)))


def test_both_samplers_score_as_float64_does() -> None:
    logits = random_logits(5, 90, seed=8)
    logits[3, 7] = torch.nan
    targets = np.array([0, 89, 5, 2, 17], np.int32)
    exact = torch.log_softmax(logits.double(), dim=-1).numpy()
    host = HostSampler(90).score(logits.numpy(), targets, 3)
    device = sampler.score(logits, torch.from_numpy(targets).long(), 3)
    for own, ids, top in (host, tuple(part.numpy() for part in device if part is not None)):
        assert np.isnan(own[3])
        for row in (0, 1, 2, 4):
            assert own[row] == pytest.approx(exact[row, targets[row]], abs=1e-5)
            order = np.argsort(-exact[row], kind="stable")[:3]
            assert ids[row].tolist() == order.tolist()
            assert top[row] == pytest.approx(exact[row, order], abs=1e-5)
    assert sampler.score(logits, torch.from_numpy(targets).long(), 0)[1] is None
