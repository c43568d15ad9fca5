"""What the library is given of a step's prompts."""

import numpy as np
import pytest

from dragoman_agent.device.cuda_library import AttentionSizes

SIZES = AttentionSizes(
    num_heads=4, num_kv_heads=2, head_dim=8, page_size=16, num_blocks=9, max_num_seqs=3, max_num_tokens=40,
    max_context_tokens=100,
)  # fmt: skip


def starts(*lengths: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def test_words_place_each_prompt_and_leave_the_rest_empty() -> None:
    words = SIZES.words(starts(5, 7), np.array([5, 30], np.int32))
    assert words.dtype == np.int32
    assert words[:4].tolist() == [0, 5 * 32, 12 * 32, 12 * 32]  # values of q, the unused one behind the last
    assert words[4:7].tolist() == [5, 7, 0]
    assert words[7:].tolist() == [5, 30, 0]


@pytest.mark.parametrize(
    ("lengths", "fits"), [((40,), True), ((41,), False), ((1, 2, 3), True), ((1, 1, 1, 1), False), ((), False)]
)
def test_only_steps_that_fit_the_graph_are_run(lengths: tuple[int, ...], fits: bool) -> None:
    assert SIZES.can_run(starts(*lengths)) is fits


def test_the_table_holds_the_longest_context() -> None:
    assert SIZES.table_width == 7
