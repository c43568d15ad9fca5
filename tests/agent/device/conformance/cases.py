"""What every backend must do, one function a case. A case raises AssertionError, or whatever the device raised."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tests.agent.device.conformance.bench import Bench, ignore, refused
from tests.agent.device.conformance.steps import Part, by_id
from tests.agent.device.conformance.tiny_model import CONFIG, POISONED

from dragoman_agent.device.base import BlockCopy, BlockDevice, Device, LateStep, LoadProgress, Penalties, StepBatch
from dragoman_agent.engine.philox import uniforms

TOKENS = [3 + 5 * i % 71 for i in range(40)]  # none is POISONED
BLOCKS = (9, 4, 13)
OTHER_BLOCKS = (2, 17, 6)


def answers(bench: Bench, device: Device | None = None) -> npt.NDArray[np.float32]:
    """What a good step gives: a mark of a device's health."""
    return bench.row(Part(TOKENS[:5], 0, BLOCKS), device=device)


def is_a_device(bench: Bench) -> None:
    device = bench.device
    assert isinstance(device, Device) and isinstance(device, BlockDevice)
    assert device.kind == bench.plan.device_kind
    result = bench.run(Part(TOKENS[:3], 0, BLOCKS))
    assert result.token_ids.dtype == np.int32 and result.finite.dtype == np.bool_ and result.seconds > 0
    assert result.embeddings is None and result.score_logprobs is None


def nothing_works_before_a_model_is_loaded(bench: Bench) -> None:
    with bench.opened() as device:
        blocks = cast(BlockDevice, device)
        one = np.array([1], np.int32)
        with refused("No model"):
            bench.run(Part(TOKENS[:3], 0, BLOCKS), device=device)
        with refused("No model"):
            _ = blocks.block_format
        with refused("No model"):
            blocks.read_blocks(one)
        with refused("No model"):
            blocks.write_blocks(one, np.zeros((1, 1), np.uint8))


def a_plan_of_another_kind_is_refused(bench: Bench) -> None:
    with bench.opened() as device, refused("plan again"):
        device.load(bench.subject.model(), replace(bench.plan, device_kind="other"), ignore)


def a_model_that_lacks_a_tensor_is_refused_at_load(bench: Bench) -> None:
    if not bench.subject.computes:
        return
    with bench.opened() as device:
        with refused("up_proj"):
            device.load(bench.subject.model(without="layers.0.up_proj"), bench.plan, ignore)
        with refused("No model"):
            bench.run(Part(TOKENS[:3], 0, BLOCKS), device=device)


def loading_tells_its_progress_and_works_once(bench: Bench) -> None:
    reports: list[LoadProgress] = []
    with bench.opened() as device:
        device.load(bench.subject.model(poisoned=True), bench.plan, reports.append)
        for report in reports:
            assert report.phase in ("open", "weights", "kv", "warmup") and report.unit in ("bytes", "steps")
            assert 0 <= report.done <= report.total
        for phase in {report.phase for report in reports}:
            done = [report.done for report in reports if report.phase == phase]
            assert (done == sorted(done) and done[-1] == reports[-1].total) or phase != reports[-1].phase
        before = answers(bench, device)
        with refused("already loaded"):
            device.load(bench.subject.model(), bench.plan, ignore)
        bench.same(answers(bench, device), before, "after a second load was refused", cut=False)


def _set(name: str, index: Any, value: int) -> Callable[[StepBatch], None]:
    def change(step: StepBatch) -> None:
        getattr(step, name)[index] = value

    return change


def _ban(step: StepBatch) -> None:
    step.sampling.banned = {0: np.array([10**6], np.int32)}


# What is wrong with a step of three sequences, and a word that the message must have.
MALFORMED: list[tuple[Callable[[StepBatch], None], str]] = [
    (_set("token_ids", 0, 10**6), "token_ids"),
    (_set("token_ids", 0, -900), "token_ids"),
    (_set("positions", 0, -1), "positions"),
    (_set("positions", 0, 1), "positions"),
    (_set("slot_mapping", 0, 3), "slot_mapping"),
    (_set("slot_mapping", 0, 24 * 16), "slot_mapping"),
    (_set("slot_mapping", 0, 5 * 16), "slot_mapping"),
    (_set("block_tables", (0, 0), 24), "block_tables"),
    (_set("block_tables", (0, 0), 0), "block_tables"),
    (_set("block_tables", (0, 0), -1), "block_tables"),
    (_set("context_lens", 0, 1), "context_lens"),
    (_set("context_lens", 0, 49), "context_lens"),
    (_set("sample_seqs", 0, 3), "sample_seqs|logit_seqs"),
    (_set("sample_seqs", 0, -1), "sample_seqs|logit_seqs"),
    (_set("query_starts", 1, 0), "query_starts"),
    (_set("query_starts", 3, 7), "query_starts"),
]


def a_malformed_step_is_refused_and_the_next_one_is_right(bench: Bench) -> None:
    parts = (Part(TOKENS[:4], 0, BLOCKS), Part(TOKENS[4:7], 0, OTHER_BLOCKS), Part([8], 0, (20,)))
    before = answers(bench)
    changes = MALFORMED + ([(_ban, "banned")] if bench.subject.computes else [])
    for change, word in changes:
        step = bench.step(*parts)
        change(step)
        with refused(word):
            bench.device.submit(step).result()
    bench.same(answers(bench), before, "after malformed steps", cut=False)


def more_than_the_plan_allows_is_refused(bench: Bench) -> None:
    too_many = [Part([1 + i], 0, (3 + i,)) for i in range(bench.plan.max_num_seqs + 1)]
    with refused("sequences"):
        bench.run(*too_many)
    with refused("tokens"):
        bench.run(Part([1] * (bench.plan.max_batch_tokens + 1), 0, BLOCKS))


def two_sequences_may_not_write_one_block(bench: Bench) -> None:
    with refused("block"):
        bench.run(Part(TOKENS[:3], 0, (9,)), Part(TOKENS[3:5], 3, (9,)))


def blocks_may_lie_anywhere(bench: Bench) -> None:
    first = bench.row(Part(TOKENS[:17], 0, BLOCKS))
    bench.same(bench.row(Part(TOKENS[:17], 0, OTHER_BLOCKS)), first, "other blocks", cut=False)
    bench.same(bench.row(Part(TOKENS[:17], 0, BLOCKS), width=3), first, "a wider table", cut=False)
    bench.run(Part([1] * 16, 0, (23,)))  # somebody else's leavings
    bench.same(bench.row(Part(TOKENS[:17], 0, (23, 1))), first, "blocks that held others", cut=False)


def again_gives_the_same_bits(bench: Bench) -> None:
    parts = (Part(TOKENS[:9], 0, BLOCKS), Part([7], 0, OTHER_BLOCKS))
    first, second = (bench.run(*parts) for _ in range(2))
    for row in range(2):
        bench.same(by_id(first, row), by_id(second, row), "the same step again", cut=False)


def prefill_in_parts_is_prefill_as_a_whole(bench: Bench) -> None:
    whole = bench.row(Part(TOKENS[:17], 0, BLOCKS))
    for cut in (5, 16):
        bench.run(Part(TOKENS[:cut], 0, OTHER_BLOCKS, sampled=False))
        got = bench.row(Part(TOKENS[cut:17], cut, OTHER_BLOCKS))
        bench.same(got, whole, f"cut after {cut} tokens", cut=True)


def decode_is_prefill(bench: Bench) -> None:
    bench.run(Part(TOKENS[:14], 0, OTHER_BLOCKS))
    for count in range(14, 18):  # the last two in another page
        decoded = bench.row(Part([TOKENS[count]], count, OTHER_BLOCKS))
        if count in (14, 17):
            whole = bench.row(Part(TOKENS[: count + 1], 0, BLOCKS))
            bench.same(decoded, whole, f"token {count} decoded", cut=True)


def a_row_is_the_same_alone_and_in_company(bench: Bench) -> None:
    mine = Part([TOKENS[9]], 9, BLOCKS)
    bench.run(Part(TOKENS[:9], 0, BLOCKS), Part(TOKENS[20:23], 0, OTHER_BLOCKS), Part(TOKENS[5:8], 0, (20,)))
    alone = bench.row(mine)
    companies: list[tuple[str, int, Sequence[Part]]] = [
        ("two others decode", 1, (Part([5], 3, OTHER_BLOCKS), mine, Part([6], 3, (20,)))),
        ("another is prefilled", 0, (mine, Part(TOKENS[30:38], 0, (21,)))),
    ]
    for what, row, parts in companies:
        bench.same(bench.row(*parts, row=row), alone, what, cut=True)


def tokens_of_the_step_before_can_be_referred_to(bench: Bench) -> None:
    one, other = Part(TOKENS[:6], 0, BLOCKS), Part(TOKENS[6:10], 0, OTHER_BLOCKS)
    first = bench.run(one, other)
    assert POISONED not in first.token_ids
    known = [int(token) for token in first.token_ids]
    wanted = bench.run(Part([known[1]], 4, OTHER_BLOCKS), Part([known[0]], 6, BLOCKS))
    handles = [
        bench.device.submit(bench.step(one, other)),
        bench.device.submit(bench.step(Part([-2], 4, OTHER_BLOCKS), Part([-1], 6, BLOCKS))),
    ]
    results = [handle.result() for handle in handles]
    assert results[0].token_ids.tolist() == known
    assert results[1].token_ids.tolist() == wanted.token_ids.tolist()
    for row in range(2):
        bench.same(by_id(results[1], row), by_id(wanted, row), "a token that came late", cut=False)
    mixed = bench.run(Part([-2], 7, BLOCKS), Part(TOKENS[:3], 0, (20,)))  # one of a step with prefill
    assert mixed.finite.all()
    with refused("token_ids"):
        bench.run(Part([-3], 8, BLOCKS))


def sampling_may_come_late(bench: Bench) -> None:
    """What hangs on the tokens before is supplied while the model runs; until then neither result nor next step is had."""
    parts = (Part(TOKENS[:6], 0, BLOCKS), Part(TOKENS[6:10], 0, OTHER_BLOCKS))
    if not getattr(bench.device, "samples_late", False):
        return
    allowed = {0: np.array([7], np.int32)}
    early = bench.step(*parts)
    early.sampling.allowed = allowed
    wanted = bench.device.submit(early).result()
    step = bench.step(*parts)
    step.sampling_follows = True
    handle = bench.device.submit(step)
    assert isinstance(handle, LateStep)
    with refused("supplied"):
        handle.result()
    with refused("supplied"):
        bench.device.submit(bench.step(*parts))
    handle.supply(replace(step.sampling, allowed=allowed))
    follower = bench.device.submit(bench.step(Part([-2], 4, OTHER_BLOCKS), Part([-1], 6, BLOCKS)))
    result = handle.result()
    assert result.token_ids.tolist() == wanted.token_ids.tolist() and result.token_ids[0] == 7
    for row in range(2):
        bench.same(by_id(result, row), by_id(wanted, row), "sampling that came late", cut=False)
    known = bench.run(Part([int(wanted.token_ids[1])], 4, OTHER_BLOCKS), Part([7], 6, BLOCKS))
    assert follower.result().token_ids.tolist() == known.token_ids.tolist()


def a_device_closes_with_a_step_that_waits_for_its_sampling(bench: Bench) -> None:
    with bench.opened() as device:
        if not getattr(device, "samples_late", False):
            return
        device.load(bench.subject.model(poisoned=True), bench.plan, ignore)
        step = bench.step(Part(TOKENS[:6], 0, BLOCKS))
        step.sampling_follows = True
        device.submit(step)
        device.close()


def a_step_is_left_as_it_was(bench: Bench) -> None:
    """Steps share arrays: what a device wrote into one would be in another."""
    bench.run(Part(TOKENS[:3], 0, BLOCKS), Part(TOKENS[:4], 0, OTHER_BLOCKS))
    ids = np.array([3, 8], np.int32)
    sampling: dict[str, Any] = {
        "temperatures": 0.8, "top_ks": 5, "top_ps": 0.9, "banned": {0: ids}, "logit_bias": {1: (ids, np.ones(2, np.float32))},
        "penalties": {1: Penalties(1.1, 0.2, 0.1, ids.copy(), ids.copy())},
    }  # fmt: skip
    step = bench.step(Part([-1], 3, BLOCKS), Part(TOKENS[4:6], 4, OTHER_BLOCKS), **sampling)
    given, before = replace(step), deepcopy(step)
    bench.device.submit(step).result()
    for now, then in zip(arrays_in(given), arrays_in(before), strict=True):
        assert np.array_equal(now, then)


def arrays_in(value: Any) -> list[npt.NDArray[Any]]:
    """Every array of a step."""
    if isinstance(value, np.ndarray):
        return [value]
    if is_dataclass(value):
        return [array for field in fields(value) for array in arrays_in(getattr(value, field.name))]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [array for part in parts for array in arrays_in(part)]


def results_may_be_taken_in_any_order(bench: Bench) -> None:
    parts = [Part([5 + i], 0, (3 + i,)) for i in range(4)]
    wanted = [bench.run(part) for part in parts]
    handles = [bench.device.submit(bench.step(part)) for part in parts]
    got = [handle.result() for handle in reversed(handles)][::-1]
    for result, expected, handle in zip(got, wanted, handles, strict=True):
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        bench.same(by_id(result, 0), by_id(expected, 0), "a result taken late", cut=False)
        assert handle.result().token_ids.tolist() == expected.token_ids.tolist(), "it can be taken again"


def a_nan_stays_in_its_row(bench: Bench) -> None:
    if not bench.subject.computes:
        return
    good = Part(TOKENS[:4], 0, BLOCKS), Part(TOKENS[4:9], 0, OTHER_BLOCKS)
    bad = Part([5, POISONED], 0, (20,))
    alone = [bench.row(part) for part in good]
    for simple in (False, True):
        options: dict[str, Any] = {"num_logprobs": -1} if simple else {}
        result = bench.run(good[0], bad, good[1], **options)
        assert result.finite.tolist() == [True, False, True]
        if not simple:
            bench.same(by_id(result, 0), alone[0], "before the bad row", cut=True)
            bench.same(by_id(result, 2), alone[1], "after the bad row", cut=True)
    after = bench.run(Part([-2], 2, (20,)), Part([7], 4, BLOCKS), num_logprobs=-1)
    assert after.finite.tolist() == [False, True], "its cache is bad, the others' is not"
    bench.same(bench.row(Part(TOKENS[:4], 0, (20,))), alone[0], "the bad row's block, used again", cut=False)


def a_row_with_no_token_left_is_flagged(bench: Bench) -> None:
    vocab = 259 if not bench.subject.computes else CONFIG.vocab_size
    parts = (Part(TOKENS[:3], 0, BLOCKS), Part(TOKENS[3:6], 0, OTHER_BLOCKS))
    wanted = bench.run(*parts)
    got = bench.run(*parts, banned={0: np.arange(vocab, dtype=np.int32)})
    assert got.finite.tolist() == [False, True]
    assert got.token_ids[1] == wanted.token_ids[1]


def seeds_decide_and_nothing_else(bench: Bench) -> None:
    """At a temperature that makes all tokens equal, the token is the seed's own uniform times the vocabulary."""
    part = Part(TOKENS[:3], 0, BLOCKS)
    drawn = []
    for seed, choice, cursor in ((1, 0, 0), (1, 0, 1), (1, 1, 0), (2**63 + 5, 0, 0), (1, 0, 0)):
        column: dict[str, Any] = {"seeds": seed, "choices": choice, "cursors": cursor}
        result = bench.run(part, temperatures=1e30, num_logprobs=-1, **column)
        drawn.append(int(result.token_ids[0]))
        if bench.subject.computes:
            uniform = uniforms(np.array([seed], np.uint64), np.array([choice], np.int32), np.array([cursor], np.int32))
            assert drawn[-1] == int(uniform[0] * CONFIG.vocab_size)
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) > 1
    both = bench.run(
        part, Part(TOKENS[:3], 0, OTHER_BLOCKS), temperatures=1e30, seeds=np.array([9, 1]), num_logprobs=-1
    )
    assert int(both.token_ids[1]) == drawn[0], "another row's seed does not matter"


def hidden_states_are_pooled(bench: Bench) -> None:
    parts = (Part(TOKENS[:6], 0, BLOCKS, sampled=False), Part(TOKENS[6:9], 0, OTHER_BLOCKS))
    both = bench.run(*parts, pool=(1, 0))
    assert both.embeddings is not None
    assert both.embeddings.shape == (2, CONFIG.hidden_size) and both.embeddings.dtype == np.float32
    assert len(both.token_ids) == 1
    for place, part in enumerate((parts[1], parts[0])):
        alone = bench.run(replace(part, sampled=False), pool=(0,), num_logprobs=-1)
        assert alone.embeddings is not None and len(alone.token_ids) == 0
        bench.same(both.embeddings[place], alone.embeddings[0], "pooled alone", cut=True)


def given_tokens_are_scored(bench: Bench) -> None:
    tokens = TOKENS[:8]
    step = bench.step(Part(tokens, 0, BLOCKS))
    step.score_rows = np.arange(7, dtype=np.int32)
    step.score_targets = np.array(tokens[1:], np.int32)
    step.num_score_logprobs = 2
    result = bench.device.submit(step).result()
    assert result.score_logprobs is not None
    assert result.score_top_ids is not None and result.score_top_logprobs is not None
    assert result.score_logprobs.shape == (7,) and result.score_top_ids.shape == (7, 2)
    assert (result.score_logprobs < 0).all()
    if not bench.subject.computes:
        return
    assert (result.score_logprobs <= result.score_top_logprobs[:, 0]).all()
    for end in (1, 5):
        row = bench.row(Part(tokens[:end], 0, OTHER_BLOCKS))
        bench.same(result.score_logprobs[end - 1], row[tokens[end]], f"after {end} tokens", cut=True)


def blocks_move_to_another_device(bench: Bench) -> None:
    bench.run(Part(TOKENS[:17], 0, BLOCKS))
    wanted = bench.row(Part([7], 17, BLOCKS))
    bench.run(Part(TOKENS[:17], 0, BLOCKS))  # the block as it was before the last token
    source = bench.device
    assert isinstance(source, BlockDevice)
    contents = source.read_blocks(np.array(BLOCKS[:2], np.int32))
    assert contents.shape == (2, source.block_format.block_bytes)
    source.write_blocks(np.array([21, 11], np.int32), contents)
    bench.same(bench.row(Part([7], 17, (21, 11))), wanted, "moved blocks", cut=False)
    with refused("shape"):
        source.write_blocks(np.array([3], np.int32), np.zeros((1, 3), np.uint8))


def blocks_go_to_host_rows_and_come_back(bench: Bench) -> None:
    bench.run(Part(TOKENS[:17], 0, BLOCKS))
    wanted = bench.row(Part([7], 17, BLOCKS))
    bench.run(Part(TOKENS[:17], 0, BLOCKS))
    device = bench.device
    assert isinstance(device, BlockDevice) and device.max_num_copied_blocks >= 1
    rows = device.new_rows(3)
    assert rows.shape == (3, device.block_format.block_bytes) and rows.dtype == np.uint8
    for block, row in zip(BLOCKS[:2], (rows[2], rows[0]), strict=True):
        copied(device.copy_out(np.array([block], np.int32), [row]))
    assert (rows[[2, 0]] == device.read_blocks(np.array(BLOCKS[:2], np.int32))).all()
    # A step that was submitted before is in the copy.
    bench.run(Part(TOKENS[5:22], 0, BLOCKS))
    bench.run(Part(TOKENS[:17], 0, BLOCKS))
    copied(device.copy_out(np.array(BLOCKS[:1], np.int32), [rows[1]]))
    assert (rows[1] == rows[2]).all()
    for block, row in zip((21, 11), (rows[2], rows[0]), strict=True):
        copied(device.copy_in([row], np.array([block], np.int32)))
    bench.same(bench.row(Part([7], 17, (21, 11))), wanted, "blocks that came back", cut=False)


def copied(copy: BlockCopy) -> None:
    """Wait for it."""
    deadline = time.monotonic() + 10
    while not copy.is_done():
        assert time.monotonic() < deadline, "the copy does not end"
        time.sleep(0.0005)
    assert copy.seconds >= 0


def the_largest_step_of_the_plan_runs(bench: Bench) -> None:
    plan = bench.plan
    bench.run(Part(TOKENS[:24], 0, BLOCKS))
    full = bench.run(Part([*TOKENS[:23], 5], 24, BLOCKS))
    assert full.finite.all() and plan.max_context_tokens == 48
    rows = bench.run(*(Part([9 + i], 0, (14 + i,)) for i in range(plan.max_num_seqs)), num_logprobs=-1)
    assert len(rows.token_ids) == plan.max_num_seqs and rows.finite.all()


def numbers_are_those_of_a_float64_model(bench: Bench) -> None:
    if not bench.subject.computes:
        return
    from dragoman_agent.device.cpu_native import llama_shape
    from dragoman_kernels.cpu.reference import llama_reference

    model = bench.subject.model()
    logits, hidden = llama_reference(llama_shape(model.config, 48), model.values, np.array(TOKENS[:17]))
    exact = logits[-1] - logits[-1].max()
    exact -= np.log(np.exp(exact).sum())
    result = bench.run(Part(TOKENS[:17], 0, BLOCKS), pool=(0,))
    worst = float(np.abs(by_id(result, 0) - exact).max())
    assert result.embeddings is not None
    assert worst <= bench.subject.tolerance, f"log-probabilities {worst:.2e} from float64"
    far = float(np.linalg.norm(result.embeddings[0] - hidden[-1]) / np.linalg.norm(hidden[-1]))
    assert far <= bench.subject.tolerance, f"hidden state {far:.2e} from float64"
    assert int(result.token_ids[0]) == int(exact.argmax())


def a_closed_device_does_nothing_more(bench: Bench) -> None:
    device = bench.subject.open()
    device.load(bench.subject.model(), bench.plan, ignore)
    handle = device.submit(bench.step(Part(TOKENS[:3], 0, BLOCKS)))
    assert handle.result().finite.all()
    device.close()
    device.close()
    with refused("No model"):
        bench.run(Part(TOKENS[:3], 0, BLOCKS), device=device)
    with refused("No model"):
        cast(BlockDevice, device).read_blocks(np.array([1], np.int32))
    with refused("closed"):
        device.load(bench.subject.model(), bench.plan, ignore)
    assert handle.result().finite.all(), "what was taken stays"


CASES: tuple[Callable[[Bench], None], ...] = (
    is_a_device,
    nothing_works_before_a_model_is_loaded,
    a_plan_of_another_kind_is_refused,
    a_model_that_lacks_a_tensor_is_refused_at_load,
    loading_tells_its_progress_and_works_once,
    a_malformed_step_is_refused_and_the_next_one_is_right,
    more_than_the_plan_allows_is_refused,
    two_sequences_may_not_write_one_block,
    blocks_may_lie_anywhere,
    again_gives_the_same_bits,
    prefill_in_parts_is_prefill_as_a_whole,
    decode_is_prefill,
    a_row_is_the_same_alone_and_in_company,
    tokens_of_the_step_before_can_be_referred_to,
    sampling_may_come_late,
    a_device_closes_with_a_step_that_waits_for_its_sampling,
    a_step_is_left_as_it_was,
    results_may_be_taken_in_any_order,
    a_nan_stays_in_its_row,
    a_row_with_no_token_left_is_flagged,
    seeds_decide_and_nothing_else,
    hidden_states_are_pooled,
    given_tokens_are_scored,
    blocks_move_to_another_device,
    blocks_go_to_host_rows_and_come_back,
    the_largest_step_of_the_plan_runs,
    numbers_are_those_of_a_float64_model,
    a_closed_device_does_nothing_more,
)
