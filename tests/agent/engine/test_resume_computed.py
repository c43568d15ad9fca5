"""A stream that was cut goes on with the same tokens where they are computed: the CPU's compiled kernels, beside other requests.

Logprobs are compared in every bit, so that it shows when a prompt's arithmetic is another than a decode step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agent.device.conformance.subjects import plan_of
from tests.agent.device.conformance.tiny_model import TinyModel
from tests.needs import need_cpu_kernels

from dragoman_agent.device.cpu_road import KV_DTYPES, NATIVE_FLOAT32, NATIVE_INT8
from dragoman_agent.device.null_model import NullModel
from dragoman_agent.engine.core import EngineCore
from dragoman_agent.engine.local import build_core, run_all
from dragoman_agent.engine.messages import Delta, Failed, GrammarSpec, Sampling, Start, Stop
from dragoman_agent.model.layout import TensorLayout
from dragoman_kernels.tensor import QuantTensor

NULL = NullModel()
LOTS_OF_CREDIT = 1 << 30
NUM_TOKENS = 18
PROMPT = [7 * i % 251 for i in range(40)]
SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"temperature": 0.0, "frequency_penalty": 0.8, "logit_bias": {65: 2.0}},
    {"temperature": 1.0, "seed": 13, "grammar": GrammarSpec("regex", "[a-z]{2}(,[0-9]{1,3})+;")},
]
Answer = list[tuple[int, float]]  # token and logprob


class TextModel(TinyModel):
    """The tiny model with the byte tokenizer's vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.config = replace(self.config, name="tiny-text", vocab_size=NULL.config.vocab_size)
        rng = np.random.default_rng(8)
        for name in ("embed_tokens", "lm_head"):
            wide = rng.normal(0, 0.4, (self.config.vocab_size, self.config.hidden_size)).astype(np.float32)
            self.values[name] = (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        self.tokenizer, self.digest = NULL.tokenizer, "ab" * 32


class Int8Model(TextModel):
    """The same with matrices in blocks of 32 numbers of eight bits, each block times a float16 (Q8_0 of GGUF)."""

    def layout(self, name: str) -> TensorLayout:
        found = super().layout(name)
        if found.shape[0] == 1:
            return found
        return TensorLayout("Q8_0", found.shape, found.shape[0] * found.shape[1] // 32 * 34)

    def tensor(self, name: str) -> QuantTensor:
        values = np.atleast_2d(self.values[name])
        if len(values) == 1:
            return super().tensor(name)
        blocks = values.reshape(len(values), -1, 32)
        scales = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
        numbers = np.rint(blocks / np.maximum(scales.astype(np.float32), 1e-8)).astype(np.int8)
        data = np.concatenate((scales.view(np.uint8), numbers.view(np.uint8)), axis=2).reshape(len(values), -1)
        return QuantTensor("Q8_0", (values.shape[0], values.shape[1]), data)


@pytest.fixture(scope="module", params=[NATIVE_FLOAT32, NATIVE_INT8])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """An engine with few blocks and small chunks, so that prompts are cut and sequences preempted."""
    need_cpu_kernels()
    from dragoman_agent.device.cpu import CpuDevice

    model = Int8Model() if request.param == NATIVE_INT8 else TextModel()
    plan = plan_of(
        "cpu", request.param, KV_DTYPES[request.param], model_name=model.name, num_blocks=20, max_context_tokens=128,
    )  # fmt: skip
    device = CpuDevice()
    device.load(model, plan, lambda _: None)  # type: ignore[arg-type]
    yield build_core(device, model, plan)  # type: ignore[arg-type]
    device.close()


def start(name: str, shape: dict[str, Any], delivered: Sequence[list[int]] = (), **more: Any) -> Start:
    sampling = Sampling(**{"num_logprobs": 0, **shape})
    stop = Stop(max_output_tokens=NUM_TOKENS, strings=more.pop("strings", []), eos_token_ids=[258])
    return Start(
        name, more.pop("prompt", PROMPT), sampling, stop, credit=LOTS_OF_CREDIT, delivered=list(delivered),
        cache_salt=name, **more,
    )  # fmt: skip


def run(core: EngineCore, *starts: Start) -> dict[tuple[str, int], Answer]:
    found: dict[tuple[str, int], Answer] = {(s.request_id, c): [] for s in starts for c in range(s.num_choices)}
    for event in run_all(core, starts):
        assert not isinstance(event, Failed), event
        if isinstance(event, Delta):
            pairs = zip(event.token_ids, (entry.logprob for entry in event.logprobs), strict=True)
            found[event.request_id, event.choice].extend(pairs)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape))
def test_re_entry_gives_the_same_tokens_and_bits(core: EngineCore, shape: dict[str, Any]) -> None:
    whole = run(core, start("whole", shape))["whole", 0]
    assert len(whole) > 4
    tokens = [token for token, _ in whole]
    for cut in range(0, len(whole), 3):
        other = start("other", {"temperature": 1.0, "seed": cut}, prompt=PROMPT[::-1])
        found = run(core, other, start("again", shape, [tokens[:cut]]))
        assert found["again", 0] == whole[cut:], f"cut after {cut}"


def test_choices_go_on_each_from_where_it_was(core: EngineCore) -> None:
    shape = {"temperature": 0.9, "seed": 21}
    options = {"num_choices": 2, "strings": ["qq", "zx"]}
    whole = run(core, start("n", shape, **options))
    for cuts in ((0, 5), (9, 2), (17, 17)):
        delivered = [[token for token, _ in whole["n", c]][:cut] for c, cut in enumerate(cuts)]
        found = run(core, start("n", shape, delivered, **options))
        for c, cut in enumerate(cuts):
            assert found["n", c] == whole["n", c][cut:]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.5, 1.3]), top_p=st.sampled_from([0.7, 1.0]),
    penalty=st.sampled_from([1.0, 1.5]), length=st.integers(1, 60), cut=st.integers(0, NUM_TOKENS - 1),
    companions=st.integers(0, 3),
)  # fmt: skip
def test_any_request_cut_anywhere_in_any_company(
    core: EngineCore,
    seed: int,
    temperature: float,
    top_p: float,
    penalty: float,
    length: int,
    cut: int,
    companions: int,
) -> None:
    shape = {"temperature": temperature, "seed": seed, "top_p": top_p, "repetition_penalty": penalty}
    prompt = [(seed + 31 * i) % 256 for i in range(length)]
    whole = run(core, start("whole", shape, prompt=prompt))["whole", 0]
    tokens = [token for token, _ in whole]
    others = [start(f"other{i}", {"temperature": 1.0, "seed": i}, prompt=PROMPT[i:]) for i in range(companions)]
    cut = min(cut, len(whole) - 1)
    assert run(core, *others, start("again", shape, [tokens[:cut]], prompt=prompt))["again", 0] == whole[cut:]
